"""Agents that join at the same time share answers of AWS, even if all agents of a large fleet join after a restart."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import ceil

from control_plane.api.memberships import SHARED_SECONDS, Memberships
from control_plane.cloud.aws import DESCRIBED_PER_CALL
from control_plane.cloud.errors import Throttled
from control_plane.cloud.operator import Ec2State, GroupState, InstanceState
from everstep.protocol.ids import NodeId
from infra.local_cloud.rates import Buckets, family_of
from tests.fakes.cloud import FakeOperator

GROUP = "group"


class Limited(FakeOperator):
    """A fake cloud with the rate limits of the local cloud (`infra.local_cloud.rates`).

    The fake rejects a call with `Throttled` if the token bucket of the operation is empty, as AWS does. A call of
    DescribeInstances by ids uses the smaller of EC2's two buckets for this operation.
    """

    def __init__(self, instance_count: int) -> None:
        super().__init__()
        self.seconds = 0.0
        self.throttled_count = 0
        self.described_count = 0
        self._buckets = Buckets()
        self.create_group(GROUP, desired=instance_count, max_size=instance_count)
        self.advance(timedelta(seconds=1))

    def describe_group(self, name: str) -> GroupState:
        self._take("autoscaling", "DescribeAutoScalingGroups", ("AutoScalingGroupNames",))
        return super().describe_group(name)

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        self.described_count += 1
        for _ in range(ceil(len(instance_ids) / DESCRIBED_PER_CALL)):
            self._take("ec2", "DescribeInstances", ("InstanceIds",))
        return super().describe_instances(instance_ids)

    def _take(self, service: str, action: str, parameters: tuple[str, ...]) -> None:
        family = family_of(service, action, parameters)
        assert family is not None, "the local cloud limits the operation"
        if not self._buckets.take(*family, self.seconds):
            self.throttled_count += 1
            raise Throttled("Rate exceeded")


def test_a_thousand_agents_join_again_within_a_minute_without_a_throttled_call() -> None:
    cloud = Limited(1000)
    memberships = Memberships(cloud, lambda: cloud.seconds)
    nodes = [member.instance_id for member in FakeOperator.describe_group(cloud, GROUP).members]
    for number, node in enumerate(nodes):
        cloud.seconds = 60.0 * number / len(nodes)
        assert memberships.state(GROUP, node) is Ec2State.RUNNING
    assert (cloud.throttled_count, cloud.described_count) == (0, 12)


def test_without_shared_answers_the_same_agents_would_be_throttled() -> None:
    cloud = Limited(1000)
    nodes = [member.instance_id for member in FakeOperator.describe_group(cloud, GROUP).members]
    for number, node in enumerate(nodes):
        cloud.seconds = 60.0 * number / len(nodes)
        try:
            Memberships(cloud, lambda: cloud.seconds).state(GROUP, node)
        except Throttled:
            continue
    assert cloud.throttled_count > 500


def test_agents_that_join_at_the_same_moment_share_one_answer() -> None:
    """Agents that join at the same moment need one request to AWS.

    The first thread sends the request. All other threads arrive before AWS has answered, and use the same answer.
    """
    cloud, seconds, arrived = FakeOperator(), [0.0], threading.Semaphore(0)
    cloud.create_group(GROUP, desired=40)
    cloud.advance(timedelta(seconds=1))
    nodes = [member.instance_id for member in cloud.describe_group(GROUP).members]
    describe, asked = cloud.describe_group, list[str]()
    lock = threading.Lock()

    def monotonic() -> float:
        with lock:
            seconds[0] += 0.001
        arrived.release()
        return seconds[0]

    def late(name: str) -> GroupState:
        asked.append(name)
        if len(asked) == 1:
            for _ in range(len(nodes)):
                assert arrived.acquire(timeout=30)
        return describe(name)

    cloud.describe_group = late  # type: ignore[method-assign]
    memberships = Memberships(cloud, monotonic)
    with ThreadPoolExecutor(len(nodes)) as threads:
        assert set(threads.map(lambda node: memberships.state(GROUP, node), nodes)) == {Ec2State.RUNNING}
    assert asked == [GROUP]


def test_a_refusal_needs_a_new_answer_and_an_admission_a_recent_one() -> None:
    cloud, seconds = FakeOperator(), [0.0]
    cloud.create_group(GROUP, desired=1)
    cloud.advance(timedelta(seconds=1))
    memberships = Memberships(cloud, lambda: seconds[0])
    (first,) = (member.instance_id for member in cloud.describe_group(GROUP).members)
    assert memberships.state(GROUP, first) is Ec2State.RUNNING
    cloud.set_desired(GROUP, 2)
    cloud.advance(timedelta(seconds=1))
    second = next(member.instance_id for member in cloud.describe_group(GROUP).members if member.instance_id != first)
    assert memberships.state(GROUP, second) is Ec2State.RUNNING, "the answer before did not list it"
    cloud.end_instance(first)
    seconds[0] = SHARED_SECONDS - 0.1
    assert memberships.state(GROUP, first) is Ec2State.RUNNING
    seconds[0] = SHARED_SECONDS
    assert memberships.state(GROUP, first) is not Ec2State.RUNNING
    assert memberships.state(GROUP, NodeId("i-0123456789abcdef0")) is None
