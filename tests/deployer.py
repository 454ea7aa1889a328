"""Stands between Terraform and a local AWS, and refuses each call that the policy of a deployer does not allow.

`enforced` evaluates a policy for the action and the resource of each call, as IAM does, and answers AccessDenied.

Invariant: a call whose resource this module cannot name has the resource `*`, which only a statement for all resources
allows. Source: Service Authorization Reference,
https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from infra.local_cloud.service_errors import answer_of
from tests.policies import ACCOUNT, Policy, Request, actions_of, statements_for
from tests.terraform import SOURCES
from tests.unit.local_cloud.served import ServedAws

PREFIXES = {"monitoring": "cloudwatch"}
"""Prefix of a service's actions, where it differs from the name in signatures."""
NUMBER = ACCOUNT.partition(":")[2]
S3_ACTIONS = {
    "GET": {
        "accelerate": "GetAccelerateConfiguration",
        "acl": "GetBucketAcl",
        "cors": "GetBucketCORS",
        "encryption": "GetEncryptionConfiguration",
        "lifecycle": "GetLifecycleConfiguration",
        "location": "GetBucketLocation",
        "logging": "GetBucketLogging",
        "object-lock": "GetBucketObjectLockConfiguration",
        "ownershipControls": "GetBucketOwnershipControls",
        "policy": "GetBucketPolicy",
        "publicAccessBlock": "GetBucketPublicAccessBlock",
        "replication": "GetReplicationConfiguration",
        "requestPayment": "GetBucketRequestPayment",
        "tagging": "GetBucketTagging",
        "versioning": "GetBucketVersioning",
        "versions": "ListBucketVersions",
        "website": "GetBucketWebsite",
        "": "ListBucket",
    },
    "HEAD": {"": "ListBucket"},
    "DELETE": {
        "encryption": "PutEncryptionConfiguration",
        "lifecycle": "PutLifecycleConfiguration",
        "ownershipControls": "PutBucketOwnershipControls",
        "policy": "DeleteBucketPolicy",
        "publicAccessBlock": "PutBucketPublicAccessBlock",
        "tagging": "PutBucketTagging",
        "": "DeleteBucket",
    },
    "PUT": {
        "encryption": "PutEncryptionConfiguration",
        "lifecycle": "PutLifecycleConfiguration",
        "ownershipControls": "PutBucketOwnershipControls",
        "policy": "PutBucketPolicy",
        "publicAccessBlock": "PutBucketPublicAccessBlock",
        "tagging": "PutBucketTagging",
        "versioning": "PutBucketVersioning",
        "": "CreateBucket",
    },
}
"""Actions of S3 on a bucket, by method and by the query parameter that names the part of the bucket."""
S3_OBJECT_ACTIONS = {
    "GET": {"tagging": "GetObjectTagging", "": "GetObject"},
    "HEAD": {"": "GetObject"},
    "PUT": {"tagging": "PutObjectTagging", "": "PutObject"},
    "DELETE": {"": "DeleteObject"},
}
NAMES = {
    "autoscaling": {"AutoScalingGroupName": "autoScalingGroup:*:autoScalingGroupName/{}"},
    "cloudwatch": {"AlarmName": "alarm:{}", "AlarmNames": "alarm:{}", "AlarmNames.member.1": "alarm:{}"},
    "elasticloadbalancing": {},
    "events": {"Name": "rule/{}", "Rule": "rule/{}"},
    "iam": {"InstanceProfileName": "instance-profile/{}", "RoleName": "role/{}"},
    "rds": {
        "DBInstanceIdentifier": "db:{}",
        "DBParameterGroupName": "pg:{}",
        "DBSubnetGroupName": "subgrp:{}",
    },
    "secretsmanager": {"SecretId": "secret:{}", "Name": "secret:{}"},
    "sns": {"Name": "{}"},
    "sqs": {"QueueName": "{}", "QueueUrl": "{}"},
}
"""ARN of a call's resource by the parameter that names it, without the part that all ARNs of the service share."""


WITHOUT_RESOURCES = frozenset(
    f"{service}:{operation}"
    for service, operations in {
        "acm": "RequestCertificate",
        "autoscaling": "DescribeAutoScalingGroups DescribeInstanceRefreshes DescribeScalingActivities",
        "ec2": "DescribeAccountAttributes DescribeAddresses DescribeAddressesAttribute DescribeAvailabilityZones "
        "DescribeImages DescribeInstanceCreditSpecifications DescribeInstanceStatus DescribeInstanceTypeOfferings "
        "DescribeInstanceTypes DescribeInstances DescribeInternetGateways DescribeLaunchTemplateVersions "
        "DescribeLaunchTemplates DescribeNatGateways DescribeNetworkAcls DescribeNetworkInterfaces "
        "DescribePlacementGroups DescribePrefixLists DescribeRegions DescribeRouteTables DescribeSecurityGroupRules "
        "DescribeSecurityGroups DescribeSnapshots DescribeSubnets DescribeTags DescribeVolumes DescribeVpcEndpoints "
        "DescribeVpcs",
        "elasticloadbalancing": "DescribeCapacityReservation DescribeListenerAttributes DescribeListeners "
        "DescribeLoadBalancerAttributes DescribeLoadBalancers DescribeTags DescribeTargetGroupAttributes "
        "DescribeTargetGroups",
        "kms": "CreateKey",
        "route53": "ListHostedZonesByName",
        "sns": "GetSubscriptionAttributes Unsubscribe",
    }.items()
    for operation in operations.split()
)
"""Actions of the policies whose row in the Service Authorization Reference has no resource types.

Only a statement for all resources allows them, even if the call names a resource.
Source: the pages list_SERVICE.html beside
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsns.html
"""
NODE_ROLE, LINKED_ROLES = (f"arn:aws:iam::{NUMBER}:role/{name}" for name in ("everstep-node", "aws-service-role/x"))
PASSED = Request("iam:PassRole", NODE_ROLE, {"iam:PassedToService": ["ec2.amazonaws.com"]})
FURTHER = {
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-template-permissions.html
    "autoscaling:CreateAutoScalingGroup": [Request("ec2:RunInstances", "*"), Request("ec2:CreateTags", "*"), PASSED],
    "autoscaling:UpdateAutoScalingGroup": [Request("ec2:RunInstances", "*"), Request("ec2:CreateTags", "*"), PASSED],
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
    "ec2:RunInstances": [Request("ec2:CreateTags", "*"), PASSED],
    # AWS refuses a policy of a new key with which the caller could not change it again, unless its own policy lets it.
    # https://docs.aws.amazon.com/kms/latest/APIReference/API_CreateKey.html, BypassPolicyLockoutSafetyCheck
    "kms:CreateKey": [Request("kms:PutKeyPolicy", "*")],
    # https://docs.aws.amazon.com/elasticloadbalancing/latest/userguide/elb-api-permissions.html
    "elasticloadbalancing:CreateLoadBalancer": [Request("ec2:DescribeAccountAttributes", "*")],
    # https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/rds-secrets-manager.html and Overview.Encryption.Keys.html
    "rds:CreateDBInstance": [
        Request(action, f"arn:aws:kms:{ACCOUNT}:key/1", {"kms:ViaService": ["rds.us-east-1.amazonaws.com"]})
        for action in ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey")
    ]
    + [
        Request(action, f"arn:aws:secretsmanager:{ACCOUNT}:secret:rds!db-1")
        for action in ("secretsmanager:CreateSecret", "secretsmanager:TagResource")
    ],
}
"""Further requests that AWS authorizes for a call, by its action."""
FIRST_USE = {
    "autoscaling:CreateAutoScalingGroup": "autoscaling.amazonaws.com",
    "elasticloadbalancing:CreateLoadBalancer": "elasticloadbalancing.amazonaws.com",
    "rds:CreateDBInstance": "rds.amazonaws.com",
}
"""Services that create their role in an account with the rights of the first caller, by the call.

Source: https://docs.aws.amazon.com/IAM/latest/UserGuide/using-service-linked-roles.html
"""
TAGGING = {
    "autoscaling": "CreateOrUpdateTags",
    "ec2": "CreateTags",
    "elasticloadbalancing": "AddTags",
    "rds": "AddTagsToResource",
    "sqs": "TagQueue",
}
"""By service: the action that AWS also checks if a call creates a resource with tags.

For other services it is `TagResource`, and for IAM `TagRole`, `TagPolicy` and so on.
"""
FREE = {"sts:GetCallerIdentity"}
TOLERATED = {"iam:GetUser", "iam:ListRoles"}
"""Calls that Terraform's provider makes in search of the account's number. It asks STS if AWS refuses them."""


class Resigned(SigV4Auth):  # type: ignore[misc]  # botocore has no type annotations
    """Signs a request for another host, and keeps its digest of the body."""

    def payload(self, request: Any) -> str:
        return request.headers.get("X-Amz-Content-SHA256") or hashlib.sha256(request.data or b"").hexdigest()

    def _normalize_url_path(self, path: str) -> str:
        return path


def requests_of(service: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> list[Request]:
    """Return the requests that AWS authorizes for a call: its own action, then those on which the call depends."""
    if service == "s3":
        return _of_s3(method, target, body)
    if service == "route53":
        return [_of_route53(method, target)]
    operation = headers.get("X-Amz-Target", "").rpartition(".")[2]
    given: dict[str, Any] = json.loads(body or b"{}") if operation else dict(parse_qsl(body.decode()))
    prefix, operation = PREFIXES.get(service, service), operation or given["Action"]
    action = f"{prefix}:{operation}"
    resource = "*" if action in WITHOUT_RESOURCES else _resource(prefix, given)
    context = {"iam:PolicyARN": [given["PolicyArn"]]} if "PolicyArn" in given else {}
    found = [Request(action, resource, context), *FURTHER.get(action, [])]
    if given.get("PrivateDnsEnabled") == "true":
        # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
        found.append(Request("route53:AssociateVPCWithHostedZone", "*"))
    if action == "iam:AddRoleToInstanceProfile":
        found.append(replace(PASSED, resource=_resource(prefix, {"RoleName": given["RoleName"]})))
    if action in FIRST_USE:
        named = {"iam:AWSServiceName": [FIRST_USE[action]]}
        found.append(Request("iam:CreateServiceLinkedRole", LINKED_ROLES, named))
    if operation.startswith(("Create", "Put", "Run")) and any(re.match(r"tags?\b", name, re.I) for name in given):
        kind = operation.removeprefix("Create") if prefix == "iam" else "Resource"
        found.append(Request(f"{prefix}:{TAGGING.get(prefix, f'Tag{kind}')}", resource))
    return found


def _of_route53(method: str, target: str) -> Request:
    found = re.fullmatch(r"/2013-04-01/(hostedzonesbyname|hostedzone/\w+/rrset/?)(?:\?.*)?", target)
    assert found is not None, f"the action of {method} {target} is missing"
    if method == "GET":
        return Request("route53:ListHostedZonesByName", "*")
    return Request("route53:ChangeResourceRecordSets", f"arn:aws:route53:::{found[1].partition('/rrset')[0]}")


def _of_s3(method: str, target: str, body: bytes) -> list[Request]:
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    if method == "POST" and "delete" in query:
        action = "s3:DeleteObjectVersion" if b"<VersionId>" in body else "s3:DeleteObject"
        return [
            Request(action, f"arn:aws:s3:::{bucket}/{each}") for each in re.findall(r"<Key>(.*?)</Key>", body.decode())
        ]
    actions = (S3_OBJECT_ACTIONS if key else S3_ACTIONS)[method]
    action = next((found for name, found in actions.items() if name and name in query), "") or actions[""]
    return [Request(f"s3:{action}", f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else ""))]


def _resource(service: str, given: Mapping[str, Any]) -> str:
    values = {name: value[0] if isinstance(value, list) and value else value for name, value in given.items()}
    place = f"arn:aws:{service}:{':' + NUMBER if service == 'iam' else ACCOUNT}:"
    for name, form in NAMES.get(service, {}).items():
        value = values.get(name)
        if isinstance(value, str) and not value.startswith("arn:"):
            return place + form.format(value.rpartition("/")[2] if "://" in value else value)
    for name in ("LoadBalancerArn", *values):
        if str(values.get(name)).startswith(f"arn:aws:{service}:"):
            return str(values[name])
    if service == "elasticloadbalancing" and "Name" in values:
        kind = "targetgroup" if given["Action"] == "CreateTargetGroup" else "loadbalancer/app"
        return f"{place}{kind}/{values['Name']}/"
    return "*"


POLICIES = {path.stem: json.loads(path.read_text()) for path in sorted((SOURCES / "deployer-policy").glob("*.json"))}
"""Policy of a deployer by root, and the policy for the `preparation` of images, certificate and DNS records."""
PACKER = (
    *("ec2:CreateImage", "ec2:CreateKeyPair", "ec2:CreateSecurityGroup", "ec2:CreateTags", "ec2:DeleteKeyPair"),
    *("ec2:DeleteSecurityGroup", "ec2:DeleteSnapshot", "ec2:DeregisterImage", "ec2:DescribeImages"),
    *("ec2:DescribeInstanceStatus", "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeInstances"),
    *("ec2:DescribeRegions", "ec2:DescribeSecurityGroups", "ec2:DescribeSnapshots", "ec2:DescribeSubnets"),
    *("ec2:DescribeTags", "ec2:DescribeVolumes", "ec2:DescribeVpcs", "ec2:ModifyImageAttribute", "ec2:RunInstances"),
    *("ec2:StopInstances", "ec2:TerminateInstances"),
)
"""Actions of Packer's builder `amazon-ebs` that `infra/image/everstep.pkr.hcl` needs, without those of its session.

ModifyImageAttribute is for `imds_support`. Source: the section on IAM in
https://developer.hashicorp.com/packer/integrations/hashicorp/amazon
"""
PACKERS_CALLS = [
    *(Request(action, "*") for action in PACKER),
    Request("ssm:StartSession", f"arn:aws:ec2:{ACCOUNT}:instance/i-1"),
    Request("ssm:StartSession", "arn:aws:ssm:us-east-1::document/AWS-StartPortForwardingSession"),
    Request("ssm:TerminateSession", f"arn:aws:ssm:{ACCOUNT}:session/1"),
    Request("iam:GetInstanceProfile", f"arn:aws:iam::{NUMBER}:instance-profile/everstep-image"),
]
"""Requests that AWS authorizes for a build of an image."""
UNUSED = {
    # Terraform changes tags only after a person has changed them.
    *("autoscaling:DeleteTags", "cloudwatch:UntagResource", "ec2:DeleteTags", "elasticloadbalancing:RemoveTags"),
    *("events:UntagResource", "iam:UntagInstanceProfile", "iam:UntagRole", "kms:UntagResource", "sns:UntagResource"),
    *("rds:RemoveTagsFromResource", "secretsmanager:UntagResource", "sqs:UntagQueue", "sqs:SetQueueAttributes"),
    # The local cloud has no placement groups, and its buckets have no policy and no versions (tests/terraform.py).
    *("ec2:CreatePlacementGroup", "ec2:DeletePlacementGroup", "ec2:DescribePlacementGroups", "ec2:DescribeImages"),
    *("s3:DeleteBucketPolicy", "s3:PutBucketPolicy", "s3:ListBucketVersions", "s3:DeleteObjectVersion"),
    # The tests change no servers while AWS replaces them, no listener and no target group.
    *("autoscaling:CancelInstanceRefresh", "autoscaling:DescribeInstanceRefreshes"),
    *("elasticloadbalancing:ModifyListener", "elasticloadbalancing:ModifyTargetGroup"),
    # The provider 6 calls it for each listener. A person looks at the activities of a group that starts no server.
    *("elasticloadbalancing:ModifyListenerAttributes", "autoscaling:DescribeScalingActivities"),
    *("elasticloadbalancing:SetSecurityGroups", "elasticloadbalancing:SetSubnets"),
    # Another zone changes these. moto loses a subnet group that changes, so the tests apply no such change.
    *("ec2:ModifyVpcEndpoint", "rds:ModifyDBSubnetGroup"),
    # A later release can change the text of a rule. A zone before the others moves the NAT gateway.
    *("ec2:ModifySecurityGroupRules", "ec2:ReplaceRoute"),
    # The tests name the image, leave the protection off, and change templates in `production` only.
    *("ssm:GetParameter", "rds:ModifyDBInstance", "ec2:CreateLaunchTemplateVersion", "ec2:ModifyLaunchTemplate"),
}
"""Actions of the policies that no test uses, with the reason."""


def check_uses(policy: Policy, made: list[Request]) -> None:
    """Check that calls used each action of a policy, apart from `UNUSED`."""
    granted = {(each["Sid"], action) for each in policy["Statement"] for action in actions_of(each)}
    used = {(each["Sid"], request.action) for request in made for each in statements_for(policy, request)}
    unused = sorted((sid, action) for sid, action in granted - used if action not in UNUSED)
    assert unused == [], f"no call needs {unused}"


@contextmanager
def enforced(aws: ServedAws, policy: Policy) -> Iterator[tuple[str, list[Request]]]:
    """Serve the local AWS with this policy for all callers. Yield the URL, and the calls that the policy allowed."""
    host, made = urlsplit(aws.url).netloc, list[Request]()
    keys = Credentials(aws.keys.access_key_id, aws.keys.secret_access_key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            signature = re.search(r"Credential=[^/]+/[^/]+/([^/]+)/([^/]+)/", self.headers["Authorization"])
            assert signature is not None, self.path
            region, service = signature.groups()
            requests = requests_of(service, self.command, self.path, self.headers, body)
            denied = [each for each in requests if each.action not in FREE and not statements_for(policy, each)]
            if denied:
                refused.extend(each for each in denied if each.action not in TOLERATED)
                words = ", ".join(f"{each.action} on {each.resource}" for each in denied)
                _, headers, content = answer_of(service, "403 Forbidden", "AccessDenied", words, "0")
                return self.say(403, headers, content)
            made.extend(requests)
            kept = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "authorization", "connection", "x-amz-date", "accept-encoding")
            }
            again = AWSRequest(self.command, f"http://{host}{self.path}", kept, body)
            Resigned(keys, service, region).add_auth(again)
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request(self.command, self.path, body, dict(again.headers.items()))
            found = connection.getresponse()
            content = found.read()
            self.say(found.status, found.getheaders(), content)
            connection.close()

        def say(self, status: int, headers: Any, content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    refused = list[Request]()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", made
        assert refused == [], "the policy lacks these"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
