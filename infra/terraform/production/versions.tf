# All modules and roots have the same range. They use nothing that version 6 removed, renamed or changed, except
# `data.aws_region.this.name`: newer versions have `region` in its place, and both versions have `id`. Some releases of 6
# warn about `id`.
#
# Source: https://registry.terraform.io/providers/hashicorp/aws/latest/docs/guides/version-6-upgrade
terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = local.tags
  }
}
