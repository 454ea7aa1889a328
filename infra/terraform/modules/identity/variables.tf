variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "bucket_arn" {
  description = "ARN of the bucket of the installation."
  type        = string
}

variable "projects" {
  description = "Projects whose objects nodes may read and write. `*` matches any name."
  type        = list(string)
  default     = ["*"]
}

variable "kms_key_arn" {
  description = "KMS key of the bucket. Null if S3 has keys of its own."
  type        = string
  default     = null
}

variable "secret_arns" {
  description = "Secrets that the control plane reads and, once, writes."
  type        = list(string)
}

variable "database_secret_arn" {
  description = "Secret with the password of the database. Null: the database needs none."
  type        = string
  default     = null
}

variable "queue_arn" {
  description = "Queue with AWS's notices. Null: the control plane only polls."
  type        = string
  default     = null
}

variable "event_bus_arns" {
  description = "EventBridge buses that receive the events of jobs."
  type        = list(string)
  default     = []
}

variable "job_role_arns" {
  description = "Roles that jobs may have (`RoleArn`). Their trust policies must permit `sts:AssumeRole` and `sts:TagSession` to the role of nodes."
  type        = list(string)
  default     = []
}

variable "job_secret_arns" {
  description = "Secrets and SSM parameters that nodes may read for jobs without a role of their own."
  type        = list(string)
  default     = []
}

variable "has_session_manager" {
  description = "Whether people may open shells and forward ports with Systems Manager."
  type        = bool
  default     = true
}

variable "permissions_boundary" {
  description = "ARN of the policy that limits the permissions of all roles. It must permit what their policies permit. Null: none."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
