"""Tests how an agent reads its instance's metadata from a small server on loopback, which follows AWS's documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import NoticeKind
from tests.instance_metadata import SPOT, Service, served
from worker.node.instance_metadata import EC2_ENDPOINT, InstanceIdentity, InstanceMetadata, endpoint_of

REBALANCE = '{"noticeTime": "2020-10-26T21:50:00Z"}'
EVENTS = """[
  {
    "NotBefore" : "21 Jan 2019 09:00:43 GMT",
    "Code" : "system-reboot",
    "Description" : "scheduled reboot",
    "EventId" : "instance-event-0d59937288b749b32",
    "NotAfter" : "21 Jan 2019 09:17:23 GMT",
    "State" : "active"
  }
]"""


def reader(url: str, on_change: Callable[[], None]) -> InstanceMetadata:
    """Return a reader with a long time limit, because a busy machine answers late."""
    return InstanceMetadata(url, on_change, timeout_seconds=30.0)


@pytest.fixture
def service() -> Iterator[Service]:
    with served() as service:
        yield service


async def test_everything_that_is_announced_is_told_with_its_time(service: Service) -> None:
    changes: list[int] = []
    metadata = reader(service.url, lambda: changes.append(1))
    await metadata.poll()
    assert metadata.notices == ()
    assert not changes
    service.says = {
        "spot/instance-action": SPOT,
        "events/recommendations/rebalance": REBALANCE,
        "events/maintenance/scheduled": EVENTS,
        "autoscaling/target-lifecycle-state": "Terminated",
    }
    await metadata.poll()
    await metadata.poll()
    assert len(changes) == 1, "told when it changes"
    assert [(notice.kind, notice.message, notice.ends_at_seconds) for notice in metadata.notices] == [
        (NoticeKind.SPOT_INTERRUPTION, "spot instance-action terminate at 2017-09-18T08:22:00Z", 1_505_722_920.0),
        (NoticeKind.REBALANCE, "rebalance recommendation of 2020-10-26T21:50:00Z", None),
        (NoticeKind.MAINTENANCE, "system-reboot from 21 Jan 2019 09:00:43 GMT: scheduled reboot", 1_548_061_243.0),
        (NoticeKind.TERMINATING, "target-lifecycle-state Terminated", None),
    ]
    service.says = {
        "events/maintenance/scheduled": EVENTS.replace("active", "completed"),
        "autoscaling/target-lifecycle-state": "InService",
    }
    await metadata.poll()
    assert metadata.notices == ()
    assert service.made == 1, "one token for all questions"


async def test_a_token_that_has_run_out_is_replaced(service: Service) -> None:
    metadata = reader(service.url, lambda: None)
    await metadata.poll()
    service.tokens.clear()
    service.says["spot/instance-action"] = SPOT
    await metadata.poll()
    assert len(metadata.notices) == 1


@pytest.mark.parametrize("status", [400, 403, 500, 503])
async def test_a_service_that_fails_takes_nothing_back(service: Service, status: int) -> None:
    metadata = reader(service.url, lambda: None)
    service.says["spot/instance-action"] = SPOT
    await metadata.poll()
    service.status = status
    await metadata.poll()
    service.tokens.clear()
    await metadata.poll()
    assert len(metadata.notices) == 1


@pytest.mark.parametrize(
    "body",
    ["", "{}", "[]", "null", '{"action": 1, "time": 2}', '{"action": "stop", "time": "soon"}', "[1]", "x" * 100_000],
)
async def test_what_is_not_as_documented_is_no_notice_and_no_crash(service: Service, body: str) -> None:
    metadata = reader(service.url, lambda: None)
    service.says = {
        "spot/instance-action": body,
        "events/recommendations/rebalance": body,
        "events/maintenance/scheduled": body,
    }
    await metadata.poll()
    assert metadata.notices == ()


async def test_a_token_that_is_no_header_is_no_token(service: Service) -> None:
    metadata = reader(service.url, lambda: None)
    service.says = {"spot/instance-action": SPOT}
    service.token_suffix = "\nb"
    await metadata.poll()
    assert (service.made, metadata.notices) == (1, ())


async def test_an_absent_service_is_quiet(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    url = service.url
    metadata = reader(url.replace(url.rpartition(":")[2], "1"), lambda: None)
    await metadata.poll()
    await metadata.poll()
    assert metadata.notices == ()
    assert len(caplog.records) == 1


def test_the_link_local_address_is_asked_on_ec2_alone(tmp_path: Path) -> None:
    assert endpoint_of({}, tmp_path) is None
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert endpoint_of({}, tmp_path) == EC2_ENDPOINT
    assert endpoint_of({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/"}, tmp_path) == "http://127.0.0.1:9"
    assert (
        endpoint_of({"AWS_EC2_METADATA_DISABLED": "True", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://a"}, tmp_path)
        is None
    )
    for wrong in ("169.254.169.254", "https://a", "http://a:b"):
        assert endpoint_of({"AWS_EC2_METADATA_SERVICE_ENDPOINT": wrong}, tmp_path) is None
    (tmp_path / "sys_vendor").write_text("Acme")
    (tmp_path / "bios_vendor").write_text("Acme")
    assert endpoint_of({}, tmp_path) is None


def test_an_instance_asks_for_its_identity(service: Service) -> None:
    service.says = {"instance-id": "i-1", "local-ipv4": "10.0.0.7", "placement/region": "eu-west-1"}
    assert reader(service.url, lambda: None).identity() == InstanceIdentity("i-1", "10.0.0.7", "eu-west-1")
    del service.says["local-ipv4"]
    with pytest.raises(OSError, match="404 for local-ipv4"):
        reader(service.url, lambda: None).identity()
