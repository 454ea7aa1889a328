variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the secrets. Null: the account's key for Secrets Manager."
  type        = string
  default     = null
}

variable "recovery_days" {
  description = "Days for which Secrets Manager keeps deleted secrets. 0: it deletes them at once, so that the same name can be created again."
  type        = number
  default     = 7
}

variable "tags" {
  description = "Tags of all secrets."
  type        = map(string)
  default     = {}
}
