# Builds an AMI of a node or a server from Debian or Ubuntu with install.sh.
#
#   packer init infra/image
#   packer build -var region=eu-west-1 -var wheel=dist/everstep-0.1.0-py3-none-any.whl -var role=node -var gpu=true \
#     -var iam_instance_profile=everstep-image infra/image
#
# Packer connects through Session Manager, so the instance accepts no connections. Source of the settings:
# https://developer.hashicorp.com/packer/integrations/hashicorp/amazon/latest/components/builder/ebs
#
# The image holds no settings and no identity. User data writes /etc/everstep/agent.env or server.env.

packer {
  required_version = ">= 1.9"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3, < 2"
    }
  }
}

variable "region" {
  type = string
}

variable "wheel" {
  type        = string
  description = "Path of Everstep's wheel, which `make wheel` builds."
}

variable "role" {
  type    = string
  default = "node"

  validation {
    condition     = contains(["node", "server"], var.role)
    error_message = "Use node or server."
  }
}

variable "gpu" {
  type        = bool
  default     = false
  description = "Install NVIDIA's driver, its fabric manager and EFA. Needs an instance type with a GPU."
}

variable "instance_type" {
  type        = string
  default     = null
  description = "Type of the instance that builds the image. Null: a small one with or without a GPU."
}

variable "source_name" {
  type        = string
  default     = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*"
  description = "Name of the AMI to start from."
}

variable "source_owner" {
  type        = string
  default     = "099720109477"
  description = "Account of the AMI to start from. Default: Canonical. Debian: 136693071363."
}

variable "ssh_username" {
  type        = string
  default     = "ubuntu"
  description = "User of the AMI to start from. Debian: admin."
}

variable "vpc_id" {
  type        = string
  default     = null
  description = "VPC of the instance. Needs subnet_id. Null: the subnet's VPC, or the default VPC."
}

variable "subnet_id" {
  type        = string
  default     = null
  description = "Subnet of the instance, with a route to the internet. Null: a subnet of the default VPC."
}

variable "iam_instance_profile" {
  type        = string
  default     = null
  description = "Instance profile with the policy AmazonSSMManagedInstanceCore. Needed without ssh_source_cidrs."
}

variable "ssh_source_cidrs" {
  type        = list(string)
  default     = []
  description = "Networks that may connect to port 22, for an AMI without Systems Manager's agent. Empty: none."
}

locals {
  wheel         = "/tmp/${basename(var.wheel)}"
  type          = coalesce(var.instance_type, var.gpu ? "g5.2xlarge" : "t3.medium")
  ssh_interface = length(var.ssh_source_cidrs) == 0 ? "session_manager" : null
}

source "amazon-ebs" "this" {
  region        = var.region
  instance_type = local.type
  ssh_username  = var.ssh_username
  ami_name      = "everstep-${var.role}-${formatdate("YYYYMMDD-hhmmss", timestamp())}"
  imds_support  = "v2.0"

  vpc_id               = var.vpc_id
  subnet_id            = var.subnet_id
  iam_instance_profile = var.iam_instance_profile
  ssh_interface        = local.ssh_interface
  # Packer's default is 0.0.0.0/0. With session_manager, its temporary security group has no inbound rule
  # (SkipSSHRuleCreation in https://github.com/hashicorp/packer-plugin-amazon).
  temporary_security_group_source_cidrs = var.ssh_source_cidrs

  source_ami_filter {
    owners      = [var.source_owner]
    most_recent = true
    filters = {
      name                = var.source_name
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = 50
    volume_type           = "gp3"
    delete_on_termination = true
  }

  tags = {
    Name            = "everstep-${var.role}"
    "everstep:role" = var.role
  }
}

build {
  sources = ["source.amazon-ebs.this"]

  provisioner "file" {
    source      = var.wheel
    destination = local.wheel
  }

  provisioner "shell" {
    execute_command = "sudo -H sh -c '{{ .Vars }} sh -e {{ .Path }}'"
    inline = [
      "cloud-init status --wait || [ $? -eq 2 ]", # 2: finished, with a warning
      "command -v python3 >/dev/null || apt-get install -q -y python3",
      "python3 -m zipfile -e ${local.wheel} /tmp/everstep",
      "sh /tmp/everstep/infra/image/install.sh ${var.role} ${local.wheel} ${var.gpu ? "--gpu" : ""}",
      "rm -rf /tmp/everstep ${local.wheel} /var/lib/everstep /etc/everstep/*.env",
      "cloud-init clean --logs --machine-id",
    ]
  }
}
