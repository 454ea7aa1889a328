output "topic_arn" {
  description = "Topic that receives the alarms."
  value       = aws_sns_topic.this.arn
}
