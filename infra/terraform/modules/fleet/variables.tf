variable "name" {
  description = "Name of the fleet, of its Auto Scaling group and of its launch template."
  type        = string
}

variable "installation" {
  description = "Name of the installation. Its servers change only groups and instances with this name as their tag `everstep:installation`."
  type        = string
}

variable "subnet_id" {
  description = "The one subnet of the fleet. A gang of nodes needs one availability zone."
  type        = string
}

variable "security_group_ids" {
  description = "Security groups of the nodes."
  type        = list(string)
}

variable "instance_profile" {
  description = "Instance profile of the nodes."
  type        = string
}

variable "instance_type" {
  description = "Type of the nodes."
  type        = string
}

variable "other_instance_types" {
  description = "Further types of the same family, for lack of the first, in the order of preference. They need its number of accelerators, and at least its memory and EFA interfaces."
  type        = list(string)
  default     = []

  validation {
    condition     = length(var.other_instance_types) == 0 || length(var.capacity_reservation_ids) == 0
    error_message = "A reservation has one instance type: set other_instance_types or capacity_reservation_ids."
  }
}

variable "network_interfaces" {
  description = "Network interfaces of the nodes: network card, device index, and kind (`interface`, `efa` or `efa-only`). Null: AWS's layout for the type. Empty: one ordinary interface."
  type        = list(object({ card = number, device = number, kind = string }))
  default     = null

  validation {
    condition = var.network_interfaces == null || alltrue([
      for each in coalesce(var.network_interfaces, []) : contains(["interface", "efa", "efa-only"], each.kind) && (each.kind != "efa-only" || each.card != 0 || each.device != 0)
    ])
    error_message = "The kinds are interface, efa and efa-only, and the interface at card 0 and device 0 cannot be efa-only."
  }
}

variable "spot_percentage" {
  description = "Percentage of the nodes that are Spot instances."
  type        = number
  default     = 0

  validation {
    condition     = var.spot_percentage >= 0 && var.spot_percentage <= 100 && (var.spot_percentage == 0 || length(var.capacity_reservation_ids) == 0)
    error_message = "Use 0 to 100, and 0 with a capacity reservation."
  }
}

variable "image_id" {
  description = "AMI of the nodes."
  type        = string
}

variable "user_data" {
  description = "User data of the nodes, as text."
  type        = string
  sensitive   = true
}

variable "max_size" {
  description = "Maximum number of nodes."
  type        = number
}

variable "root_gigabytes" {
  description = "Size of the root volume in GB."
  type        = number
  default     = 50
}

variable "root_device" {
  description = "Device name of the AMI's root volume."
  type        = string
  default     = "/dev/xvda"
}

variable "placement_group" {
  description = "Cluster placement group of the nodes. Null: none."
  type        = string
  default     = null
}

variable "capacity_reservation_ids" {
  description = "On-demand reservations of the nodes' type and zone, or one capacity block. Empty: open capacity."
  type        = list(string)
  default     = []
}

variable "is_capacity_block" {
  description = "Whether `capacity_reservation_ids` is a capacity block for ML."
  type        = bool
  default     = false

  validation {
    condition     = !var.is_capacity_block || length(var.capacity_reservation_ids) == 1
    error_message = "A fleet is in one capacity block: give its id in capacity_reservation_ids."
  }

  validation {
    condition     = !var.is_capacity_block || var.placement_group == null
    error_message = "AWS places the instances of a capacity block close together: leave out the placement group."
  }
}

variable "is_reserved_only" {
  description = "Whether all nodes are in `capacity_reservation_ids`. Otherwise, when these are full, further nodes are on demand."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of the group, the nodes, and their volumes and network interfaces."
  type        = map(string)
  default     = {}
}
