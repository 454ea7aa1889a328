# Secrets of the control plane. Terraform creates them without a value, so that its state contains none.
#
# The first server that starts generates each value and stores it. All further servers read it.

locals {
  descriptions = {
    "server-secret" = "Derives the keys of generations. A new value ends the generations that run."
    "admin-token"   = "Token of the first administrator."
  }
}

resource "aws_secretsmanager_secret" "this" {
  for_each                = local.descriptions
  name                    = "${var.name}/${each.key}"
  description             = each.value
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}
