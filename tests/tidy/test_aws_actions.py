"""`everstep doctor` checks the permission of every AWS action that the code uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import botocore.session
from botocore import xform_name

from everstep.doctor.checks import NODE_ACTIONS, NODE_OPTIONS, SERVER_ACTIONS, SERVER_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("autoscaling", "ec2", "events", "logs", "s3", "secretsmanager", "sqs", "ssm", "sts")
ACTIONS_OF = {
    "s3:CompleteMultipartUpload": "s3:PutObject",
    "s3:CreateMultipartUpload": "s3:PutObject",
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:UploadPart": "s3:PutObject",
    "sqs:DeleteMessageBatch": "sqs:DeleteMessage",
}
"""Name of an operation's action in policies, where it differs from the operation's name.

Source: Service Authorization Reference.
"""
FURTHER = {
    "upload_fileobj": {"s3:PutObject", "s3:AbortMultipartUpload"},
    "assume_role": {"sts:TagSession"},
    "launch_instances": {"ec2:CreateFleet"},
}
"""Actions that a call needs besides the action of its own name, by the call.

`upload_fileobj` uploads a large object in parts, and aborts a failed upload. `assume_role` sets tags of the session.
LaunchInstances creates an EC2 Fleet for the caller.
"""
FREE = frozenset({"sts:GetCallerIdentity"})
"""Operations that need no permission."""


def operations() -> dict[str, str]:
    """Return every operation by its name in boto3."""
    session = botocore.session.get_session()
    found: dict[str, str] = {}
    for service in SERVICES:
        found |= {xform_name(name): f"{service}:{name}" for name in session.get_service_model(service).operation_names}
    return found


def names(file: Path) -> Iterator[str]:
    """Yield every attribute name and string of a module. Clients call AWS operations by either of them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def asked(*files: Path) -> set[str]:
    known = operations()
    used = {name for file in files for name in names(file)}
    found = {known[name] for name in used if "_" in name and name in known} - FREE
    further = {action for name in used & FURTHER.keys() for action in FURTHER[name]}
    return {ACTIONS_OF.get(operation, operation) for operation in found} | further


def test_the_control_planes_actions_are_those_that_it_asks_for() -> None:
    assert asked(*(ROOT / "control_plane" / "cloud").glob("*.py")) == {*SERVER_ACTIONS, *SERVER_OPTIONS}


def test_an_agents_actions_are_those_that_it_asks_for() -> None:
    storage = ROOT / "worker" / "storage"
    everstep = ROOT / "everstep"
    assert asked(
        storage / "node_aws.py", storage / "s3.py", everstep / "bulk.py", everstep / "doctor" / "node_facts.py"
    ) == {
        *NODE_ACTIONS,
        *NODE_OPTIONS,
    }
