# AWS's notices about instances, from EventBridge to a queue that the control plane reads.
#
# EventBridge cannot filter EC2's events by group or tag, because they contain the instance id only. The control plane
# ignores instances that are not in its fleets.

locals {
  patterns = {
    groups = {
      source      = ["aws.autoscaling"]
      detail-type = [{ prefix = "EC2 Instance-launch" }, { prefix = "EC2 Instance-terminate" }, { prefix = "EC2 Instance Launch" }, { prefix = "EC2 Instance Terminate" }]
      detail      = { AutoScalingGroupName = var.group_names }
    }
    instances = {
      source = ["aws.ec2"]
      detail-type = [
        "EC2 Spot Instance Interruption Warning",
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance State-change Notification",
        "Capacity Block Reservation Expiration Warning",
      ]
    }
    health = {
      source      = ["aws.health"]
      detail-type = ["AWS Health Event"]
      detail      = { service = ["EC2"], eventTypeCategory = ["scheduledChange"] }
    }
  }
}

data "aws_iam_policy_document" "queue" {
  statement {
    actions   = ["sqs:SendMessage"]
    resources = ["*"] # the queue that has the policy

    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }

    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [for rule in aws_cloudwatch_event_rule.this : rule.arn]
    }
  }
}

resource "aws_sqs_queue" "refused" {
  name                      = "${var.name}-notices-refused"
  message_retention_seconds = 1209600
  sqs_managed_sse_enabled   = true
  policy                    = data.aws_iam_policy_document.queue.json
  tags                      = var.tags
}

# A notice that is an hour old is of no use: the control plane polls AWS in addition.
resource "aws_sqs_queue" "this" {
  name                       = "${var.name}-notices"
  message_retention_seconds  = 3600
  visibility_timeout_seconds = 30
  receive_wait_time_seconds  = 20
  sqs_managed_sse_enabled    = true
  policy                     = data.aws_iam_policy_document.queue.json
  tags                       = var.tags

  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.refused.arn
    maxReceiveCount     = 5
  })
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each      = local.patterns
  name          = "${var.name}-${each.key}"
  description   = "Notices for the control plane of ${var.name}"
  event_pattern = jsonencode(each.value)
  tags          = var.tags
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = aws_cloudwatch_event_rule.this
  rule     = each.value.name
  arn      = aws_sqs_queue.this.arn

  dead_letter_config {
    arn = aws_sqs_queue.refused.arn
  }
}
