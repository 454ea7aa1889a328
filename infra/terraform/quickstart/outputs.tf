output "server_instance_id" {
  description = "Instance of the control plane."
  value       = module.control_plane.instance_id
}

output "bucket" {
  description = "Bucket of the installation."
  value       = module.storage.bucket
}

output "group_name" {
  description = "Auto Scaling group of the fleet."
  value       = module.fleet.group_name
}

output "node_role_name" {
  description = "Role by which nodes join."
  value       = module.identity.node_role_name
}

output "node_security_group_id" {
  description = "Security group of the nodes, for rules of your own, such as one to a file system."
  value       = module.network.node_security_group_id
}
