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

variable "zones" {
  description = "Availability zones of a created VPC, two or more. Empty if `vpc_id` is set."
  type        = list(string)
  default     = []

  validation {
    condition     = var.vpc_id != null || length(var.zones) >= 2
    error_message = "A load balancer and a database with a standby need two availability zones."
  }
}

variable "vpc_id" {
  description = "VPC to use. Null: Terraform creates one."
  type        = string
  default     = null
}

variable "subnet_ids" {
  description = "Private subnets in `vpc_id` by availability zone, in two zones or more."
  type        = map(string)
  default     = {}
}

variable "route_table_ids" {
  description = "Route tables of the subnets in `subnet_ids`, which get the route to S3."
  type        = list(string)
  default     = []
}

variable "domain_name" {
  description = "Domain name of the control plane. A CNAME or alias record must lead from it to the output `load_balancer_name`."
  type        = string
}

variable "certificate_arn" {
  description = "Certificate of `domain_name` in AWS Certificate Manager."
  type        = string
}

variable "public_subnet_ids" {
  description = "Subnets in `vpc_id` for the load balancer if `is_public`, in two zones or more, with a route to an internet gateway."
  type        = list(string)
  default     = []

  validation {
    condition     = !var.is_public || var.vpc_id == null || length(var.public_subnet_ids) >= 2
    error_message = "A public load balancer in a given VPC needs public_subnet_ids in two zones."
  }
}

variable "existing_endpoints" {
  description = "AWS services, such as `ssm` or `s3`, whose endpoint `vpc_id` has. AWS refuses a second endpoint."
  type        = list(string)
  default     = []
}

variable "has_nat" {
  description = "Whether servers and nodes in a created VPC reach the internet through a NAT gateway, such as package registries and data sets."
  type        = bool
  default     = false
}

variable "client_cidrs" {
  description = "IPv4 ranges from which people and programs reach the load balancer. Empty: people reach a server through Systems Manager."
  type        = list(string)
  default     = []
}

variable "is_public" {
  description = "Whether the load balancer has public addresses. In a created VPC, Terraform then creates public subnets, and a NAT gateway through which nodes reach the load balancer."
  type        = bool
  default     = false
}

variable "image_id" {
  description = "AMI of the servers, with Everstep (infra/image)."
  type        = string
}

variable "root_device" {
  description = "Device name of the root volume of all AMIs: /dev/sda1 for Ubuntu, /dev/xvda for Amazon Linux."
  type        = string
  default     = "/dev/sda1"
}

variable "server_type" {
  description = "Instance type of the servers, x86_64."
  type        = string
  default     = "m7i.large"
}

variable "database_class" {
  description = "Instance class of the database."
  type        = string
  default     = "db.m7g.large"
}

variable "fleets" {
  description = "Fleets by name. A fleet has one zone, and one instance type or several alike; `is_clustered` creates a placement group, `placement_group` names an existing one. `root_gigabytes` is at least the size of the image's volume."
  type = map(object({
    zone                     = string
    instance_type            = string
    image_id                 = string
    max_nodes                = number
    other_instance_types     = optional(list(string), [])
    network_interfaces       = optional(list(object({ card = number, device = number, kind = string })))
    spot_percentage          = optional(number, 0)
    is_clustered             = optional(bool, false)
    placement_group          = optional(string)
    root_gigabytes           = optional(number, 50)
    capacity_reservation_ids = optional(list(string), [])
    is_capacity_block        = optional(bool, false)
    is_reserved_only         = optional(bool, false)
  }))

  validation {
    condition     = length(var.fleets) > 0
    error_message = "An installation needs a fleet, whose groups its rules for AWS's notices name."
  }

  validation {
    condition     = alltrue([for fleet in values(var.fleets) : !fleet.is_clustered || fleet.placement_group == null])
    error_message = "is_clustered creates a placement group: set it to false where placement_group names one."
  }

  validation {
    condition     = !contains(keys(var.fleets), "server") && !contains(keys(var.fleets), "servers")
    error_message = "The servers have these names: choose another key than server and servers."
  }
}

variable "projects" {
  description = "Projects whose objects nodes may read and write. `*` matches any name."
  type        = list(string)
  default     = ["*"]
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

variable "event_bus_arns" {
  description = "EventBridge buses that receive the events of jobs."
  type        = list(string)
  default     = []
}

variable "server_options" {
  description = "Further options of `everstep server`, such as `--keep events=365`."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for option in var.server_options : can(regex("^--[^\n'\"\\\\$]+$", option))])
    error_message = "Begin each option with `--`. Quotes, backslashes, dollar signs and line breaks are not possible."
  }
}

variable "alarm_emails" {
  description = "Addresses that receive the alarms."
  type        = set(string)
  default     = []
}

variable "is_protected" {
  description = "Whether AWS refuses to delete the database, the load balancer and a bucket with objects. Set it to false and apply before `terraform destroy`."
  type        = bool
  default     = true
}

variable "server_user_data" {
  description = "User data of the servers. Null: configure and start the server of the image."
  type        = string
  default     = null
}

variable "node_user_data" {
  description = "User data of the nodes. Null: configure and start the agent of the image."
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
