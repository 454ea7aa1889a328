"""AWS services that an agent uses in addition to the object store: secrets and roles.

The same tests run against the in-memory fake and against moto over the AWS protocols.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError, CredentialRetrievalError, NoCredentialsError

from everstep.protocol.plan import ObjectReference
from tests.contract.test_object_store import environment
from tests.fakes.storage import MemoryAws, MemoryObjectStore
from tests.moto_server import moto_server
from worker.errors import ForbiddenEndpoint, ObjectMissing, StoreDenied, StoreRefused, StoreUnavailable
from worker.storage.aws import ROLE_SECONDS, Aws, JobPrincipal, RoleKeys, SecretPlace, aws_errors
from worker.storage.node_aws import NodeAws

ROLE = "arn:aws:iam::123456789012:role/training"
Keep = Callable[[str, str, str], str]

PRINCIPAL = JobPrincipal(project="team", job="gpt", run="r1", role_arn=ROLE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(params=["memory", "moto"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Aws, Keep]]:
    """Yield the AWS client of an agent, and a function that stores a secret and returns its ARN."""
    if request.param == "memory":
        made = MemoryAws(MemoryObjectStore("bucket"))
        made.roles.add(ROLE)

        def keep(service: str, name: str, value: str) -> str:
            kind = f"secret:{name}-AbCdEf" if service == "secretsmanager" else f"parameter/{name}"
            arn = f"arn:aws:{service}:us-east-1:123456789012:{kind}"
            made.secrets |= {name: value, arn: value}
            return arn

        yield made, keep
        return
    where = request.getfixturevalue("url")
    keys = {
        "endpoint_url": where,
        "region_name": "us-east-1",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
    }

    def keep_there(service: str, name: str, value: str) -> str:
        client = boto3.client(service, **keys)
        try:
            if service == "secretsmanager":
                return str(client.create_secret(Name=name, SecretString=value)["ARN"])
            client.put_parameter(Name=name, Value=value, Type="SecureString")
            return str(client.get_parameter(Name=name)["Parameter"]["ARN"])
        finally:
            client.close()

    yield NodeAws(environment(where)), keep_there


@pytest.mark.parametrize("service", ["secretsmanager", "ssm"])
def test_a_secret_is_found_by_name_and_by_arn(world: tuple[Aws, Keep], service: str) -> None:
    aws, keep = world
    arn = keep(service, "team-token", "hunter2 ü")
    assert aws.secret(f"{service}:team-token", None) == "hunter2 ü"
    assert aws.secret(arn, None) == "hunter2 ü"


@pytest.mark.parametrize("service", ["secretsmanager", "ssm"])
def test_a_secret_that_is_not_there_is_told_by_its_name(world: tuple[Aws, Keep], service: str) -> None:
    with pytest.raises(ObjectMissing, match=f"{service}:none: "):
        world[0].secret(f"{service}:none", None)


def test_a_role_has_keys_for_an_hour_and_reads_with_them(world: tuple[Aws, Keep]) -> None:
    aws, keep = world
    keep("ssm", "role-token", "theirs")
    keys = aws.assume_role(PRINCIPAL)
    assert abs(keys.expires_at - time.time() - ROLE_SECONDS) < 120
    assert keys.secret_access_key not in repr(keys)
    assert keys.session_token not in repr(keys)
    assert aws.secret("ssm:role-token", keys) == "theirs"
    with pytest.raises(ObjectMissing):
        aws.objects(PRINCIPAL).get_bytes(ObjectReference(bucket="none", key="x"))


def test_the_session_of_a_role_has_the_tags_of_the_job(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    make = BaseClient._make_api_call

    def recorded(self: Any, operation_name: str, parameters: dict[str, Any]) -> Any:
        calls.append(parameters)
        return make(self, operation_name, parameters)

    monkeypatch.setattr(BaseClient, "_make_api_call", recorded)
    NodeAws(environment(url)).assume_role(PRINCIPAL)
    (call,) = calls
    assert call["RoleSessionName"] == "everstep-gpt"
    assert {each["Key"]: each["Value"] for each in call["Tags"]} == PRINCIPAL.session_tags


def test_a_store_of_a_role_gets_new_keys_before_its_old_ones_end(url: str) -> None:
    made: list[str] = []

    class Ending(NodeAws):
        def assume_role(self, principal: JobPrincipal) -> RoleKeys:
            keys = super().assume_role(principal)
            made.append(keys.access_key_id)
            # The first keys expire in a minute. Botocore renews credentials 15 minutes before they expire, so it must
            # request new keys for the second call.
            return replace(keys, expires_at=time.time() + (60 if len(made) == 1 else 3600))

    store = Ending(environment(url)).objects(PRINCIPAL)
    signed: list[str] = []
    store.client.meta.events.register(
        "before-send.s3", lambda request, **_: signed.append(str(request.headers["Authorization"]))
    )
    for _ in range(2):
        with pytest.raises(ObjectMissing):
            store.get_bytes(ObjectReference(bucket="none", key="x"))
    assert len(made) == 2
    assert f"Credential={made[1]}/" in signed[-1]
    store.client.close()


def test_a_secret_that_is_binary_is_refused(url: str) -> None:
    client = boto3.client(
        "secretsmanager",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_secret(Name="binary", SecretBinary=b"\x00hunter2")
    client.close()
    with pytest.raises(StoreRefused, match="secret secretsmanager:binary is binary") as refused:
        NodeAws(environment(url)).secret("secretsmanager:binary", None)
    assert "hunter2" not in str(refused.value)


def test_denied_words_are_awss_own_and_a_throttled_call_may_be_tried_again() -> None:
    words = "User: arn:aws:sts::1:assumed-role/node/i-1 is not authorized to perform: secretsmanager:GetSecretValue"
    kinds = {
        "AccessDeniedException": StoreDenied,
        "ThrottlingException": StoreUnavailable,
        "InvalidParameterException": StoreRefused,
    }
    for code, kind in kinds.items():
        with pytest.raises(kind, match=f"ssm:/a: .*{code}.*is not authorized"), aws_errors("ssm:/a"):
            raise ClientError(
                {"Error": {"Code": code, "Message": words}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "GetParameter"
            )


def test_keys_that_cannot_be_had_now_may_be_there_later() -> None:
    for error in (NoCredentialsError(), CredentialRetrievalError(provider="iam-role", error_msg="timed out")):
        with pytest.raises(StoreUnavailable, match="ssm:/a: "), aws_errors("ssm:/a"):
            raise error


def test_a_client_that_cannot_be_made_is_told_like_a_call_that_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(variable, raising=False)
    nowhere = NodeAws({name: value for name, value in environment(url).items() if name != "AWS_REGION"})
    with pytest.raises(StoreRefused, match="ssm:/a: You must specify a region"):
        nowhere.secret("ssm:/a", None)


def test_local_mode_speaks_to_loopback_only() -> None:
    with pytest.raises(ForbiddenEndpoint, match=r"the endpoint of ssm is https://ssm\.example"):
        NodeAws({"EVERSTEP_LOCAL": "1", "AWS_ENDPOINT_URL": "https://ssm.example"}).secret("ssm:/a", None)


def test_places_and_session_names() -> None:
    assert SecretPlace.of("secretsmanager:a/b") == SecretPlace("secretsmanager", "a/b")
    arn = "arn:aws:ssm:eu-west-1:123456789012:parameter/a/b"
    assert SecretPlace.of(arn) == SecretPlace("ssm", arn, "eu-west-1")
    assert PRINCIPAL.session_name == "everstep-gpt"
    assert PRINCIPAL.session_tags == {"everstep:project": "team", "everstep:job": "gpt", "everstep:run": "r1"}
    long = JobPrincipal(project="", job="x" * 63, run="r1")
    assert (len(long.session_name), long.session_tags.keys()) == (64, {"everstep:job", "everstep:run"})
