output "id" {
  description = "Id of the RDS instance, as CloudWatch names it."
  value       = aws_db_instance.this.identifier
}

output "url" {
  description = "URL for the server's option `--database-url`, without a password."
  value       = "postgresql://${aws_db_instance.this.username}@${aws_db_instance.this.endpoint}/${aws_db_instance.this.db_name}?sslmode=require"
}

output "secret_arn" {
  description = "Secret with the user's name and password, as JSON. RDS rotates the password every seven days."
  value       = aws_db_instance.this.master_user_secret[0].secret_arn
}
