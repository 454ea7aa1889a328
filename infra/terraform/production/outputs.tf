output "load_balancer_name" {
  description = "DNS name of the load balancer, the target of the record of `domain_name`."
  value       = module.servers.load_balancer_name
}

output "server_group_name" {
  description = "Auto Scaling group of the servers, to one of which Systems Manager forwards a port."
  value       = module.servers.group_name
}

output "bucket" {
  description = "Bucket of the installation."
  value       = module.storage.bucket
}

output "node_role_name" {
  description = "Role by which nodes join."
  value       = module.identity.node_role_name
}

output "topic_arn" {
  description = "Topic that receives the alarms."
  value       = module.observability.topic_arn
}

output "node_security_group_id" {
  description = "Security group of the nodes, for rules of your own, such as one to a file system."
  value       = module.network.node_security_group_id
}

output "server_security_group_id" {
  description = "Security group of the servers, for rules of your own, such as one to a collector of traces."
  value       = module.network.server_security_group_id
}
