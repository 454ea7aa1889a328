# PostgreSQL for the servers: a standby in another zone, backups, TLS only, and a password that RDS makes and rotates.
#
# RDS keeps the password in Secrets Manager. Neither Terraform's state nor the user data of servers contains it.

resource "aws_db_subnet_group" "this" {
  name       = var.name
  subnet_ids = var.subnet_ids
  tags       = var.tags
}

resource "aws_security_group" "this" {
  name        = "${var.name}-database"
  description = "Database of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-database" })
}

resource "aws_vpc_security_group_ingress_rule" "servers" {
  security_group_id            = aws_security_group.this.id
  description                  = "Control plane"
  referenced_security_group_id = var.server_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
}

resource "aws_vpc_security_group_egress_rule" "servers" {
  security_group_id            = var.server_security_group_id
  description                  = "Database"
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
}

resource "aws_db_parameter_group" "this" {
  name_prefix = "${var.name}-"
  description = "PostgreSQL of ${var.name}"
  family      = "postgres${var.postgresql_version}"
  tags        = var.tags

  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }

  # A transaction of Everstep takes milliseconds. The log lists slower statements, because they indicate a problem.
  parameter {
    name  = "log_min_duration_statement"
    value = "1000"
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_db_instance" "this" {
  identifier                      = var.name
  engine                          = "postgres"
  engine_version                  = var.postgresql_version
  auto_minor_version_upgrade      = true
  instance_class                  = var.instance_class
  db_name                         = "everstep"
  username                        = "everstep"
  manage_master_user_password     = true
  master_user_secret_kms_key_id   = var.kms_key_arn
  storage_type                    = "gp3"
  allocated_storage               = var.gigabytes
  max_allocated_storage           = var.gigabytes * 10
  storage_encrypted               = true
  kms_key_id                      = var.kms_key_arn
  multi_az                        = true
  db_subnet_group_name            = aws_db_subnet_group.this.name
  vpc_security_group_ids          = [aws_security_group.this.id]
  parameter_group_name            = aws_db_parameter_group.this.name
  publicly_accessible             = false
  backup_retention_period         = var.backup_days
  copy_tags_to_snapshot           = true
  deletion_protection             = var.is_protected
  skip_final_snapshot             = !var.is_protected
  final_snapshot_identifier       = "${var.name}-last"
  enabled_cloudwatch_logs_exports = ["postgresql", "upgrade"]
  tags                            = var.tags
}
