output "vpc_id" {
  description = "Id of the VPC."
  value       = local.vpc_id
}

output "vpc_cidrs" {
  description = "IPv4 ranges of the VPC."
  value       = local.vpc_cidrs
}

output "nat_address" {
  description = "Public address of the NAT gateway. Empty without one."
  value       = join("", aws_eip.nat[*].public_ip)
}

output "subnet_ids" {
  description = "Subnet of each availability zone."
  value       = local.subnet_ids
}

output "public_subnet_ids" {
  description = "Public subnets of a created VPC, for a load balancer. Empty if it has none."
  value       = [for subnet in values(aws_subnet.public) : subnet.id]
}

output "node_security_group_id" {
  description = "Security group of nodes."
  value       = aws_security_group.nodes.id
}

output "server_security_group_id" {
  description = "Security group of the control plane."
  value       = aws_security_group.servers.id
}
