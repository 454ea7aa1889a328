# Roles of the control plane and of nodes, with the calls that the code makes and no others.
#
# A change of a group or an instance needs the tag `everstep:fleet`, and the tag `everstep:installation` with the name of
# this installation. The fleet module sets both. AWS has no permission for a single resource of most Describe calls.

data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}
data "aws_region" "this" {}

locals {
  # Resources of a launch besides its template. Images of AWS and subnets of a shared VPC belong to other accounts.
  launched = [
    "capacity-reservation", "fleet", "image", "instance", "network-interface", "placement-group", "security-group",
    "snapshot", "subnet", "volume",
  ]

  here = "${data.aws_region.this.id}:${data.aws_caller_identity.this.account_id}"
}

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "encryption" {
  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [var.kms_key_arn]

    content {
      sid       = "Encryption"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

data "aws_iam_policy_document" "server" {
  source_policy_documents = [data.aws_iam_policy_document.encryption.json]

  statement {
    sid       = "Describe"
    resources = ["*"]

    actions = [
      "autoscaling:DescribeAutoScalingGroups",
      "autoscaling:DescribeAutoScalingInstances",
      "autoscaling:DescribeLifecycleHooks",
      "autoscaling:DescribePolicies",
      "autoscaling:DescribeScalingActivities",
      "ec2:DescribeImages",
      "ec2:DescribeInstanceStatus",
      "ec2:DescribeInstanceTopology",
      "ec2:DescribeInstanceTypes",
      "ec2:DescribeInstances",
      "ec2:DescribeLaunchTemplateVersions",
      "ec2:GetConsoleOutput",
    ]
  }

  statement {
    sid       = "ChangeGroupsOfFleets"
    resources = ["arn:${data.aws_partition.this.partition}:autoscaling:${local.here}:autoScalingGroup:*:autoScalingGroupName/*"]

    actions = [
      "autoscaling:CompleteLifecycleAction",
      "autoscaling:LaunchInstances",
      "autoscaling:PutLifecycleHook",
      "autoscaling:RecordLifecycleActionHeartbeat",
      "autoscaling:ResumeProcesses",
      "autoscaling:SetDesiredCapacity",
      "autoscaling:SetInstanceProtection",
      "autoscaling:SuspendProcesses",
      "autoscaling:TerminateInstanceInAutoScalingGroup",
      "autoscaling:UpdateAutoScalingGroup",
    ]

    condition {
      test     = "Null"
      variable = "aws:ResourceTag/everstep:fleet"
      values   = ["false"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/everstep:installation"
      values   = [var.name]
    }
  }

  statement {
    sid       = "EndInstancesOfFleets"
    actions   = ["ec2:RebootInstances", "ec2:TerminateInstances"]
    resources = ["arn:${data.aws_partition.this.partition}:ec2:${local.here}:instance/*"]

    condition {
      test     = "Null"
      variable = "aws:ResourceTag/everstep:fleet"
      values   = ["false"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/everstep:installation"
      values   = [var.name]
    }
  }

  # Nodes carry the names of their job and project while they work.
  statement {
    sid       = "TagInstancesOfFleets"
    actions   = ["ec2:CreateTags", "ec2:DeleteTags"]
    resources = ["arn:${data.aws_partition.this.partition}:ec2:${local.here}:instance/*"]

    condition {
      test     = "ForAllValues:StringEquals"
      variable = "aws:TagKeys"
      values   = ["everstep:job", "everstep:project"]
    }

    # Without keys, DeleteTags removes all tags.
    condition {
      test     = "Null"
      variable = "aws:TagKeys"
      values   = ["false"]
    }

    condition {
      test     = "Null"
      variable = "aws:ResourceTag/everstep:fleet"
      values   = ["false"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/everstep:installation"
      values   = [var.name]
    }
  }

  # LaunchInstances creates an EC2 Fleet for the caller. Each fleet needs a launch template, so the condition of the first
  # statement limits both.
  statement {
    sid       = "LaunchFromTemplatesOfFleets"
    actions   = ["ec2:CreateFleet"]
    resources = ["arn:${data.aws_partition.this.partition}:ec2:${local.here}:launch-template/*"]

    condition {
      test     = "Null"
      variable = "aws:ResourceTag/everstep:fleet"
      values   = ["false"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/everstep:installation"
      values   = [var.name]
    }
  }

  statement {
    sid     = "LaunchWithResourcesOfTemplates"
    actions = ["ec2:CreateFleet"]

    resources = [
      for kind in local.launched : "arn:${data.aws_partition.this.partition}:ec2:${data.aws_region.this.id}:*:${kind}/*"
    ]
  }

  statement {
    sid       = "Objects"
    actions   = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    resources = ["${var.bucket_arn}/*"]
  }

  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
  }

  statement {
    sid       = "Secrets"
    actions   = ["secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"]
    resources = var.secret_arns
  }

  dynamic "statement" {
    for_each = var.database_secret_arn == null ? [] : [var.database_secret_arn]

    content {
      sid       = "Database"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.queue_arn == null ? [] : [var.queue_arn]

    content {
      sid       = "Notices"
      actions   = ["sqs:DeleteMessage", "sqs:ReceiveMessage"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = length(var.event_bus_arns) == 0 ? [] : [var.event_bus_arns]

    content {
      sid       = "EventsToBuses"
      actions   = ["events:PutEvents"]
      resources = statement.value
    }
  }
}

data "aws_iam_policy_document" "node" {
  source_policy_documents = [data.aws_iam_policy_document.encryption.json]

  # The boot gate compares the node with EC2's description of its type. AWS has no permission for a single type.
  statement {
    sid       = "Describe"
    actions   = ["ec2:DescribeInstanceTypes"]
    resources = ["*"]
  }

  statement {
    sid       = "Jobs"
    actions   = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
    resources = [for project in var.projects : "${var.bucket_arn}/projects/${project}/jobs/*"]
  }

  statement {
    sid       = "Sources"
    actions   = ["s3:GetObject"]
    resources = concat(["${var.bucket_arn}/release/*"], [for project in var.projects : "${var.bucket_arn}/projects/${project}/sources/*"])
  }

  statement {
    sid       = "Evidence"
    actions   = ["s3:PutObject"]
    resources = ["${var.bucket_arn}/evidence/*"]
  }

  statement {
    sid       = "List"
    actions   = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [var.bucket_arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = [for project in var.projects : "projects/${project}/jobs/*"]
    }
  }

  dynamic "statement" {
    for_each = length(var.job_role_arns) == 0 ? [] : [var.job_role_arns]

    content {
      sid       = "RolesOfJobs"
      actions   = ["sts:AssumeRole"]
      resources = statement.value
    }
  }

  # Agents tag the session of a role with the project, the job and the run.
  dynamic "statement" {
    for_each = length(var.job_role_arns) == 0 ? [] : [var.job_role_arns]

    content {
      sid       = "TagsOfJobs"
      actions   = ["sts:TagSession"]
      resources = statement.value

      condition {
        test     = "ForAllValues:StringEquals"
        variable = "aws:TagKeys"
        values   = ["everstep:job", "everstep:project", "everstep:run"]
      }
    }
  }

  dynamic "statement" {
    for_each = length(var.job_secret_arns) == 0 ? [] : [var.job_secret_arns]

    content {
      sid       = "SecretsOfJobs"
      actions   = ["secretsmanager:GetSecretValue", "ssm:GetParameter"]
      resources = statement.value
    }
  }
}

locals {
  policies = {
    server = data.aws_iam_policy_document.server.json
    node   = data.aws_iam_policy_document.node.json
  }
}

resource "aws_iam_role" "this" {
  for_each             = local.policies
  name                 = "${var.name}-${each.key}"
  assume_role_policy   = data.aws_iam_policy_document.trust.json
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
}

resource "aws_iam_role_policy" "this" {
  for_each = local.policies
  name     = "everstep"
  role     = aws_iam_role.this[each.key].id
  policy   = each.value
}

resource "aws_iam_role_policy_attachment" "session_manager" {
  for_each   = var.has_session_manager ? toset(keys(local.policies)) : toset([])
  role       = aws_iam_role.this[each.key].name
  policy_arn = "arn:${data.aws_partition.this.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "this" {
  for_each = local.policies
  name     = "${var.name}-${each.key}"
  role     = aws_iam_role.this[each.key].name
  tags     = var.tags
}
