# An installation for production: two servers behind a load balancer with TLS, PostgreSQL with a standby, and fleets.
#
# Nothing has a public address, unless `is_public` says so for the load balancer. AWS is reached through VPC endpoints.
# Servers and nodes start from an image that contains Everstep (infra/image).

data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}

locals {
  port   = 8443
  tags   = merge(var.tags, { "everstep:installation" = var.name })
  bucket = "${var.name}-${data.aws_caller_identity.this.account_id}-${var.region}"
  url    = "https://${var.domain_name}"
  fleets = { for name, fleet in var.fleets : "${var.name}-${name}" => fleet }

  # Servers and nodes start from an image with Everstep.
  image         = { wheel = "", sha256 = "", bucket = "", region = "", before = "" }
  password_file = "/run/everstep-database/password"

  # Through the NAT gateway, nodes reach a public load balancer.
  has_nat = var.has_nat || (var.is_public && var.vpc_id == null)

  # A public load balancer needs subnets with a route to an internet gateway.
  public_subnet_ids = var.vpc_id == null ? module.network.public_subnet_ids : var.public_subnet_ids

  server_options = concat(
    ["--port ${local.port} --trusted-proxies ${join(",", module.network.vpc_cidrs)}"],
    [for arn in var.event_bus_arns : "--export-events ${arn}"],
    var.server_options,
  )

  # Public, and equal for all servers and agents: agents include this id in the requests that they sign.
  server_id = md5("everstep ${data.aws_caller_identity.this.account_id} ${var.region} ${var.name}")
}

data "aws_iam_policy_document" "key" {
  statement {
    sid       = "Account"
    actions   = ["kms:*"]
    resources = ["*"] # the key that has the policy

    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.this.partition}:iam::${data.aws_caller_identity.this.account_id}:root"]
    }
  }

  statement {
    sid       = "Alarms"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "Objects, secrets, database and alarms of ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = var.is_protected ? 30 : 7
  policy                  = data.aws_iam_policy_document.key.json
}

module "network" {
  source          = "../modules/network"
  name            = var.name
  vpc_id          = var.vpc_id
  subnet_ids      = var.subnet_ids
  route_table_ids = var.route_table_ids
  zones           = var.zones
  server_port     = local.port
  has_nat         = local.has_nat

  has_load_balancer  = true
  has_public_subnets = var.is_public && var.vpc_id == null
  existing_endpoints = var.existing_endpoints
  extra_endpoints    = length(var.event_bus_arns) == 0 ? [] : ["events"]
}

module "storage" {
  source       = "../modules/storage"
  bucket       = local.bucket
  kms_key_arn  = aws_kms_key.this.arn
  is_versioned = true
  is_kept      = var.is_protected
}

module "secrets" {
  source        = "../modules/secrets"
  name          = var.name
  kms_key_arn   = aws_kms_key.this.arn
  recovery_days = var.is_protected ? 7 : 0
}

module "database" {
  source                   = "../modules/database"
  name                     = var.name
  vpc_id                   = module.network.vpc_id
  subnet_ids               = values(module.network.subnet_ids)
  server_security_group_id = module.network.server_security_group_id
  kms_key_arn              = aws_kms_key.this.arn
  instance_class           = var.database_class
  is_protected             = var.is_protected
}

module "events" {
  source      = "../modules/events"
  name        = var.name
  group_names = keys(local.fleets)
}

module "identity" {
  source               = "../modules/identity"
  name                 = var.name
  bucket_arn           = module.storage.arn
  kms_key_arn          = aws_kms_key.this.arn
  secret_arns          = values(module.secrets.arns)
  database_secret_arn  = module.database.secret_arn
  queue_arn            = module.events.queue_arn
  projects             = var.projects
  job_role_arns        = var.job_role_arns
  job_secret_arns      = var.job_secret_arns
  event_bus_arns       = var.event_bus_arns
  permissions_boundary = var.permissions_boundary
}

module "servers" {
  source                   = "../modules/servers"
  name                     = var.name
  vpc_id                   = module.network.vpc_id
  subnet_ids               = values(module.network.subnet_ids)
  server_security_group_id = module.network.server_security_group_id
  node_security_group_id   = module.network.node_security_group_id
  balancer_subnet_ids      = var.is_public ? local.public_subnet_ids : values(module.network.subnet_ids)
  client_cidrs             = var.client_cidrs
  is_public                = var.is_public
  has_nat                  = var.is_public && local.has_nat
  nat_address              = module.network.nat_address
  certificate_arn          = var.certificate_arn
  server_port              = local.port
  instance_profile         = module.identity.server_profile
  instance_type            = var.server_type
  image_id                 = var.image_id
  root_device              = var.root_device
  is_protected             = var.is_protected
  tags                     = local.tags

  user_data = var.server_user_data != null ? var.server_user_data : templatefile("${path.module}/../user_data.sh.tftpl", merge(local.image, {
    role = "server"
    unit = "server"
    settings = {
      EVERSTEP_BUCKET           = module.storage.bucket
      EVERSTEP_AWS_REGION       = var.region
      EVERSTEP_EVENTS_QUEUE_URL = module.events.queue_url
      EVERSTEP_SECRETS_PREFIX   = module.secrets.prefix
      EVERSTEP_SERVER_ID        = local.server_id
      EVERSTEP_DATABASE_URL     = module.database.url
      PGPASSFILE                = local.password_file
      SERVER_OPTIONS            = join(" ", local.server_options)
    }
    before = templatefile("${path.module}/server.sh.tftpl", {
      program    = file("${path.module}/database_password.py")
      region     = var.region
      secret_arn = module.database.secret_arn
      file       = local.password_file
    })
  }))
}

resource "aws_placement_group" "this" {
  for_each = { for name, fleet in local.fleets : name => fleet if fleet.is_clustered }
  name     = each.key
  strategy = "cluster"
}

module "fleet" {
  source                   = "../modules/fleet"
  for_each                 = local.fleets
  name                     = each.key
  installation             = var.name
  subnet_id                = module.network.subnet_ids[each.value.zone]
  security_group_ids       = [module.network.node_security_group_id]
  instance_profile         = module.identity.node_profile
  instance_type            = each.value.instance_type
  other_instance_types     = each.value.other_instance_types
  network_interfaces       = each.value.network_interfaces
  spot_percentage          = each.value.spot_percentage
  image_id                 = each.value.image_id
  root_device              = var.root_device
  root_gigabytes           = each.value.root_gigabytes
  max_size                 = each.value.max_nodes
  placement_group          = each.value.is_clustered ? aws_placement_group.this[each.key].name : each.value.placement_group
  capacity_reservation_ids = each.value.capacity_reservation_ids
  is_capacity_block        = each.value.is_capacity_block
  is_reserved_only         = each.value.is_reserved_only
  tags                     = local.tags

  user_data = var.node_user_data != null ? var.node_user_data : templatefile("${path.module}/../user_data.sh.tftpl", merge(local.image, {
    role = "node"
    unit = "agent"
    settings = {
      EVERSTEP_FLEET     = each.key
      EVERSTEP_SERVER_ID = local.server_id
      AWS_REGION         = var.region
      AGENT_OPTIONS      = "--control-plane-url ${local.url}"
    }
  }))
}

module "observability" {
  source             = "../modules/observability"
  name               = var.name
  kms_key_arn        = aws_kms_key.this.arn
  emails             = var.alarm_emails
  runbook_url        = "${local.url}/runbook.html"
  server_count       = 2
  load_balancer      = module.servers.load_balancer
  target_group       = module.servers.target_group
  database_id        = module.database.id
  queue_name         = module.events.queue_name
  refused_queue_name = module.events.refused_queue_name
}
