"""Tests the form of an agent's signed request, and of the identity that STS returns for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core.attestation import (
    Principal,
    Signature,
    nonce,
    nonce_end,
    refusal_of_principal,
    refusal_of_signature,
)
from everstep.protocol import attestation
from everstep.protocol.ids import NodeId

ACCOUNT, REGION, ROLE = "123456789012", "us-east-2", "trainer"


@pytest.mark.parametrize(
    "changes",
    [
        {"authorization": "AWS4-HMAC-SHA256 x"},
        {"authorization": "{given}\r\nx: y"},
        {"authorization": "{given} "},
        {"amz_date": "20260101"},
        {"amz_date": "20260101T000000Z\n"},
        {"amz_date": "20270101T000000Z"},
        {"security_token": "a b"},
        {"security_token": "a\r\nx: y"},
    ],
)
def test_a_signature_of_another_form_is_not_sent_to_sts(changes: dict[str, str]) -> None:
    scope = f"ASIA0000000000000000/20260101/{REGION}/sts/aws4_request"
    given = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={attestation.SIGNED_HEADERS}, Signature={'0' * 64}"
    right = Signature(authorization=given, amz_date="20260101T000000Z", security_token="token")
    assert refusal_of_signature(right, REGION) == ""
    assert refusal_of_signature(
        replace(right, **{name: value.replace("{given}", given) for name, value in changes.items()}), REGION
    )


@pytest.mark.parametrize(
    "arn",
    [
        f"arn:aws:iam::{ACCOUNT}:user/i-0123456789abcdef0",
        f"arn:aws:sts::{ACCOUNT}:federated-user/i-0123456789abcdef0",
        f"arn:aws:sts::{ACCOUNT}:assumed-role/trainer/x/i-0123456789abcdef0",
        f"arn:aws:sts::{ACCOUNT}:assumed-role/trainer/i-0123456789abcdef0\n",
        f"arn:aws:sts::{ACCOUNT}:assumed-role/trainer/i-0123456789abcdef0/",
        "",
    ],
)
def test_only_a_session_of_the_fleets_role_proves_an_instance(arn: str) -> None:
    node = NodeId("i-0123456789abcdef0")
    good = Principal(account=ACCOUNT, arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/trainer/{node}")
    assert refusal_of_principal(good, account=ACCOUNT, role_name=ROLE, node_id=node) == ""
    assert refusal_of_principal(replace(good, account="210987654321"), account=ACCOUNT, role_name=ROLE, node_id=node)
    assert refusal_of_principal(replace(good, arn=arn), account=ACCOUNT, role_name=ROLE, node_id=node)


def test_a_nonce_is_valid_until_its_end_and_only_with_its_seal() -> None:
    key, now = b"k" * 32, 1_800_000_000.0
    given = nonce(key, bytes(16), now)
    end = int(now) + attestation.NONCE_SECONDS
    assert [nonce_end(key, given, at) for at in (now, end - 1, end)] == [end, end, None]
    assert nonce_end(b"x" * 32, given, now) is None
    assert nonce_end(key, f"{end + 9:x}{given[given.index('.') :]}", now) is None
