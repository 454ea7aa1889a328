output "queue_url" {
  description = "URL of the queue that the control plane reads."
  value       = aws_sqs_queue.this.id
}

output "queue_arn" {
  description = "ARN of the queue that the control plane reads."
  value       = aws_sqs_queue.this.arn
}

output "refused_queue_arn" {
  description = "ARN of the queue with messages that nobody could deliver or read. An alarm watches it."
  value       = aws_sqs_queue.refused.arn
}

output "queue_name" {
  description = "Name of the queue that the control plane reads."
  value       = aws_sqs_queue.this.name
}

output "refused_queue_name" {
  description = "Name of the queue with messages that nobody could deliver or read."
  value       = aws_sqs_queue.refused.name
}
