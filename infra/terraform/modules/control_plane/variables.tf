variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "subnet_id" {
  description = "Subnet of the server."
  type        = string
}

variable "security_group_ids" {
  description = "Security groups of the server."
  type        = list(string)
}

variable "instance_profile" {
  description = "Instance profile of the server."
  type        = string
}

variable "instance_type" {
  description = "Type of the server, x86_64."
  type        = string
  default     = "t3.small"
}

variable "image_id" {
  description = "AMI of the server."
  type        = string
}

variable "user_data" {
  description = "User data of the server, as text."
  type        = string
  sensitive   = true
}

variable "tags" {
  description = "Tags of the server and its volume."
  type        = map(string)
  default     = {}
}
