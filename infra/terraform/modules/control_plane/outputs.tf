output "instance_id" {
  description = "Instance of the server."
  value       = aws_instance.this.id
}

output "private_ip" {
  description = "Address of the server in the VPC."
  value       = aws_instance.this.private_ip
}
