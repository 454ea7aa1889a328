# One control plane with its database on its own volume.
#
# Without the volume, the installation loses the records of its jobs. Its secrets are in Secrets Manager, and
# checkpoints are in S3.

resource "aws_instance" "this" {
  ami                    = var.image_id
  instance_type          = var.instance_type
  subnet_id              = var.subnet_id
  vpc_security_group_ids = var.security_group_ids
  iam_instance_profile   = var.instance_profile
  user_data              = var.user_data
  tags                   = merge(var.tags, { Name = "${var.name}-server" })

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_size = 20
    volume_type = "gp3"
    encrypted   = true
    tags        = var.tags
  }

  lifecycle {
    ignore_changes = [ami, user_data] # a new server loses the records of jobs; replace it on purpose
  }
}
