"""The gate accepts requests signed by boto3 and refuses a request that differs from the signed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from everstep.host.local_keys import LocalKeys
from infra.local_cloud.signatures import Denial, Denied, IssuedKey, SignedRequest, Signer, signed_headers, stray, verify

pytestmark = pytest.mark.security

HOST = "127.0.0.1:4000"
KEYS = LocalKeys.random()
TOKEN = "the-token-of-a-session"
ISSUED = {
    KEYS.access_key_id: IssuedKey(secret_access_key=KEYS.secret_access_key, is_owner=True),
    "ASIASESSION": IssuedKey(
        secret_access_key="of-a-session", session_token=TOKEN, expires_at=datetime(2100, 1, 1, tzinfo=UTC)
    ),
    "ASIAOLD": IssuedKey(
        secret_access_key="of-a-session", session_token=TOKEN, expires_at=datetime(2020, 1, 1, tzinfo=UTC)
    ),
}


def client(
    service: str, key: str = KEYS.access_key_id, secret: str = KEYS.secret_access_key, token: str | None = None
) -> Any:
    return boto3.client(
        service,
        endpoint_url=f"http://{HOST}",
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=Config(signature_version="s3v4" if service == "s3" else None, retries={"total_max_attempts": 1}),
    )


def sent(made: Any, operation: str, **parameters: Any) -> tuple[SignedRequest, bytes]:
    """Return the request that a client would send."""
    caught: list[tuple[SignedRequest, bytes]] = []

    def catch(request: Any, **_: Any) -> AWSResponse:
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else body.read()
        headers = [
            (name, value if isinstance(value, str) else value.decode()) for name, value in request.headers.items()
        ]
        target = request.url.removeprefix(f"http://{HOST}") or "/"
        # awscrt's signer adds the header `host` itself
        others = (header for header in headers if header[0].lower() != "host")
        caught.append((SignedRequest(method=request.method, target=target, headers=(("Host", HOST), *others)), content))
        raise InterruptedError

    made.meta.events.register_first("before-send.*", catch)
    with pytest.raises(InterruptedError):
        getattr(made, operation)(**parameters)
    made.close()
    return caught[0]


def admitted(request: SignedRequest, body: bytes = b"", now: datetime | None = None) -> Signer:
    return verify(request, lambda: body, ISSUED.get, now or datetime.now(UTC))


def denied(request: SignedRequest, body: bytes = b"", now: datetime | None = None) -> Denial:
    with pytest.raises(Denied) as error:
        admitted(request, body, now)
    return error.value.denial


def presigned(operation: str = "put_object", seconds: int = 60, **parameters: Any) -> SignedRequest:
    made = client("s3")
    url = made.generate_presigned_url(
        operation, Params={"Bucket": "b", "Key": "k/ä b+c", **parameters}, ExpiresIn=seconds
    )
    made.close()
    method = "PUT" if operation == "put_object" else "GET"
    return SignedRequest(method=method, target=url.removeprefix(f"http://{HOST}"), headers=(("Host", HOST),))


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("ec2", "run_instances", {"ImageId": "ami-1", "MinCount": 1, "MaxCount": 1, "UserData": "#!/bin/sh\nid"}),
    ("autoscaling", "describe_auto_scaling_groups", {}),
    ("sqs", "send_message", {"QueueUrl": f"http://{HOST}/1/q", "MessageBody": "m"}),
    ("logs", "describe_log_groups", {}),
    (
        "s3",
        "put_object",
        {"Bucket": "b", "Key": "a b/ä+c//%41", "Body": b"content", "Metadata": {"with_underscore": "a  b"}},
    ),
    ("s3", "list_objects_v2", {"Bucket": "b", "Prefix": "a b&c=d/~", "Delimiter": "/"}),
    ("s3", "create_multipart_upload", {"Bucket": "b", "Key": "k"}),
]


@pytest.mark.parametrize(
    ("service", "operation", "parameters"), CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_boto3_signs_is_admitted_and_names_its_caller(
    service: str, operation: str, parameters: dict[str, Any]
) -> None:
    request, body = sent(client(service), operation, **parameters)
    assert admitted(request, body) == Signer(access_key_id=KEYS.access_key_id, service=service, is_owner=True)


def changes(request: SignedRequest) -> Iterator[SignedRequest]:
    """Return copies of the request, each with one signed part changed."""
    yield replace(request, method="DELETE")
    yield replace(request, target=request.target + ("&x=1" if "?" in request.target else "?x=1"))
    yield replace(request, target="/other" + request.target)
    for index, (name, value) in enumerate(request.headers):
        if name.lower() in ("content-type", "x-amz-target", "x-amz-meta-with_underscore", "x-amz-content-sha256"):
            altered = "0" * 64 if name.lower() == "x-amz-content-sha256" else value + "x"
            yield replace(request, headers=(*request.headers[:index], (name, altered), *request.headers[index + 1 :]))
    yield replace(request, headers=(*request.headers, ("x-amz-copy-source", "other/secret")))


@pytest.mark.parametrize(
    ("service", "operation", "parameters"), CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_whatever_is_changed_after_signing_is_refused(service: str, operation: str, parameters: dict[str, Any]) -> None:
    request, body = sent(client(service), operation, **parameters)
    assert {denied(changed, body) for changed in changes(request)} == {Denial.MISMATCH}
    assert denied(request, body + b"x") is Denial.MISMATCH


@pytest.mark.parametrize(
    ("service", "operation", "parameters"), CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_secret_and_an_unknown_key_are_refused(
    service: str, operation: str, parameters: dict[str, Any]
) -> None:
    assert denied(*sent(client(service, secret="guessed"), operation, **parameters)) is Denial.MISMATCH
    assert (
        denied(*sent(client(service, key="everstep-local", secret="everstep-local"), operation, **parameters))
        is Denial.UNKNOWN_KEY
    )


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_signature_is_good_for_a_quarter_of_an_hour(minutes: int) -> None:
    request, body = sent(client("ec2"), "describe_vpcs")
    now = datetime.now(UTC)
    assert admitted(request, body, now + timedelta(minutes=minutes * 14 / 16)).is_owner
    assert denied(request, body, now + timedelta(minutes=minutes)) is Denial.EXPIRED


def test_requests_without_a_signature_of_version_4_are_refused() -> None:
    for headers in ((), (("Authorization", "AWS key:signature"),), (("Authorization", "Bearer x"),)):
        request = SignedRequest(method="POST", target="/", headers=(("Host", HOST), *headers))
        assert denied(request, b"Action=RunInstances&Version=2016-11-15") is Denial.MISSING


def test_signed_chunks_are_refused_by_name() -> None:
    request, body = sent(client("s3"), "put_object", Bucket="b", Key="k", Body=b"c")
    headers = tuple(
        (name, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" if name.lower() == "x-amz-content-sha256" else value)
        for name, value in request.headers
    )
    with pytest.raises(Denied, match="STREAMING-AWS4-HMAC-SHA256-PAYLOAD"):
        admitted(replace(request, headers=headers), body)


def test_a_presigned_url_is_good_until_it_expires_and_for_its_object_only() -> None:
    request, now = presigned(), datetime.now(UTC)
    assert admitted(request, b"any body", now + timedelta(seconds=58)).service == "s3"
    assert denied(request, b"", now + timedelta(seconds=62)) is Denial.EXPIRED
    assert (
        denied(replace(request, target=request.target.replace("X-Amz-Expires=60", "X-Amz-Expires=600")))
        is Denial.MISMATCH
    )
    assert denied(replace(request, target=request.target.replace("/b/", "/c/"))) is Denial.MISMATCH
    assert denied(replace(request, method="GET")) is Denial.MISMATCH
    assert denied(replace(request, headers=(*request.headers, ("x-amz-target", "AmazonSQS.Purge")))) is Denial.MISMATCH
    both = replace(request, headers=(*request.headers, ("Authorization", "AWS4-HMAC-SHA256 x")))
    assert denied(both) is Denial.MISSING


def test_headers_that_a_presigned_url_binds_must_come() -> None:
    request = presigned(ContentLength=5, IfNoneMatch="*")
    headers = (*request.headers, ("Content-Length", "5"), ("If-None-Match", "*"))
    assert admitted(replace(request, headers=headers)).service == "s3"
    assert denied(request) is Denial.MISMATCH
    assert denied(replace(request, headers=(*headers[:-1], ("If-None-Match", '"etag"')))) is Denial.MISMATCH


def test_a_session_needs_its_own_token_and_ends() -> None:
    def described(key: str, token: str | None) -> tuple[SignedRequest, bytes]:
        return sent(client("sts", key, "of-a-session", token), "get_caller_identity")

    assert admitted(*described("ASIASESSION", TOKEN)).is_owner is False
    assert denied(*described("ASIASESSION", None)) is Denial.UNKNOWN_KEY
    assert denied(*described("ASIASESSION", "another")) is Denial.UNKNOWN_KEY
    assert denied(*described("ASIAOLD", TOKEN)) is Denial.EXPIRED


def test_own_requests_are_signed_for_the_service_that_administers() -> None:
    url, body = f"http://{HOST}/_everstep/faults?name=a+b&target=%2F", b"{}"
    headers = tuple(signed_headers("DELETE", url, body, KEYS).items())
    request = SignedRequest(
        method="DELETE", target=url.removeprefix(f"http://{HOST}"), headers=(("Host", HOST), *headers)
    )
    assert admitted(request, body) == Signer(access_key_id=KEYS.access_key_id, service="everstep", is_owner=True)
    assert denied(request, b"{ }") is Denial.MISMATCH


def test_nothing_large_is_read_for_a_stranger() -> None:
    def unread() -> bytes:
        raise AssertionError("the body was read before the signature was found good")

    request, _ = sent(client("s3", secret="guessed"), "put_object", Bucket="b", Key="k", Body=b"c")
    with pytest.raises(Denied):
        verify(request, unread, ISSUED.get, datetime.now(UTC))


HEADERS: list[Callable[[SignedRequest], SignedRequest]] = [
    lambda request: replace(request, headers=(*request.headers, ("Origin", "http://evil.example"))),
    lambda request: replace(request, headers=(*request.headers, ("Origin", f"http://{HOST}"))),
    lambda request: replace(request, headers=(*request.headers, ("sec-fetch-site", "same-origin"))),
    lambda request: replace(request, headers=(("Host", "evil.example:4000"), *request.headers[1:])),
    lambda request: replace(request, headers=(("Host", "127.0.0.1:4001"), *request.headers[1:])),
    lambda request: replace(request, headers=(("Host", HOST), ("Host", "evil.example"), *request.headers[1:])),
    lambda request: replace(request, headers=request.headers[1:]),
    lambda request: replace(request, target="http://evil.example/"),
]


@pytest.mark.parametrize("change", HEADERS, ids=range(len(HEADERS)))
def test_requests_of_web_pages_and_for_other_hosts_are_stray(change: Callable[[SignedRequest], SignedRequest]) -> None:
    request, _ = sent(client("ec2"), "describe_vpcs")
    assert stray(request, HOST) == ""
    assert stray(change(request), HOST)


def test_no_repr_shows_a_secret() -> None:
    assert KEYS.secret_access_key not in repr(KEYS)
    assert KEYS.secret_access_key not in repr(ISSUED[KEYS.access_key_id])
