output "group_name" {
  description = "Name of the Auto Scaling group, for `everstep fleets create --auto-scaling-group`."
  value       = aws_autoscaling_group.this.name
}
