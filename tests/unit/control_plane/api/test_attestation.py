"""Attestation: an instance proves its identity by a request to STS that its role's credentials have signed.

The tests run the whole exchange with an STS that verifies signatures, and try every known attack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from sqlalchemy import select
from websockets.exceptions import InvalidStatus

from control_plane.api.auth import find_token
from control_plane.api.routes.attestation import SESSION_SECONDS
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.identity import Attestation, RegionalSts, principal_in
from control_plane.db import tokens
from control_plane.db.models import TokenRow
from everstep.protocol import attestation
from everstep.protocol.codec import encode
from everstep.protocol.ids import NodeId
from tests.unit import sts as local_sts
from tests.unit.control_plane.api.conftest import GROUP, Service
from tests.unit.control_plane.api.test_agents import closed, hello, join, line, report, until
from tests.unit.sts import ACCOUNT, HOST, IDENTITY, REGION, Keys, Sts, keys_of
from worker.agent import attestation as agent
from worker.agent.attestation import Claim
from worker.errors import AttestationFailed

ROLE = "trainer"


@pytest.fixture
def sts() -> Iterator[Sts]:
    with local_sts.serve() as running:
        yield running


@dataclass
class Instance:
    """An EC2 instance of the fleet, with the credentials of its role."""

    service: Service
    node: str
    keys: Keys

    @property
    def claim(self) -> Claim:
        return Claim(node_id=NodeId(self.node), fleet="main", region=REGION, server_id=self.service.services.server_id)

    def nonce(self) -> str:
        return self.post("/v1/agents/nonce", {}).json()["Nonce"]

    def request(self, nonce: str | None = None, **changes: str) -> dict[str, Any]:
        """Return the body that an agent sends, with the given changes."""
        nonce = nonce or self.nonce()
        signed = agent.sign(self.claim, self.keys, nonce)
        return self.said(nonce, signed, **changes)

    def said(self, nonce: str, signed: dict[str, str], **changes: str) -> dict[str, Any]:
        return {
            "FleetName": "main",
            "NodeId": self.node,
            "Nonce": nonce,
            "Authorization": signed["Authorization"],
            "AmzDate": signed["X-Amz-Date"],
            "SecurityToken": signed["X-Amz-Security-Token"],
            **changes,
        }

    def ask(self, request: dict[str, Any]) -> httpx.Response:
        return self.post("/v1/agents/session", request)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"http://{self.service.address}{path}", json=body, trust_env=False, timeout=30)

    def signed_by_hand(
        self,
        nonce: str,
        *,
        host: str = HOST,
        body: bytes = attestation.BODY,
        headers: dict[str, str] | None = None,
        **more: str,
    ):
        """Return the headers of a correctly signed request that differs from the request that the service expects."""
        chosen = (
            {**attestation.headers(server_id=self.service.services.server_id, nonce=nonce), **more}
            if headers is None
            else headers
        )
        request = AWSRequest("POST", f"https://{host}/", headers=chosen, data=body)
        SigV4Auth(self.keys, "sts", REGION).add_auth(request)
        return {name: request.headers[name] for name in ("Authorization", "X-Amz-Date", "X-Amz-Security-Token")}


@pytest.fixture
def instance(service, client, sts) -> Instance:
    service.app.state.services = replace(
        service.services,
        attestation=Attestation(sts=RegionalSts(REGION, endpoint_url=sts.url), region=REGION, account=lambda: ACCOUNT),
    )
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, NodeRoleName=ROLE)
    service.operator.set_desired(GROUP, 2)
    node = service.operator.describe_group(GROUP).members[0].instance_id
    made = Instance(service, node, keys_of(node))
    sts.knows(made.keys)
    return made


# Requests that the service accepts


async def test_an_instance_joins_without_any_token(service, instance, sts, monkeypatch) -> None:
    for name, value in (("ACCESS_KEY_ID", instance.keys.access_key), ("SECRET_ACCESS_KEY", instance.keys.secret_key)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", instance.keys.token)
    token = agent.join(f"http://{service.address}", instance.claim, None)
    assert sts.asked == [("/", HOST)]
    async with line(service, token) as opened:
        assert (await join(opened, instance.node)).session_token == token
        await opened.send(encode(report(instance.node)))
        await until(lambda: service.services.registry.views()[NodeId(instance.node)].report)


def test_the_credential_is_short_lived(service, instance) -> None:
    answer = instance.ask(instance.request())
    assert answer.status_code == 201
    assert answer.json()["ExpirationTime"] == service.clock().timestamp() + 3600
    assert opens(service, answer)
    service.clock.advance(3600)
    assert not opens(service, answer)


def opens(service: Service, answer: httpx.Response) -> bool:
    return find_token(service.services, answer.json()["SessionToken"]) is not None


async def test_an_instance_has_one_live_session(service, instance) -> None:
    token = instance.ask(instance.request()).json()["SessionToken"]
    async with line(service, token) as opened:
        await join(opened, instance.node)
        second = instance.ask(instance.request()).json()["SessionToken"]
        async with line(service, second) as newer:
            await join(newer, instance.node, "a2")
            assert (await closed(opened))[0] == 4409
    with pytest.raises(InvalidStatus) as refused:
        async with line(service, token):
            pass
    assert refused.value.response.status_code == 403


async def test_a_session_is_for_its_own_instance_alone(service, instance) -> None:
    token = instance.ask(instance.request()).json()["SessionToken"]
    other = service.operator.describe_group(GROUP).members[1].instance_id
    async with line(service, token) as opened:
        await opened.send(encode(hello(other)))
        assert (await closed(opened))[0] == 4401


# Requests that the service refuses


def refused(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 403, answer.text
    assert re.search(words, answer.json()["Message"]), answer.json()["Message"]


def test_a_forged_signature(instance, sts) -> None:
    request = instance.request()
    last = "0" if request["Authorization"][-1] != "0" else "1"
    refused(instance.ask({**request, "Authorization": request["Authorization"][:-1] + last}), "rejected the signature")
    assert sts.asked == [("/", HOST)]


def test_keys_that_nobody_knows(instance) -> None:
    stranger = replace(instance, keys=replace(instance.keys, access_key="ASIA9999999999999999"))
    refused(stranger.ask(stranger.request()), "rejected the signature")


def test_a_replayed_request(instance, sts) -> None:
    request = instance.request()
    assert instance.ask(request).status_code == 201
    refused(instance.ask(request), "nonce was used before")


def test_a_nonce_whose_minute_is_over(service, instance, sts) -> None:
    request = instance.request()
    service.clock.advance(attestation.NONCE_SECONDS)
    refused(instance.ask(request), "older than a minute")
    assert sts.asked == []


@pytest.mark.parametrize("nonce", ["x", "..", "ffffffffff.00.00", "ffffffffff." + "0" * 32 + "." + "0" * 64])
def test_a_nonce_that_this_server_did_not_make(instance, sts, nonce) -> None:
    refused(instance.ask(instance.request(nonce)), "not from this server")
    assert sts.asked == []


def test_a_signature_that_was_made_for_another_nonce(instance) -> None:
    refused(instance.ask(instance.request(Nonce=instance.nonce())), "rejected the signature")


def test_a_signature_that_was_made_for_another_server(instance) -> None:
    nonce = instance.nonce()
    elsewhere = replace(instance.claim, server_id="f" * 32)
    refused(instance.ask(instance.said(nonce, agent.sign(elsewhere, instance.keys, nonce))), "rejected the signature")


@pytest.mark.parametrize("host", ["sts.us-east-1.amazonaws.com", "sts.amazonaws.com", "attacker.example"])
def test_a_signature_for_another_host(instance, sts, host) -> None:
    nonce = instance.nonce()
    refused(instance.ask(instance.said(nonce, instance.signed_by_hand(nonce, host=host))), "rejected the signature")
    assert sts.asked == [("/", HOST)]


def test_a_signature_for_another_region(instance, sts) -> None:
    nonce = instance.nonce()
    signed = agent.sign(replace(instance.claim, region="us-east-1"), instance.keys, nonce)
    refused(instance.ask(instance.said(nonce, signed)), "for sts in us-east-1, not for sts in eu-west-1")
    assert sts.asked == []


@pytest.mark.parametrize(
    "body", [b"Action=AssumeRole&Version=2011-06-15", b"Action=GetCallerIdentity&Version=2011-06-15&x=1", b""]
)
def test_a_signature_of_another_action(instance, body) -> None:
    nonce = instance.nonce()
    refused(instance.ask(instance.said(nonce, instance.signed_by_hand(nonce, body=body))), "rejected the signature")


@pytest.mark.parametrize("left_out", [attestation.NONCE_HEADER, attestation.SERVER_ID_HEADER, "content-type"])
def test_a_header_that_was_not_signed(instance, sts, left_out) -> None:
    nonce = instance.nonce()
    headers = dict(attestation.headers(server_id=instance.claim.server_id, nonce=nonce))
    del headers[left_out]
    refused(instance.ask(instance.said(nonce, instance.signed_by_hand(nonce, headers=headers))), "signed headers are")
    assert sts.asked == []


def test_a_header_that_was_signed_beyond_those(instance, sts) -> None:
    nonce = instance.nonce()
    signed = instance.signed_by_hand(nonce, **{"x-more": "1"})
    refused(instance.ask(instance.said(nonce, signed)), "signed headers are")
    assert sts.asked == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda node: {"role": "admin"}, "to the role admin, not to trainer"),
        (lambda node: {"account": "210987654321"}, "to another account"),
        (lambda node: {"instance": "i-0123456789abcdef0"}, "to the session i-0123456789abcdef0, not to the instance"),
        (lambda node: {"instance": "somebody"}, "to the session somebody, not to the instance"),
    ],
)
def test_a_genuine_signature_of_somebody_else(instance, sts, change: Callable[[str], dict[str, str]], words) -> None:
    chosen = {"instance": instance.node, **change(instance.node)}
    keys = keys_of(chosen.pop("instance"), number=1, **chosen)
    sts.knows(keys)
    other = replace(instance, keys=keys)
    refused(other.ask(other.request()), words)


def test_an_instance_that_is_not_of_the_group(service, instance, sts) -> None:
    stranger = "i-0123456789abcdef0"
    keys = keys_of(stranger, number=1)
    sts.knows(keys)
    other = Instance(service, stranger, keys)
    refused(other.ask(other.request()), "not a member of the group")


def test_an_instance_that_has_ended(service, instance) -> None:
    service.operator.end_instance(NodeId(instance.node))
    refused(instance.ask(instance.request()), "not a member|EC2 reports")


def test_an_instance_that_is_about_to_leave(service, instance) -> None:
    service.operator.terminate_member(NodeId(instance.node), decrement=True)
    refused(instance.ask(instance.request()), "not a member of the group")


@pytest.mark.covers("CreateFleet.NodeRoleName", "UpdateFleet.NodeRoleName")
def test_a_fleet_that_names_no_role_lets_nobody_in_this_way(service, client, instance, sts) -> None:
    service.operator.create_group("second", max_size=1)
    client.create_fleet(FleetName="second", AutoScalingGroupName="second")
    refused(instance.ask(instance.request(FleetName="second")), "has a node role name")
    refused(instance.ask(instance.request(FleetName="none")), "has a node role name")
    assert sts.asked == []
    client.update_fleet(FleetName="second", NodeRoleName=ROLE)
    refused(instance.ask(instance.request(FleetName="second")), "not a member of the group")


@pytest.mark.parametrize(
    "answer",
    [
        (302, "", {"location": "http://127.0.0.1:1/"}),
        (200, "", {}),
        (200, "{}", {}),
        (200, "<GetCallerIdentityResponse/>", {}),
        (200, IDENTITY.format(arn="x", account=ACCOUNT).replace("2011-06-15/", "2012-01-01/"), {}),
        (200, "<!DOCTYPE x>" + IDENTITY.format(arn="x", account=ACCOUNT), {}),
        (500, "", {}),
    ],
)
def test_an_answer_that_is_not_exactly_sts_proves_nothing(instance, sts, answer) -> None:
    sts.answer = answer
    refusal = instance.ask(instance.request())
    assert refusal.status_code == 503
    assert len(sts.asked) == 1  # the service neither follows a redirect nor retries


@pytest.mark.parametrize(
    "part", ["<Arn>a</Arn><Arn>b</Arn><Account>1</Account>", "<Arn>a</Arn>", "<Account>1</Account>"]
)
def test_an_answer_with_parts_twice_or_missing_proves_nothing(part) -> None:
    name = 'xmlns="https://sts.amazonaws.com/doc/2011-06-15/"'
    text = (
        "<GetCallerIdentityResponse "
        f"{name}><GetCallerIdentityResult>{part}</GetCallerIdentityResult></GetCallerIdentityResponse>"
    )
    with pytest.raises(CloudUnavailable):
        principal_in(text.encode())


def test_a_server_whose_cloud_is_not_aws_attests_nobody(service) -> None:
    answer = httpx.post(f"http://{service.address}/v1/agents/nonce", trust_env=False, timeout=30)
    assert answer.status_code == 404
    assert "join with a join token" in answer.json()["Message"]


def test_keys_that_are_no_roles_sign_nothing() -> None:
    claim = Claim(node_id=NodeId("i-1"), fleet="main", region=REGION, server_id="0" * 32)
    with pytest.raises(AttestationFailed, match="no session token"):
        agent.sign(claim, Keys("AKIA0000000000000000", "s", "", ""), "n")


async def test_an_open_line_renews_the_session_and_a_restarted_server_admits_the_agent_without_asking_aws(
    service, instance, sts, monkeypatch
) -> None:
    token = instance.ask(instance.request()).json()["SessionToken"]
    async with line(service, token) as opened:
        await join(opened, instance.node)
        for sequence in range(1, 5):  # Three hours, with a report every three quarters of an hour.
            service.clock.advance(SESSION_SECONDS * 3 / 4)
            await opened.send(encode(report(instance.node, sequence)))
            await until(lambda: expires_at(service, instance) == service.clock() + timedelta(seconds=SESSION_SECONDS))
    monkeypatch.setattr(service.operator, "describe_group", lambda _: pytest.fail("the server asked AWS"))
    async with line(service, token) as opened:
        await join(opened, instance.node)
    assert len(sts.asked) == 1


async def test_a_session_that_was_revoked_is_not_renewed(service, instance) -> None:
    token = instance.ask(instance.request()).json()["SessionToken"]
    async with line(service, token) as opened:
        await join(opened, instance.node)
        before = expires_at(service, instance)
        with service.services.database.write() as session:
            tokens.revoke_sessions(session, instance.node, service.clock())
        service.clock.advance(SESSION_SECONDS * 3 / 4)
        await opened.send(encode(report(instance.node, 1)))
        assert (await closed(opened))[0] == 4401
    assert expires_at(service, instance) == before


def expires_at(service: Service, instance: Instance) -> datetime:
    with service.services.database.read() as session:
        found = session.scalar(select(TokenRow.expires_at).where(TokenRow.node_id == instance.node))
    assert found is not None
    return found
