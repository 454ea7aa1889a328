variable "name" {
  description = "Name of the installation."
  type        = string
}

variable "group_names" {
  description = "Auto Scaling groups of the fleets. Only their launch and terminate events are delivered."
  type        = list(string)
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
