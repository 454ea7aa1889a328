"""The control plane declares a node lost within its time limit.

If it keeps the node for inspection, it stores the evidence in S3.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from control_plane.core.states import JobState
from control_plane.core.timeouts import ladder
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.observer import SilenceClock
from control_plane.loop.runner import Runner
from everstep.protocol.agent_messages import Hello, KeepEvidence, NodeFault
from everstep.protocol.ids import FleetName, NodeId
from everstep.protocol.plan import ObjectReference
from tests.sim.world import BUCKET, World


async def test_a_lost_agent_is_judged_within_detection_seconds_and_one(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    lost = world.team()[1]
    world.silence(lost)
    began = world.now
    await world.until(lambda: world.job().state == JobState.PREPARING)
    assert (world.now - began).total_seconds() <= world.timeouts.detection_seconds + 1


async def test_a_lost_agent_is_judged_however_long_a_look_at_all_jobs_takes(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    lost = world.team()[1]
    world.silence(lost)
    began, seconds = world.now, world.timeouts.lease_seconds * 0.6
    while world.job().state != JobState.PREPARING and (world.now - began).total_seconds() < 30:
        await world.tick(seconds)
    assert (world.now - began).total_seconds() <= world.timeouts.detection_seconds + 1 + seconds


async def test_the_server_is_awake_while_a_look_at_all_jobs_lasts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = msgspec.structs.replace(world.timeouts, lease_seconds=0.03)
    runner = Runner(replace(world.context, timeouts=short))
    stop, beats = asyncio.Event(), []

    def beat() -> None:
        beats.append(world.now)
        if len(beats) == 3:
            stop.set()

    monkeypatch.setattr(runner.silence_clock, "beat", beat)
    monkeypatch.setattr(runner.job_loop, "sweep", stop.wait)
    await runner.run(stop)
    assert len(beats) >= 3


@pytest.mark.parametrize(("seconds", "expected"), [(1.4, 9.2), (1.6, 0.0)])
def test_silence_begins_anew_after_a_standstill_of_the_process(seconds: float, expected: float) -> None:
    moment = 0.0
    silence_clock = SilenceClock(ladder(3.0), lambda: moment)
    while moment < 18.0:  # 18 s are twice the time after which a silent node must count as lost
        silence_clock.beat()
        moment += seconds
    assert silence_clock.silent_seconds(FleetName("main"), None) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("silent", "expected"), [(0.5, float("inf")), (2.0, float("inf")), (2.5, 0.5), (3.0, 0.0), (3.1, float("inf"))]
)
async def test_a_pass_is_due_when_a_lease_ends(silent: float, expected: float) -> None:
    moment = 0.0
    registry, silence_clock = AgentRegistry(monotonic=lambda: moment), SilenceClock(ladder(3.0), lambda: moment)
    moment = 100.0
    hello = Hello(node_id=NodeId("i-1"), agent_id="a", address="127.0.0.1", peer_port=1, memory_bytes=1, version="1")
    registry.accept(hello, FleetName("main"))
    moment += silent
    assert silence_clock.verdict_in(registry.views().values()) == pytest.approx(expected)


async def test_the_logs_of_a_held_node_are_in_s3_before_it_may_be_ended(world: World) -> None:
    world.wish(hold_failed_instances=True)
    world.submit()
    await world.running()
    await world.train(10)
    failed = world.team()[1]
    failed.node_faults = (NodeFault(code="gpu_lost", message="GPU 3", is_permanent=False),)
    failed.report()
    world.kill_rank(failed)
    await world.until(lambda: world.nodes()[failed.node_id].evidence_at is not None)
    asked = [
        message for node_id, message in world.said if isinstance(message, KeepEvidence) and node_id == failed.node_id
    ]
    place = ObjectReference(bucket=BUCKET, key=f"evidence/{failed.node_id}/")
    assert asked == [KeepEvidence(place=place)]
