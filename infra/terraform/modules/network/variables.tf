variable "name" {
  description = "Name of the installation. It is part of the names of all resources."
  type        = string
}

variable "vpc_id" {
  description = "VPC to use. Null: the module creates one."
  type        = string
  default     = null
}

variable "subnet_ids" {
  description = "Subnets in `vpc_id` by availability zone, for nodes and servers. Empty if the module creates the VPC."
  type        = map(string)
  default     = {}

  validation {
    condition     = (var.vpc_id == null) == (length(var.subnet_ids) == 0)
    error_message = "Set both vpc_id and subnet_ids, or neither of them."
  }
}

variable "route_table_ids" {
  description = "Route tables of the subnets in `subnet_ids`, which get the route to S3."
  type        = list(string)
  default     = []

  validation {
    condition     = var.vpc_id == null || length(var.route_table_ids) > 0 || contains(var.existing_endpoints, "s3")
    error_message = "Nodes and servers need a route to S3: set route_table_ids, or list s3 in existing_endpoints."
  }
}

variable "cidr" {
  description = "IPv4 range of a created VPC."
  type        = string
  default     = "10.80.0.0/16"
}

variable "zones" {
  description = "Availability zones of a created VPC, one subnet each. A fleet uses one of them."
  type        = list(string)
  default     = []

  validation {
    condition     = length(distinct([for zone in var.zones : regex("[a-o]$", zone)])) == length(var.zones)
    error_message = "The last letters of the zones decide the ranges of their subnets: use different letters from a to o."
  }
}

variable "is_public" {
  description = "Whether instances have public addresses and reach AWS through an internet gateway. No rule lets anybody in. False: instances reach AWS through VPC endpoints only."
  type        = bool
  default     = false
}

variable "has_nat" {
  description = "Whether instances in private subnets of a created VPC reach the internet through a NAT gateway. In a given VPC, the routes of its subnets decide."
  type        = bool
  default     = false

  validation {
    condition     = !var.has_nat || (var.vpc_id == null && !var.is_public)
    error_message = "A NAT gateway needs a created VPC with private subnets: leave vpc_id at null and is_public at false. Create the gateway of a given VPC yourself."
  }
}

variable "has_public_subnets" {
  description = "Whether a created VPC gets public subnets for a load balancer."
  type        = bool
  default     = false
}

variable "extra_endpoints" {
  description = "AWS services that need an interface endpoint for optional features, such as `events`."
  type        = list(string)
  default     = []
}

variable "existing_endpoints" {
  description = "AWS services, such as `ssm` or `s3`, whose endpoint a given VPC has. A second endpoint with private names is refused by AWS."
  type        = list(string)
  default     = []
}

variable "server_port" {
  description = "TCP port of the control plane."
  type        = number
  default     = 8443
}

variable "has_load_balancer" {
  description = "Whether nodes reach the control plane through a load balancer only. The module `servers` then adds the rules."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
