# Alarms of the parts that AWS runs, and the topic that receives them.
#
# The server's own figures are in `/metrics`. `alerts.yaml` has the alert rules for Prometheus, and `board.json` a board
# for Grafana. Each alarm and each rule names the section of the runbook that explains it.

locals {
  servers  = { LoadBalancer = var.load_balancer, TargetGroup = var.target_group }
  database = { DBInstanceIdentifier = var.database_id }
  notices  = { QueueName = var.queue_name }
  refused  = { QueueName = var.refused_queue_name }

  # An alarm is raised after the value has violated the limit for `minutes`.
  alarms = {
    "no-server" = {
      metric  = "AWS/ApplicationELB HealthyHostCount", dimensions = local.servers, statistic = "Maximum"
      is      = "LessThanThreshold", limit = 1, minutes = 2, without_data = "breaching"
      problem = "No control-plane server is healthy.", section = "no-news"
    }
    "lost-server" = {
      metric  = "AWS/ApplicationELB HealthyHostCount", dimensions = local.servers, statistic = "Maximum"
      is      = "LessThanThreshold", limit = var.server_count, minutes = 20, without_data = "breaching"
      problem = "Fewer than ${var.server_count} control-plane servers are healthy.", section = "no-news"
    }
    "server-errors" = {
      metric  = "AWS/ApplicationELB HTTPCode_Target_5XX_Count", dimensions = local.servers, statistic = "Sum"
      is      = "GreaterThanThreshold", limit = 10, minutes = 5, without_data = "notBreaching"
      problem = "Servers answer requests with errors.", section = "no-news"
    }
    "database-storage" = {
      metric  = "AWS/RDS FreeStorageSpace", dimensions = local.database, statistic = "Minimum"
      is      = "LessThanThreshold", limit = 2147483648, minutes = 10, without_data = "missing"
      problem = "The database has less than 2 GiB of free storage.", section = "service-disk-full"
    }
    "database-processor" = {
      metric  = "AWS/RDS CPUUtilization", dimensions = local.database, statistic = "Average"
      is      = "GreaterThanThreshold", limit = 90, minutes = 15, without_data = "missing"
      problem = "The database uses more than 90 % of its processors.", section = "database-down"
    }
    "old-notices" = {
      metric  = "AWS/SQS ApproximateAgeOfOldestMessage", dimensions = local.notices, statistic = "Maximum"
      is      = "GreaterThanThreshold", limit = 600, minutes = 5, without_data = "notBreaching"
      problem = "No server reads AWS's notices.", section = "queue-misconfigured"
    }
    "refused-notices" = {
      metric  = "AWS/SQS ApproximateNumberOfMessagesVisible", dimensions = local.refused, statistic = "Maximum"
      is      = "GreaterThanThreshold", limit = 0, minutes = 1, without_data = "notBreaching"
      problem = "AWS could not deliver a notice, or no server could read it.", section = "queue-misconfigured"
    }
  }
}

resource "aws_sns_topic" "this" {
  name              = "${var.name}-alarms"
  kms_master_key_id = var.kms_key_arn
  tags              = var.tags
}

resource "aws_sns_topic_subscription" "email" {
  for_each  = var.emails
  topic_arn = aws_sns_topic.this.arn
  protocol  = "email"
  endpoint  = each.value
}

resource "aws_cloudwatch_metric_alarm" "this" {
  for_each            = local.alarms
  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = "${each.value.problem} ${var.runbook_url}#${each.value.section}"
  namespace           = split(" ", each.value.metric)[0]
  metric_name         = split(" ", each.value.metric)[1]
  dimensions          = each.value.dimensions
  statistic           = each.value.statistic
  comparison_operator = each.value.is
  threshold           = each.value.limit
  period              = 60
  evaluation_periods  = each.value.minutes
  treat_missing_data  = each.value.without_data
  alarm_actions       = [aws_sns_topic.this.arn]
  ok_actions          = [aws_sns_topic.this.arn]
  tags                = var.tags
}
