"""An agent reports the memory of its node and of its ranks, and adds the values to the metrics of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.protocol.agent_messages import NodeMemory, RankMemory
from everstep.protocol.ids import Rank
from tests.integration.worker.agent.fleet import Fleet, until
from worker.node.health.gpus import NoGpus
from worker.node.health.memory import memory_facts
from worker.node.health.watch import HealthWatch

pytestmark = pytest.mark.integration


async def test_memory_is_reported_with_the_node_and_with_the_job(fleet: Fleet, tmp_path: Path) -> None:
    watch = HealthWatch(NoGpus(), state=tmp_path)
    watch.look()
    await fleet.nodes[1].stop()
    fleet.nodes[1].start(health=watch)
    await fleet.launch()
    await fleet.train(3)

    def reported() -> NodeMemory | None:
        report = fleet.control.reports.get(fleet.nodes[1].id)
        return report.memory if report is not None else None

    await until("the memory to be reported", lambda: (memory := reported()) is not None and memory.ranks != ())
    memory = reported()
    assert memory is not None
    assert memory.total_bytes == memory_facts().total_bytes
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert memory.ranks == (RankMemory(rank=Rank(1), resident_bytes=1001, peak_bytes=2001),)
    assert fleet.nodes[1].agent.usage.now().rank_memory_bytes == 1001
    idle = fleet.control.reports[fleet.nodes[0].id]
    assert idle.memory is None, "nobody measures that node"
