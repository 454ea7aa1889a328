# A small installation for a first job: one control plane with SQLite, and a fleet of small nodes without GPUs.
#
# The instances have public addresses, so that they can install packages, and no rule lets anybody in. People reach the
# control plane through Systems Manager. `terraform destroy` removes everything, checkpoints included.

data "aws_caller_identity" "this" {}

data "aws_availability_zones" "this" {
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_ssm_parameter" "image" {
  count = var.image_id == null ? 1 : 0
  name  = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

locals {
  zone     = data.aws_availability_zones.this.names[0]
  fleet    = "${var.name}-main"
  image_id = var.image_id == null ? nonsensitive(data.aws_ssm_parameter.image[0].value) : var.image_id
  port     = 8443
  tags     = merge(var.tags, { "everstep:installation" = var.name })
  bucket   = "${var.name}-${data.aws_caller_identity.this.account_id}-${var.region}"

  # Public, and equal for the server and its agents: agents include this id in the requests that they sign.
  server_id = md5("everstep ${data.aws_caller_identity.this.account_id} ${var.region} ${var.name}")

  install = {
    bucket = module.storage.bucket
    wheel  = aws_s3_object.wheel.key
    sha256 = filesha256(var.wheel)
    region = var.region
    before = ""
  }
}

module "network" {
  source      = "../modules/network"
  name        = var.name
  zones       = [local.zone]
  is_public   = true
  server_port = local.port
}

module "storage" {
  source  = "../modules/storage"
  bucket  = local.bucket
  is_kept = false
}

module "secrets" {
  source        = "../modules/secrets"
  name          = var.name
  recovery_days = 0
}

module "events" {
  source      = "../modules/events"
  name        = var.name
  group_names = [local.fleet]
}

module "identity" {
  source      = "../modules/identity"
  name        = var.name
  bucket_arn  = module.storage.arn
  secret_arns = values(module.secrets.arns)
  queue_arn   = module.events.queue_arn

  job_role_arns        = var.job_role_arns
  job_secret_arns      = var.job_secret_arns
  permissions_boundary = var.permissions_boundary
}

resource "aws_s3_object" "wheel" {
  bucket = module.storage.bucket
  key    = "release/${basename(var.wheel)}"
  source = var.wheel
  etag   = filemd5(var.wheel)

  # An object can have ten tags only, and its bucket has the tags already.
  override_provider {
    default_tags {
      tags = {}
    }
  }
}

module "control_plane" {
  source             = "../modules/control_plane"
  name               = var.name
  subnet_id          = module.network.subnet_ids[local.zone]
  security_group_ids = [module.network.server_security_group_id]
  instance_profile   = module.identity.server_profile
  instance_type      = var.server_type
  image_id           = local.image_id

  user_data = templatefile("${path.module}/../user_data.sh.tftpl", merge(local.install, {
    role = "server"
    unit = "server"
    settings = {
      EVERSTEP_BUCKET           = module.storage.bucket
      EVERSTEP_AWS_REGION       = var.region
      EVERSTEP_EVENTS_QUEUE_URL = module.events.queue_url
      EVERSTEP_SECRETS_PREFIX   = module.secrets.prefix
      EVERSTEP_SERVER_ID        = local.server_id
      SERVER_OPTIONS            = join(" ", concat(["--host 0.0.0.0 --port ${local.port} --allow-non-loopback"], var.server_options))
    }
  }))
}

module "fleet" {
  source             = "../modules/fleet"
  name               = local.fleet
  installation       = var.name
  subnet_id          = module.network.subnet_ids[local.zone]
  security_group_ids = [module.network.node_security_group_id]
  instance_profile   = module.identity.node_profile
  instance_type      = var.node_type
  image_id           = local.image_id
  max_size           = var.max_nodes
  tags               = local.tags

  user_data = var.node_user_data != null ? var.node_user_data : templatefile("${path.module}/../user_data.sh.tftpl", merge(local.install, {
    role = "node"
    unit = "agent"
    settings = {
      EVERSTEP_FLEET     = local.fleet
      EVERSTEP_SERVER_ID = local.server_id
      AWS_REGION         = var.region
      AGENT_OPTIONS      = "--control-plane-url http://${module.control_plane.private_ip}:${local.port} --allow-non-loopback"
    }
  }))
}
