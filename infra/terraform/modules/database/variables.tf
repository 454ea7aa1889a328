variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the database."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the database, in two availability zones or more."
  type        = list(string)
}

variable "server_security_group_id" {
  description = "Security group of the control plane, which alone reaches the database."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the storage, the backups and the password."
  type        = string
}

variable "postgresql_version" {
  description = "Major version of PostgreSQL, at most that of the client in the servers' image. RDS installs the minor versions itself."
  type        = string
  default     = "16"
}

variable "instance_class" {
  description = "Instance class of the database."
  type        = string
  default     = "db.t4g.medium"
}

variable "gigabytes" {
  description = "Initial storage in GB. RDS enlarges it up to ten times this size."
  type        = number
  default     = 20
}

variable "backup_days" {
  description = "Days for which RDS keeps backups, to any second of which it can restore the database."
  type        = number
  default     = 14
}

variable "is_protected" {
  description = "Whether AWS refuses to delete the database, and makes a last snapshot after the protection was removed."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
