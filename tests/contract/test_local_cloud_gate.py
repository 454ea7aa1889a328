"""The local AWS refuses every request that is not signed with the cluster's key.

Such requests may come from other users of the machine, or from web pages in a browser on the machine. User data runs
with the rights of the user who started the cluster, possibly root. One unsigned RunInstances request would be enough
for an attack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from everstep.host.local_keys import LocalKeys
from infra.local_cloud.environment import ask, local_client
from infra.local_cloud.signatures import signed_headers
from tests.unit.local_cloud.served import ServedAws, encoded, served_aws

pytestmark = pytest.mark.security

ATTACK = {
    "Action": "RunInstances",
    "Version": "2016-11-15",
    "ImageId": "ami-12c6146b",
    "MinCount": "1",
    "MaxCount": "1",
}
SCOPE = (
    "AWS4-HMAC-SHA256 Credential=everstep-local/20260101/us-east-1/ec2/aws4_request, SignedHeaders=host, Signature="
    + "0" * 64
)


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


def send(aws: ServedAws, method: str = "POST", path: str = "/", **more: Any) -> httpx.Response:
    return httpx.request(method, aws.url + path, trust_env=False, timeout=30, **more)


def instances(aws: ServedAws) -> list[Any]:
    found: list[Any] = aws.client("ec2").describe_instances()["Reservations"]
    return found


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": SCOPE}, {"Authorization": SCOPE, "Origin": "http://evil.example"}]
)
def test_nobody_launches_an_instance_without_the_key(aws: ServedAws, headers: dict[str, str]) -> None:
    answer = send(aws, data={**ATTACK, "UserData": encoded("#!/bin/sh\ntouch owned\n")}, headers=headers)
    assert answer.status_code == 403
    assert instances(aws) == []


def test_boto3_with_other_keys_is_refused_in_each_services_words(aws: ServedAws) -> None:
    calls = {
        "ec2": "describe_vpcs",
        "autoscaling": "describe_auto_scaling_groups",
        "s3": "list_buckets",
        "sqs": "list_queues",
        "sts": "get_caller_identity",
    }
    guessed = LocalKeys(access_key_id=aws.keys.access_key_id, secret_access_key="guessed")
    for keys in (guessed, LocalKeys(access_key_id="everstep-local", secret_access_key="everstep-local")):
        for service, call in calls.items():
            client = local_client(service, aws.url, keys)
            with pytest.raises(ClientError, match=r"calculated does not match|is not one of this cluster") as error:
                getattr(client, call)()
            assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
            client.close()


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode"])
def test_web_pages_are_refused_even_with_a_good_signature(aws: ServedAws, header: str) -> None:
    for path in ("/_everstep/config", "/"):
        headers = signed_headers("GET", aws.url + path, b"", aws.keys)
        answer = send(aws, "GET", path, headers={**headers, header: "null"})
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = send(aws, "OPTIONS", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 403
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_answers_allow_no_web_page_anything(aws: ServedAws) -> None:
    seen: list[Any] = []
    for service, call in (("ec2", "describe_vpcs"), ("s3", "list_buckets"), ("sqs", "list_queues")):
        headers = getattr(aws.client(service), call)()["ResponseMetadata"]["HTTPHeaders"]
        seen += [name for name in headers if name.startswith("access-control")]
    assert seen == []


def test_another_host_name_is_refused(aws: ServedAws) -> None:
    headers = signed_headers("GET", f"{aws.url}/_everstep/config", b"", aws.keys)
    assert send(aws, "GET", "/_everstep/config", headers={**headers, "Host": "evil.example"}).status_code == 403
    assert send(aws, "GET", "/_everstep/config", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "config"), ("PUT", "config"), ("POST", "faults"), ("DELETE", "faults"), ("GET", "instances")],
)
def test_faults_and_conditions_need_the_clusters_own_key(aws: ServedAws, method: str, path: str) -> None:
    assert send(aws, method, f"/_everstep/{path}", content=b"{}").status_code == 403
    role = aws.client("sts").assume_role(RoleArn="arn:aws:iam::123456789012:role/job", RoleSessionName="job-1")[
        "Credentials"
    ]
    assert role["AccessKeyId"] != aws.keys.access_key_id
    session = LocalKeys(access_key_id=role["AccessKeyId"], secret_access_key=role["SecretAccessKey"])
    assert ask(method, f"{aws.url}/_everstep/{path}", b"{}", session).status_code == 403


def test_a_roles_session_is_known_by_its_token(aws: ServedAws) -> None:
    role = aws.client("sts").assume_role(RoleArn="arn:aws:iam::123456789012:role/job", RoleSessionName="job-1")[
        "Credentials"
    ]
    keys = {"aws_access_key_id": role["AccessKeyId"], "aws_secret_access_key": role["SecretAccessKey"]}
    place = {"endpoint_url": aws.url, "region_name": "us-east-1"}
    with_token = boto3.client("sts", **place, **keys, aws_session_token=role["SessionToken"])
    assert with_token.get_caller_identity()["Arn"].endswith("/job/job-1")
    without = boto3.client("sts", **place, **keys)
    with pytest.raises(ClientError, match="session token"):
        without.get_caller_identity()
    with_token.close()
    without.close()


@pytest.mark.parametrize(
    "path", ["/moto-api/reset", "/moto-api/data.json", "/latest/meta-data/instance-id", "/favicon.ico"]
)
def test_what_moto_serves_besides_aws_is_not_there(aws: ServedAws, path: str) -> None:
    assert ask("POST", aws.url + path, b"", aws.keys).status_code == 404


def test_a_presigned_url_reaches_s3_alone(aws: ServedAws) -> None:
    s3 = boto3.client(
        "s3",
        endpoint_url=aws.url,
        region_name="us-east-1",
        aws_access_key_id=aws.keys.access_key_id,
        aws_secret_access_key=aws.keys.secret_access_key,
        config=Config(signature_version="s3v4"),
    )
    s3.create_bucket(Bucket="presigned")
    url = s3.generate_presigned_url("put_object", Params={"Bucket": "presigned", "Key": "a b"}, ExpiresIn=60)
    form = {
        "Action": "AssumeRoleWithWebIdentity",
        "RoleArn": "arn:aws:iam::123456789012:role/x",
        "RoleSessionName": "x",
        "WebIdentityToken": "x",
    }
    answer = httpx.put(url, data={**form, "Version": "2011-06-15"}, trust_env=False, timeout=30)
    assert "AccessKeyId" not in answer.text
    assert [found["Key"] for found in s3.list_objects_v2(Bucket="presigned")["Contents"]] == ["a b"]
    s3.close()


def test_the_keys_file_must_be_private(tmp_path: Path) -> None:
    from everstep.host.local_keys import UnusableKeys

    file = tmp_path / "keys.json"
    file.write_bytes(LocalKeys.random().encoded())
    file.chmod(0o640)
    with pytest.raises(UnusableKeys, match="0600"):
        LocalKeys.read(file)
    file.chmod(0o600)
    assert LocalKeys.read(file).access_key_id.startswith("LOCAL")
