output "prefix" {
  description = "Prefix of the names of the secrets, for the server's option `--secrets-prefix`."
  value       = "${var.name}/"
  depends_on  = [aws_secretsmanager_secret.this]
}

output "arns" {
  description = "ARN of each secret."
  value       = { for name, secret in aws_secretsmanager_secret.this : name => secret.arn }
}
