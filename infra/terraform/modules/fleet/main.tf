# One fleet: a launch template and an Auto Scaling group that fulfil Everstep's contract.
#
# Everstep sets the desired capacity and ends instances. Terraform therefore ignores both after the creation.

locals {
  tags = merge(var.tags, {
    "everstep:fleet"        = var.name
    "everstep:installation" = var.installation
    Name                    = var.name
  })

  is_mixed = var.spot_percentage > 0 || length(var.other_instance_types) > 0

  # Processes by which AWS would end or replace nodes on its own.
  suspended = ["AZRebalance", "AlarmNotification", "InstanceRefresh", "ReplaceUnhealthy", "ScheduledActions"]
}

resource "aws_launch_template" "this" {
  name                   = var.name
  image_id               = var.image_id
  instance_type          = var.instance_type
  user_data              = base64encode(var.user_data)
  update_default_version = true
  vpc_security_group_ids = length(local.interfaces) == 0 ? var.security_group_ids : null
  tags                   = local.tags

  iam_instance_profile {
    name = var.instance_profile
  }

  # Ranks must not read the credentials of the node. With a hop limit of 1, answers do not reach containers.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = var.root_device

    ebs {
      volume_size           = var.root_gigabytes
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "network_interfaces" {
    for_each = local.interfaces

    content {
      network_card_index    = network_interfaces.value.card
      device_index          = network_interfaces.value.device
      interface_type        = network_interfaces.value.kind
      security_groups       = var.security_group_ids
      delete_on_termination = true
    }
  }

  dynamic "placement" {
    for_each = var.placement_group == null ? [] : [var.placement_group]

    content {
      group_name = placement.value
    }
  }

  # The market type of a capacity block needs its id in the launch template.
  dynamic "capacity_reservation_specification" {
    for_each = var.is_capacity_block ? var.capacity_reservation_ids : []

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = var.is_capacity_block ? [1] : []

    content {
      market_type = "capacity-block"
    }
  }

  # The provider's default tags do not reach what AWS creates at a launch.
  dynamic "tag_specifications" {
    for_each = toset(["instance", "network-interface", "volume"])

    content {
      resource_type = tag_specifications.value
      tags          = local.tags
    }
  }
}

resource "aws_autoscaling_group" "this" {
  name                      = var.name
  min_size                  = 0
  max_size                  = var.max_size
  desired_capacity          = 0
  vpc_zone_identifier       = [var.subnet_id]
  health_check_type         = "EC2"
  protect_from_scale_in     = true
  suspended_processes       = local.suspended
  wait_for_capacity_timeout = "0"
  force_delete              = true # needed because the nodes are protected from scale-in; DeleteFleet ended them

  dynamic "launch_template" {
    for_each = local.is_mixed ? [] : [aws_launch_template.this.id]

    content {
      id      = launch_template.value
      version = "$Latest"
    }
  }

  # Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/target-capacity-reservations.html
  dynamic "capacity_reservation_specification" {
    for_each = length(var.capacity_reservation_ids) == 0 || var.is_capacity_block ? [] : [1]

    content {
      capacity_reservation_preference = var.is_reserved_only ? "capacity-reservations-only" : "capacity-reservations-first"

      capacity_reservation_target {
        capacity_reservation_ids = var.capacity_reservation_ids
      }
    }
  }

  dynamic "mixed_instances_policy" {
    for_each = local.is_mixed ? [aws_launch_template.this.id] : []

    content {
      launch_template {
        launch_template_specification {
          launch_template_id = mixed_instances_policy.value
          version            = "$Latest"
        }

        dynamic "override" {
          for_each = concat([var.instance_type], var.other_instance_types)

          content {
            instance_type = override.value
          }
        }
      }

      instances_distribution {
        on_demand_allocation_strategy            = "prioritized"
        on_demand_percentage_above_base_capacity = 100 - var.spot_percentage
        spot_allocation_strategy                 = "capacity-optimized-prioritized"
      }
    }
  }

  initial_lifecycle_hook {
    name                 = "everstep-termination"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = 60
    default_result       = "CONTINUE"
  }

  dynamic "tag" {
    for_each = local.tags

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity, suspended_processes]
  }
}
