variable "bucket" {
  description = "Name of the bucket for sources, checkpoints, logs and outputs."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the objects. Null: S3 encrypts them with keys of its own."
  type        = string
  default     = null
}

variable "is_versioned" {
  description = "Whether the bucket keeps deleted and replaced objects for `noncurrent_days`."
  type        = bool
  default     = false
}

variable "noncurrent_days" {
  description = "Days for which a versioned bucket keeps what Everstep has deleted. Everstep deletes old checkpoints, so each day costs the checkpoints of a day."
  type        = number
  default     = 3
}

variable "is_kept" {
  description = "Whether `terraform destroy` fails while the bucket has objects. False: it deletes them."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Tags of the bucket."
  type        = map(string)
  default     = {}
}
