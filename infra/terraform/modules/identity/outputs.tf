output "server_profile" {
  description = "Instance profile of the control plane."
  value       = aws_iam_instance_profile.this["server"].name
}

output "node_profile" {
  description = "Instance profile of nodes."
  value       = aws_iam_instance_profile.this["node"].name
}

output "node_role_name" {
  description = "Role by which nodes join, for `everstep fleets create --node-role-name`."
  value       = aws_iam_role.this["node"].name
}

output "policies" {
  description = "The policies as JSON, by role. A test compares them with the calls of the code."
  value       = local.policies
}
