variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key of the topic. Its policy must let CloudWatch use it: CloudWatch cannot use AWS's own key for SNS."
  type        = string
}

variable "emails" {
  description = "Addresses that receive the alarms. Each of them must confirm a message first."
  type        = set(string)
  default     = []
}

variable "runbook_url" {
  description = "URL of the control plane's page `/runbook.html`."
  type        = string
}

variable "server_count" {
  description = "Number of servers that should be healthy."
  type        = number
}

variable "load_balancer" {
  description = "The last part of the load balancer's ARN, as CloudWatch names it."
  type        = string
}

variable "target_group" {
  description = "The last part of the target group's ARN, as CloudWatch names it."
  type        = string
}

variable "database_id" {
  description = "Id of the RDS instance."
  type        = string
}

variable "queue_name" {
  description = "Queue with AWS's notices."
  type        = string
}

variable "refused_queue_name" {
  description = "Queue with the notices that nobody could deliver or read."
  type        = string
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
