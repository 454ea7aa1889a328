"""Plans of Terraform's root `production` for choices that no other test applies, against the local cloud."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from tests.aws_page import PAGE
from tests.terraform import IMAGE, Terraform, check_tags, needs_provider, needs_terraform, terraform_of
from tests.unit.local_cloud.served import ServedAws, served_aws

ZONES = ["us-east-1a", "us-east-1b"]
FLEET = {"zone": ZONES[0], "instance_type": "p5.48xlarge", "image_id": IMAGE, "max_nodes": 4}
GIVEN: Mapping[str, Any] = {
    "region": "us-east-1",
    "domain_name": "everstep.example.com",
    "certificate_arn": "arn:aws:acm:us-east-1:123456789012:certificate/1",
    "image_id": IMAGE,
    "fleets": {"main": FLEET},
}

pytestmark = [pytest.mark.production, pytest.mark.timeout(600), needs_terraform, needs_provider]


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.fixture(scope="module")
def production(aws: ServedAws, tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    """Return Terraform's root module `production`. The tests only plan it, and never apply it."""
    return terraform_of("production", aws.url, aws.keys, tmp_path_factory.mktemp("terraform"))


def of_type(planned: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the planned resources of one type, by address."""
    return {address: values for address, values in planned.items() if f".{kind}." in f".{address}"}


def test_a_created_vpc_has_no_way_to_the_internet_unless_one_is_wanted(production: Terraform) -> None:
    planned = production.planned(**GIVEN, zones=ZONES)
    for kind in ("aws_internet_gateway", "aws_nat_gateway", "aws_eip", "aws_route"):
        assert of_type(planned, kind) == {}, kind
    assert not any(subnet["map_public_ip_on_launch"] for subnet in of_type(planned, "aws_subnet").values())
    assert planned["module.servers.aws_lb.this"]["internal"] is True
    assert of_type(planned, "aws_vpc_security_group_ingress_rule").keys() >= {
        "module.servers.aws_vpc_security_group_ingress_rule.nodes"
    }
    target_group = planned["module.servers.aws_lb_target_group.this"]
    assert target_group["protocol"] == target_group["health_check"][0]["protocol"] == "HTTPS"
    assert not any("clients" in address for address in planned), "nobody outside reaches the load balancer"
    endpoints = {values["service_name"].rpartition(".")[2] for values in of_type(planned, "aws_vpc_endpoint").values()}
    # An administrator reaches the servers by a port that Systems Manager forwards through its two endpoints.
    assert {"ssm", "ssmmessages"} < endpoints
    assert not {"ec2messages", "events", "sns"} & endpoints


def test_a_nat_gateway_is_in_a_public_subnet_and_instances_are_not(production: Terraform) -> None:
    planned = production.planned(**GIVEN, zones=ZONES, has_nat=True)
    network = "module.network"
    assert planned[f"{network}.aws_nat_gateway.this[0]"]
    assert planned[f"{network}.aws_route.nat[0]"]["destination_cidr_block"] == "0.0.0.0/0"
    assert planned[f"{network}.aws_route.public[0]"]["destination_cidr_block"] == "0.0.0.0/0"
    ranges = {address: values["cidr_block"] for address, values in of_type(planned, "aws_subnet").items()}
    assert ranges == {
        f'{network}.aws_subnet.this["us-east-1a"]': "10.80.0.0/20",
        f'{network}.aws_subnet.this["us-east-1b"]': "10.80.16.0/20",
        f'{network}.aws_subnet.public["us-east-1a"]': "10.80.255.0/24",
        f'{network}.aws_subnet.public["us-east-1b"]': "10.80.254.0/24",
    }
    assert planned["module.servers.aws_lb.this"]["internal"] is True


def test_zones_keep_their_subnets_while_other_zones_join_and_leave(production: Terraform) -> None:
    def ranges(*zones: str) -> dict[str, str]:
        subnets = of_type(production.planned(**GIVEN, zones=list(zones), has_nat=True), "aws_subnet")
        return {address: values["cidr_block"] for address, values in subnets.items()}

    both, more = ranges("us-east-1a", "us-east-1c"), ranges("us-east-1d", "us-east-1c", "us-east-1b", "us-east-1a")
    assert len(set(more.values())) == 8
    assert both.items() < more.items()
    refusal = production.refusal(**GIVEN, zones=["us-east-1a", "us-east-1-atl-1a"])
    assert "use different letters" in refusal


def test_a_public_load_balancer_has_public_subnets_of_its_own(production: Terraform) -> None:
    planned = production.planned(**GIVEN, zones=ZONES, is_public=True, client_cidrs=["203.0.113.0/24"])
    assert planned["module.servers.aws_lb.this"]["internal"] is False
    assert len([address for address in of_type(planned, "aws_subnet") if ".public[" in address]) == len(ZONES)
    assert planned["module.network.aws_internet_gateway.this[0]"]
    assert len(of_type(planned, "aws_nat_gateway")) == 1, "nodes reach the public addresses through it"
    assert "module.servers.aws_vpc_security_group_ingress_rule.nat[0]" in planned
    (rule,) = (values for address, values in planned.items() if "ingress_rule.clients" in address)
    assert (rule["cidr_ipv4"], rule["from_port"]) == ("203.0.113.0/24", 443)


def test_a_given_vpc_is_used_and_gets_no_subnets_or_gateways(production: Terraform, aws: ServedAws) -> None:
    ec2 = aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.7.{index}.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for index, zone in enumerate(ZONES)
    }
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    given = {**GIVEN, "vpc_id": vpc, "subnet_ids": subnets, "route_table_ids": [table]}
    planned = production.planned(**given, existing_endpoints=["ssm", "s3"])
    for kind in ("aws_vpc", "aws_subnet", "aws_route_table", "aws_internet_gateway", "aws_default_security_group"):
        assert of_type(planned, kind) == {}, kind
    endpoints = of_type(planned, "aws_vpc_endpoint")
    assert {values["vpc_id"] for values in endpoints.values()} == {vpc}
    services = {values["service_name"].rpartition(".")[2] for values in endpoints.values()}
    assert "sts" in services
    assert not {"ssm", "s3"} & services
    assert planned['module.fleet["everstep-main"].aws_autoscaling_group.this']["vpc_zone_identifier"] == [
        subnets[ZONES[0]]
    ]
    assert set(planned["module.servers.aws_lb.this"]["subnets"]) == set(subnets.values())

    balancer = ["subnet-0aaaaaaaaaaaaaaaa", "subnet-0bbbbbbbbbbbbbbbb"]
    planned = production.planned(**given, is_public=True, public_subnet_ids=balancer)
    assert set(planned["module.servers.aws_lb.this"]["subnets"]) == set(balancer)
    assert "needs public_subnet_ids in two zones" in production.refusal(**given, is_public=True)
    foreign = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    other = ec2.create_route_table(VpcId=foreign)["RouteTable"]["RouteTableId"]
    assert f"Route table {other} is in {foreign}" in production.refusal(**{**given, "route_table_ids": [other]})
    swapped = dict(zip(ZONES, reversed(subnets.values()), strict=True))
    assert f"Subnet {subnets[ZONES[1]]} is in" in production.refusal(**{**given, "subnet_ids": swapped})
    assert "need a route to S3" in production.refusal(**{**given, "route_table_ids": []})
    assert "A NAT gateway needs a created VPC" in production.refusal(**given, has_nat=True)


def test_a_capacity_block_is_in_the_template_and_reservations_are_in_the_group(production: Terraform) -> None:
    reservations = ["cr-0123456789abcdef0", "cr-0123456789abcdef1"]
    (example,) = re.findall(r'`("main": \{[^`]*"is_capacity_block": true\})`', PAGE.read_text())
    fleets = {
        "block": {**json.loads(f"{{{example}}}")["main"], "image_id": IMAGE},
        "first": {**FLEET, "capacity_reservation_ids": reservations},
        "only": {**FLEET, "capacity_reservation_ids": reservations, "is_reserved_only": True},
        "open": FLEET,
    }
    planned = production.planned(**{**GIVEN, "fleets": fleets}, zones=ZONES)
    markets, targets, preferences = {}, {}, {}
    for name in fleets:
        template = planned[f'module.fleet["everstep-{name}"].aws_launch_template.this']
        markets[name] = [each["market_type"] for each in template["instance_market_options"]]
        targets[name] = [
            target["capacity_reservation_id"]
            for each in template["capacity_reservation_specification"]
            for target in each["capacity_reservation_target"]
        ]
        group = planned[f'module.fleet["everstep-{name}"].aws_autoscaling_group.this']
        for each in group.get("capacity_reservation_specification", ()):
            (target,) = each["capacity_reservation_target"]
            assert target["capacity_reservation_ids"] == reservations
            preferences[name] = each["capacity_reservation_preference"]
    assert markets == {"block": ["capacity-block"], "first": [], "only": [], "open": []}
    assert targets == {"block": reservations[:1], "first": [], "only": [], "open": []}
    assert preferences == {"first": "capacity-reservations-first", "only": "capacity-reservations-only"}


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"capacity_reservation_ids": ["cr-1", "cr-2"]}, "one capacity block"),
        ({"capacity_reservation_ids": ["cr-1"], "placement_group": "own"}, "leave out the placement group"),
    ],
)
def test_a_fleet_is_in_one_capacity_block_without_a_placement_group(
    production: Terraform, options: dict[str, Any], refusal: str
) -> None:
    fleet = {**FLEET, **options, "is_capacity_block": True}
    assert refusal in production.refusal(**{**GIVEN, "fleets": {"main": fleet}}, zones=ZONES)


@pytest.mark.parametrize(
    ("fleets", "refusal"),
    [
        ({"main": {**FLEET, "is_clustered": True, "placement_group": "own"}}, "is_clustered creates a placement group"),
        ({"servers": FLEET}, "choose another key"),
        ({}, "An installation needs a fleet"),
    ],
)
def test_a_fleet_that_would_meet_another_resource_is_refused(
    production: Terraform, fleets: dict[str, Any], refusal: str
) -> None:
    assert refusal in production.refusal(**{**GIVEN, "fleets": fleets}, zones=ZONES)


def test_volumes_are_as_large_as_those_of_the_image(production: Terraform) -> None:
    """EC2 refuses a volume that is smaller than the snapshot of its image."""
    packer = (Path(__file__).parents[2] / "infra" / "image" / "everstep.pkr.hcl").read_text()
    [size] = map(int, re.findall(r"volume_size *= (\d+)", packer))
    templates = of_type(production.planned(**GIVEN, zones=ZONES), "aws_launch_template")
    volumes = [values["block_device_mappings"][0]["ebs"][0]["volume_size"] for values in templates.values()]
    assert len(volumes) == 2
    assert min(volumes) >= size


FIRST = (0, 0, "interface")


def efa_only(cards: range) -> list[tuple[int, int, str]]:
    return [(card, 1 if card == 0 else 0, "efa-only") for card in cards]


def with_ip(cards: range) -> list[tuple[int, int, str]]:
    return [(card, 1, "interface") for card in cards]


LAYOUTS = {
    "c7i.large": [],
    "g6.12xlarge": [],
    "c6in.32xlarge": [],
    # AWS: "use case 2" of each of these three types.
    "p5.48xlarge": [FIRST, *with_ip(range(4, 32, 4)), *efa_only(range(32))],
    "p5e.48xlarge": [FIRST, *with_ip(range(4, 32, 4)), *efa_only(range(32))],
    "p6-b200.48xlarge": [FIRST, *with_ip(range(1, 8)), *efa_only(range(8))],
    # AWS: "use case 1" has card 0 alone, and "use case 2" every card.
    "p6-b300.48xlarge": [FIRST, *with_ip(range(1, 17, 2)), *efa_only(range(1, 17))],
    # AWS documents no layout of these types beyond the general rule.
    "g7e.48xlarge": [FIRST, *with_ip(range(1, 4)), *efa_only(range(4))],
    "p4d.24xlarge": [FIRST, *with_ip(range(1, 4)), *efa_only(range(4))],
    "p5en.48xlarge": [FIRST, *with_ip(range(2, 16, 2)), *efa_only(range(16))],
    "trn1.32xlarge": [FIRST, *with_ip(range(1, 8)), *efa_only(range(8))],
    "trn2.48xlarge": [FIRST, *with_ip(range(1, 16)), *efa_only(range(16))],
}
"""Network interfaces by instance type: network card, device index, and kind.

Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
"""


def test_the_cards_of_each_type_have_the_layout_of_awss_guide(production: Terraform, aws: ServedAws) -> None:
    given = [{"card": 0, "device": 0, "kind": "interface"}, {"card": 2, "device": 1, "kind": "efa"}]
    fleets = {name.replace(".", "-"): {**FLEET, "instance_type": name} for name in LAYOUTS}
    fleets |= {"own": {**FLEET, "network_interfaces": given}, "none": {**FLEET, "network_interfaces": []}}
    planned = production.planned(**{**GIVEN, "fleets": fleets}, zones=ZONES)
    templates = {
        name: planned[f'module.fleet["everstep-{name}"].aws_launch_template.this']["network_interfaces"]
        for name in fleets
    }
    found = {
        name: [(each["network_card_index"], each["device_index"], each["interface_type"]) for each in interfaces]
        for name, interfaces in templates.items()
    }
    assert found.pop("own") == [(0, 0, "interface"), (2, 1, "efa")]
    assert found.pop("none") == []
    assert found == {name.replace(".", "-"): layout for name, layout in LAYOUTS.items()}
    described = aws.client("ec2").describe_instance_types(InstanceTypes=list(LAYOUTS))["InstanceTypes"]
    for kind in described:
        check_layout(LAYOUTS[kind["InstanceType"]], kind["NetworkInfo"])
    wrong = {"wrong": {**FLEET, "network_interfaces": [{"card": 0, "device": 0, "kind": "efa-only"}]}}
    assert "cannot be efa-only" in production.refusal(**{**GIVEN, "fleets": wrong}, zones=ZONES)


def check_layout(layout: list[tuple[int, int, str]], network: Any) -> None:
    """Check that EC2 accepts these interfaces for a type, and that the type's EFA interfaces are all used."""
    assert len({(card, device) for card, device, _ in layout}) == len(layout)
    for card, interfaces in groupby(sorted(layout), key=itemgetter(0)):
        kinds = [kind for _, _, kind in interfaces]
        facts = network["NetworkCards"][card]
        assert len(kinds) <= facts["MaximumNetworkInterfaces"]
        assert set(kinds) <= set(facts["InterfaceTypes"])
    if layout:
        assert [kind for _, _, kind in layout].count("efa-only") == network["EfaInfo"]["MaximumEfaInterfaces"]


def test_a_fleet_may_have_several_instance_types_and_spot_instances(production: Terraform) -> None:
    fleet = {**FLEET, "instance_type": "g6.12xlarge", "other_instance_types": ["g6.24xlarge"], "spot_percentage": 75}
    fleets = {"mixed": fleet, "plain": FLEET}
    planned = production.planned(**{**GIVEN, "fleets": fleets}, zones=ZONES)
    plain = planned['module.fleet["everstep-plain"].aws_autoscaling_group.this']
    assert len(plain["launch_template"]) == 1
    group = planned['module.fleet["everstep-mixed"].aws_autoscaling_group.this']
    (policy,) = group["mixed_instances_policy"]
    assert not group.get("launch_template")
    assert [each["instance_type"] for each in policy["launch_template"][0]["override"]] == [
        "g6.12xlarge",
        "g6.24xlarge",
    ]
    assert policy["instances_distribution"][0]["on_demand_percentage_above_base_capacity"] == 25
    reserved = {**fleet, "capacity_reservation_ids": ["cr-0123456789abcdef0"]}
    refusal = production.refusal(**{**GIVEN, "fleets": {"mixed": reserved}}, zones=ZONES)
    assert "A reservation has one instance type" in refusal


def test_all_resources_and_what_aws_launches_have_the_tags(production: Terraform) -> None:
    tags = {"cost center": "research/1", "team/owner": "vision"}
    fleets = {"clustered": {**FLEET, "is_clustered": True}, "mixed": {**FLEET, "spot_percentage": 50}}
    planned = production.planned(**{**GIVEN, "fleets": fleets}, zones=ZONES, has_nat=True, is_public=True, tags=tags)
    check_tags(planned, {**tags, "everstep:installation": "everstep"})
    templates = of_type(planned, "aws_launch_template")
    assert len(templates) == 3
    # Tags in the instance metadata would forbid keys with a space or a slash.
    assert not any(values["metadata_options"][0].get("instance_metadata_tags") for values in templates.values())


@pytest.mark.parametrize("root", ["production", "quickstart"])
def test_all_roles_have_the_permissions_boundary(root: str, aws: ServedAws, tmp_path: Path) -> None:
    boundary = "arn:aws:iam::123456789012:policy/boundary"
    wheel = tmp_path / "everstep.whl"
    wheel.write_bytes(b"a wheel")
    given = {"production": {**GIVEN, "zones": ZONES}, "quickstart": {"region": "us-east-1", "wheel": str(wheel)}}[root]
    planned = terraform_of(root, aws.url, aws.keys, tmp_path).planned(**given, permissions_boundary=boundary)
    roles = of_type(planned, "aws_iam_role")
    assert len(roles) == 2
    assert {values["permissions_boundary"] for values in roles.values()} == {boundary}
