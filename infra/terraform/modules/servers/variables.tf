variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the servers and the load balancer."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the servers, in two availability zones or more."
  type        = list(string)
}

variable "balancer_subnet_ids" {
  description = "Subnets of the load balancer, in two availability zones or more. With `is_public`, they need a route to an internet gateway."
  type        = list(string)
}

variable "server_security_group_id" {
  description = "Security group of the servers. It gets a rule for the load balancer."
  type        = string
}

variable "node_security_group_id" {
  description = "Security group of nodes, whose agents use the load balancer."
  type        = string
}

variable "client_cidrs" {
  description = "IPv4 ranges from which people and programs reach the load balancer."
  type        = list(string)
}

variable "is_public" {
  description = "Whether the load balancer has public addresses."
  type        = bool
  default     = false
}

variable "has_nat" {
  description = "Whether nodes reach the load balancer from `nat_address`."
  type        = bool
  default     = false
}

variable "nat_address" {
  description = "Public address of the NAT gateway of the nodes."
  type        = string
  default     = ""
}

variable "certificate_arn" {
  description = "ACM certificate of the installation's domain."
  type        = string
}

variable "server_port" {
  description = "TCP port of the servers."
  type        = number
}

variable "health_path" {
  description = "Path that answers 200 while a server should receive requests."
  type        = string
  default     = "/v1/ready"
}

variable "server_count" {
  description = "Number of servers."
  type        = number
  default     = 2
}

variable "instance_profile" {
  description = "Instance profile of the servers."
  type        = string
}

variable "instance_type" {
  description = "Type of the servers, x86_64."
  type        = string
  default     = "m7i.large"
}

variable "image_id" {
  description = "AMI of the servers."
  type        = string
}

variable "root_device" {
  description = "Device name of the AMI's root volume."
  type        = string
  default     = "/dev/xvda"
}

variable "user_data" {
  description = "User data of the servers, as text."
  type        = string
  sensitive   = true
}

variable "is_protected" {
  description = "Whether AWS refuses to delete the load balancer."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
