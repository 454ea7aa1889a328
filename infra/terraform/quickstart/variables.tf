variable "name" {
  description = "Name of the installation. It is part of the names of all resources."
  type        = string
  default     = "everstep"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "Use 2 to 20 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
}

variable "wheel" {
  description = "Path of Everstep's wheel, which `make wheel` builds."
  type        = string
}

variable "server_type" {
  description = "Instance type of the control plane, x86_64."
  type        = string
  default     = "t3.small"
}

variable "node_type" {
  description = "Instance type of the nodes, x86_64."
  type        = string
  default     = "t3.large"
}

variable "max_nodes" {
  description = "Maximum number of nodes."
  type        = number
  default     = 4
}

variable "image_id" {
  description = "AMI of the server and the nodes: Amazon Linux 2023 for x86_64. Null: the newest one."
  type        = string
  default     = null
}

variable "node_user_data" {
  description = "User data of the nodes. Null: install the wheel and start the agent."
  type        = string
  default     = null
}
