# The VPC, its subnets and endpoints, and the two security groups.
#
# Nodes exchange replicas and collective traffic of any protocol with each other. EFA needs a rule for all traffic from
# and to the group itself. Nodes reach the control plane at one port. Nobody outside the VPC reaches either of them.
#
# In private subnets, instances reach AWS through VPC endpoints. With a NAT gateway, they also reach the internet.

data "aws_region" "this" {}

data "aws_vpc" "given" {
  count = var.vpc_id == null ? 0 : 1
  id    = var.vpc_id
}

data "aws_subnet" "given" {
  for_each = var.subnet_ids
  id       = each.value

  lifecycle {
    postcondition {
      condition     = self.vpc_id == var.vpc_id && self.availability_zone == each.key
      error_message = "Subnet ${each.value} is in ${self.vpc_id} and ${self.availability_zone}, not in vpc_id and ${each.key}."
    }
  }
}

data "aws_route_table" "given" {
  for_each       = toset(var.route_table_ids)
  route_table_id = each.value

  lifecycle {
    postcondition {
      condition     = self.vpc_id == var.vpc_id
      error_message = "Route table ${each.value} is in ${self.vpc_id}, not in vpc_id."
    }
  }
}

# Session Manager needs ssm and ssmmessages. Newer regions do not have ec2messages.
# Source: https://docs.aws.amazon.com/systems-manager/latest/userguide/systems-manager-setting-up-messageAPIs.html
locals {
  is_created   = var.vpc_id == null
  vpc_id       = local.is_created ? aws_vpc.this[0].id : var.vpc_id
  vpc_cidrs    = local.is_created ? [var.cidr] : data.aws_vpc.given[0].cidr_block_associations[*].cidr_block
  numbers      = { for zone in var.zones : zone => index(split("", "abcdefghijklmno"), substr(zone, -1, 1)) }
  subnet_ids   = local.is_created ? { for zone, subnet in aws_subnet.this : zone => subnet.id } : var.subnet_ids
  route_tables = local.is_created ? [aws_route_table.this[0].id] : var.route_table_ids
  tags         = merge(var.tags, { "everstep:installation" = var.name })
  has_gateway  = local.is_created && (var.is_public || var.has_nat || var.has_public_subnets)
  public_zones = local.is_created && !var.is_public && (var.has_nat || var.has_public_subnets) ? var.zones : []

  endpoint_names = setsubtract(setunion(
    ["autoscaling", "ec2", "logs", "secretsmanager", "sqs", "ssm", "ssmmessages", "sts"],
    var.extra_endpoints,
  ), var.existing_endpoints)
}

resource "aws_vpc" "this" {
  count                = local.is_created ? 1 : 0
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = var.name })
}

# Nothing uses the default group. Without this resource, it would let its members reach each other and the internet.
resource "aws_default_security_group" "this" {
  count  = local.is_created ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${var.name}-unused" })
}

# The letter of a zone decides the range of its subnets, so that they stay when other zones join or leave the list.
resource "aws_subnet" "this" {
  for_each                = local.is_created ? local.numbers : {}
  vpc_id                  = local.vpc_id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = var.is_public
  tags                    = merge(local.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_route_table" "this" {
  count  = local.is_created ? 1 : 0
  vpc_id = local.vpc_id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_route_table_association" "this" {
  for_each       = aws_subnet.this
  subnet_id      = each.value.id
  route_table_id = aws_route_table.this[0].id
}

resource "aws_internet_gateway" "this" {
  count  = local.has_gateway ? 1 : 0
  vpc_id = local.vpc_id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_route" "internet" {
  count                  = local.is_created && var.is_public ? 1 : 0
  route_table_id         = aws_route_table.this[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

# Public subnets contain the NAT gateway and a public load balancer, and no instances.
resource "aws_subnet" "public" {
  for_each          = { for zone in local.public_zones : zone => local.numbers[zone] }
  vpc_id            = local.vpc_id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 8, 255 - each.value)
  tags              = merge(local.tags, { Name = "${var.name}-public-${each.key}" })
}

resource "aws_route_table" "public" {
  count  = length(local.public_zones) == 0 ? 0 : 1
  vpc_id = local.vpc_id
  tags   = merge(local.tags, { Name = "${var.name}-public" })
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_route" "public" {
  count                  = length(local.public_zones) == 0 ? 0 : 1
  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_eip" "nat" {
  count  = local.is_created && var.has_nat ? 1 : 0
  domain = "vpc"
  tags   = merge(local.tags, { Name = "${var.name}-nat" })
}

# One gateway, in the first zone by name. If that zone fails, the other zones lose the internet, but not AWS.
resource "aws_nat_gateway" "this" {
  count         = local.is_created && var.has_nat ? 1 : 0
  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[sort(var.zones)[0]].id
  tags          = merge(local.tags, { Name = var.name })
  depends_on    = [aws_route.public]
}

resource "aws_route" "nat" {
  count                  = local.is_created && var.has_nat ? 1 : 0
  route_table_id         = aws_route_table.this[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

# With this endpoint, checkpoints do not pass a gateway to the internet and cause no transfer costs.
resource "aws_vpc_endpoint" "s3" {
  count             = contains(var.existing_endpoints, "s3") ? 0 : 1
  vpc_id            = local.vpc_id
  service_name      = "com.amazonaws.${data.aws_region.this.id}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = local.route_tables
  tags              = merge(local.tags, { Name = "${var.name}-s3" })
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = var.is_public ? toset([]) : local.endpoint_names
  vpc_id              = local.vpc_id
  service_name        = "com.amazonaws.${data.aws_region.this.id}.${each.key}"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = values(local.subnet_ids)
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true
  tags                = merge(local.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_security_group" "endpoints" {
  count       = var.is_public ? 0 : 1
  name        = "${var.name}-endpoints"
  description = "HTTPS from the VPC to the AWS endpoints of ${var.name}"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${var.name}-endpoints" })
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  for_each          = toset(var.is_public ? [] : local.vpc_cidrs)
  security_group_id = aws_security_group.endpoints[0].id
  description       = "AWS APIs"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_security_group" "nodes" {
  name        = "${var.name}-nodes"
  description = "Nodes of the fleets of ${var.name}"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${var.name}-nodes" })
}

resource "aws_vpc_security_group_ingress_rule" "nodes_from_nodes" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "Replicas and collective traffic"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

# EFA needs this rule in addition to the one below: it accepts no rule with an address range.
resource "aws_vpc_security_group_egress_rule" "nodes_to_nodes" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "Replicas and collective traffic"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "nodes_to_all" {
  security_group_id = aws_security_group.nodes.id
  description       = "AWS APIs, the load balancer and package registries"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_egress_rule" "nodes_to_servers" {
  count                        = var.has_load_balancer ? 0 : 1
  security_group_id            = aws_security_group.nodes.id
  description                  = "Control plane"
  referenced_security_group_id = aws_security_group.servers.id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_security_group" "servers" {
  name        = "${var.name}-servers"
  description = "Control plane of ${var.name}"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${var.name}-servers" })
}

resource "aws_vpc_security_group_ingress_rule" "servers_from_nodes" {
  count                        = var.has_load_balancer ? 0 : 1
  security_group_id            = aws_security_group.servers.id
  description                  = "Agents"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = var.server_port
  to_port                      = var.server_port
}

resource "aws_vpc_security_group_egress_rule" "servers_to_all" {
  security_group_id = aws_security_group.servers.id
  description       = "AWS APIs and package registries"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}
