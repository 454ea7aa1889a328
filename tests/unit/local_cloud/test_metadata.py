"""Tests the instance metadata service with the requests of an agent."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from infra.local_cloud.metadata import MetadataService
from infra.local_cloud.network import listening_socket

FACTS = {
    "instance-id": "i-1",
    "spot/instance-action": '{"action":"terminate"}',
    "placement/region": "us-east-1",
    "placement/availability-zone": "a",
}


class Metadata:
    def __init__(self) -> None:
        self.now = 0.0
        self.facts = dict(FACTS)
        self.service = MetadataService(lambda _: self.facts, lambda: self.now)
        self.url = self.service.open("i-1", listening_socket("127.0.0.1"))

    def put(self, ttl: str | None, path: str = "/latest/api/token") -> httpx.Response:
        headers = {} if ttl is None else {"X-aws-ec2-metadata-token-ttl-seconds": ttl}
        return httpx.put(self.url + path, headers=headers, trust_env=False, timeout=30)

    def get(self, path: str, token: str = "") -> httpx.Response:
        return httpx.get(
            f"{self.url}{path}",
            headers={"X-aws-ec2-metadata-token": token} if token else {},
            trust_env=False,
            timeout=30,
        )


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    metadata = Metadata()
    yield metadata
    metadata.service.close("i-1")


def test_a_token_is_needed_and_ends(metadata: Metadata) -> None:
    path = "/latest/meta-data/instance-id"
    assert metadata.get(path).status_code == 401
    assert metadata.get(path, "made-up").status_code == 401
    answer = metadata.put("60")
    assert answer.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
    assert metadata.get(path, answer.text).text == "i-1"
    metadata.now = 60
    assert metadata.get(path, answer.text).status_code == 401


@pytest.mark.parametrize("ttl", [None, "0", "21601", "-1", "a"])
def test_a_token_without_a_sensible_time_is_refused(metadata: Metadata, ttl: str | None) -> None:
    assert metadata.put(ttl).status_code == 400


def test_there_is_nothing_until_there_is_something(metadata: Metadata) -> None:
    token = metadata.put("60").text
    path = "/latest/meta-data/spot/instance-action"
    assert metadata.get(path, token).text == '{"action":"terminate"}'
    del metadata.facts["spot/instance-action"]
    assert metadata.get(path, token).status_code == 404
    assert metadata.get("/latest/meta-data/spot", token).status_code == 404
    assert metadata.get("/latest/user-data", token).status_code == 404
    assert metadata.put("60", "/latest/meta-data/instance-id").status_code == 404


def test_folders_are_listed(metadata: Metadata) -> None:
    token = metadata.put("60").text
    assert metadata.get("/latest/meta-data/", token).text.split() == ["instance-id", "placement/", "spot/"]
    assert metadata.get("/latest/meta-data/placement/", token).text.split() == ["availability-zone", "region"]


def test_a_closed_one_answers_no_more(metadata: Metadata) -> None:
    metadata.service.close("i-1")
    metadata.service.close("i-1")
    with pytest.raises(httpx.ConnectError):
        metadata.put("60")
