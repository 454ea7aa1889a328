output "group_name" {
  description = "Auto Scaling group of the servers."
  value       = aws_autoscaling_group.this.name
}

output "load_balancer_name" {
  description = "DNS name of the load balancer, the target of the alias record of the installation's domain."
  value       = aws_lb.this.dns_name
}

output "load_balancer" {
  description = "The last part of the load balancer's ARN, as CloudWatch names it."
  value       = aws_lb.this.arn_suffix
}

output "target_group" {
  description = "The last part of the target group's ARN, as CloudWatch names it."
  value       = aws_lb_target_group.this.arn_suffix
}
