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

variable "job_role_arns" {
  description = "Roles that jobs may have (`RoleArn`). Their trust policies must permit `sts:AssumeRole` and `sts:TagSession` to the role of nodes."
  type        = list(string)
  default     = []
}

variable "job_secret_arns" {
  description = "Secrets and SSM parameters that nodes may read for jobs without a role of their own (`Secrets`)."
  type        = list(string)
  default     = []
}

variable "server_options" {
  description = "Further options of `everstep server`, such as `--keep events=365`. A change needs a new server."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for option in var.server_options : can(regex("^--[^\n'\"\\\\$]+$", option))])
    error_message = "Begin each option with `--`. Quotes, backslashes, dollar signs and line breaks are not possible."
  }
}

variable "node_user_data" {
  description = "User data of the nodes. Null: install the wheel and start the agent."
  type        = string
  default     = null
}

variable "permissions_boundary" {
  description = "ARN of the policy that limits the permissions of all roles. It must permit what their policies permit. Null: none."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of all resources, such as those for the allocation of costs. Launched instances, volumes and network interfaces get them."
  type        = map(string)
  default     = {}
}
