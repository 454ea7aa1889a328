"""Runs the real loops on a job with `MaxOverhead`, and its agents' schedule on the plan that the loops made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.world import World
from tests.unit.control_plane.loop.training import TICK_SECONDS, Training


@pytest.mark.parametrize("slowed", [1.25, 2.0])
async def test_uploads_are_spaced_by_their_measured_cost(tmp_path: Path, slowed: float) -> None:
    world, upload, bound, seconds = World(tmp_path, nodes=2, spares=0, max_size=2), 600, 0.05, 30 * 3600
    world.submit(nodes=2, checkpoint_max_overhead=bound)
    await world.running()
    run = Training(world.plan(), upload_seconds=upload, slowed=slowed)
    world.close()
    run.train(seconds)
    cost = upload * (1 - 1 / slowed)
    interval = max(upload, cost * (1 + bound) / bound)
    assert run.intervals[-5:] == pytest.approx([interval] * 5, rel=0.1)
    assert len(run.uploads) == pytest.approx(seconds / interval, rel=0.2)
    added = seconds / TICK_SECONDS - run.steps
    assert added / run.steps < 1.1 * bound, "all uploads together cost at most the bound"
