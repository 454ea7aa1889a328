# Control-plane servers in a group of their own, behind a load balancer with TLS.
#
# A new launch template replaces the servers one after the other. Servers store no data themselves: their records are in
# the database, and their secrets in Secrets Manager.

resource "aws_launch_template" "this" {
  name                   = "${var.name}-server"
  image_id               = var.image_id
  instance_type          = var.instance_type
  user_data              = base64encode(var.user_data)
  update_default_version = true
  vpc_security_group_ids = [var.server_security_group_id]
  tags                   = var.tags

  iam_instance_profile {
    name = var.instance_profile
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = var.root_device

    ebs {
      volume_size           = 50 # not less than the volume of the image (infra/image/everstep.pkr.hcl)
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  # The provider's default tags do not reach what AWS creates at a launch.
  dynamic "tag_specifications" {
    for_each = toset(["instance", "network-interface", "volume"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = "${var.name}-server" })
    }
  }
}

resource "aws_autoscaling_group" "this" {
  name                      = "${var.name}-servers"
  min_size                  = var.server_count
  max_size                  = var.server_count + 1
  desired_capacity          = var.server_count
  vpc_zone_identifier       = var.subnet_ids
  target_group_arns         = [aws_lb_target_group.this.arn]
  health_check_type         = "EC2" # readiness fails with the database, and new servers would not help
  wait_for_capacity_timeout = "0"

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  # With two servers, one of them always answers.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 150
      instance_warmup        = 180
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Name = "${var.name}-server" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}

resource "aws_security_group" "balancer" {
  name        = "${var.name}-balancer"
  description = "Load balancer of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-balancer" })
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each          = toset(var.client_cidrs)
  security_group_id = aws_security_group.balancer.id
  description       = "People and programs"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

# A public load balancer has public addresses within the VPC as well: nodes reach it through the NAT gateway.
resource "aws_vpc_security_group_ingress_rule" "nat" {
  count             = var.has_nat ? 1 : 0
  security_group_id = aws_security_group.balancer.id
  description       = "Agents, through the NAT gateway"
  cidr_ipv4         = "${var.nat_address}/32"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.balancer.id
  description                  = "Agents"
  referenced_security_group_id = var.node_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
}

resource "aws_vpc_security_group_egress_rule" "servers" {
  security_group_id            = aws_security_group.balancer.id
  description                  = "Control plane"
  referenced_security_group_id = var.server_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_vpc_security_group_ingress_rule" "balancer" {
  security_group_id            = var.server_security_group_id
  description                  = "Load balancer"
  referenced_security_group_id = aws_security_group.balancer.id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_vpc_security_group_ingress_rule" "peers" {
  security_group_id            = var.server_security_group_id
  description                  = "Requests that only the other server can answer"
  referenced_security_group_id = var.server_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_vpc_security_group_egress_rule" "peers" {
  security_group_id            = var.server_security_group_id
  description                  = "Requests that only the other server can answer"
  referenced_security_group_id = var.server_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_lb" "this" {
  name                       = var.name
  internal                   = !var.is_public
  load_balancer_type         = "application"
  security_groups            = [aws_security_group.balancer.id]
  subnets                    = var.balancer_subnet_ids
  idle_timeout               = 60 # shorter than KEEP_ALIVE_SECONDS of control_plane/app.py
  drop_invalid_header_fields = true
  enable_deletion_protection = var.is_protected
  tags                       = var.tags
}

resource "aws_lb_target_group" "this" {
  name                 = "${var.name}-servers"
  vpc_id               = var.vpc_id
  port                 = var.server_port
  protocol             = "HTTPS" # the load balancer encrypts, and verifies no certificate of a target
  deregistration_delay = 30
  tags                 = var.tags

  health_check {
    protocol            = "HTTPS"
    path                = var.health_path
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 3
    matcher             = "200"
  }
}

resource "aws_lb_listener" "this" {
  load_balancer_arn = aws_lb.this.arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn
  tags              = var.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.this.arn
  }
}
