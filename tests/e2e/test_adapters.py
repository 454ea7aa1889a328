"""Each adapter at 2, 3, 4 and 5 ranks survives a rank that is killed during training.

The result equals the undisturbed run bit for bit. Two ranks cannot reveal a changed order of sums, so larger shapes run
too. Four ranks run on two nodes, three ranks keep three copies, and five ranks form groups of different sizes.
"""

from __future__ import annotations

import pytest

from tests.e2e.jobs import SHAPES, Shape, Workplace, assert_identical, assert_incident

STEPS = 16
"""Number of steps.

All ranks wait after step 6 or soon after it until a step is committed, and after step 14 until the job recovers from
the kill. The kill occurs between these two waits, while the ranks train.
"""
FIRST, LAST = "1:6", "1:14"
PACE_SECONDS = 0.1
"""Minimum duration of a step. The steps between the two waits then last long enough for the kill."""
MORE_SHAPES = [
    Shape(nodes=5, copies=3),
    Shape(nodes=3, ranks_per_node=2),
    Shape(nodes=5, ranks_per_node=2),
    Shape(nodes=2, copies=1),
]
ADAPTERS = ("plain", "ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("world", sorted(SHAPES))
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_killed_rank(place: Workplace, adapter: str, world: int) -> None:
    check(place, adapter, "fp32", SHAPES[world])


@pytest.mark.long
@pytest.mark.parametrize("world", sorted(SHAPES))
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_killed_rank_in_bf16(place: Workplace, adapter: str, world: int) -> None:
    check(place, adapter, "bf16", SHAPES[world])


@pytest.mark.long
@pytest.mark.parametrize(
    "shape", MORE_SHAPES, ids=lambda shape: f"{shape.nodes}x{shape.ranks_per_node}-{shape.copies}-copies"
)
@pytest.mark.parametrize("adapter", ["fsdp2", "zero3"])
def test_a_killed_rank_in_other_shapes(place: Workplace, adapter: str, shape: Shape) -> None:
    check(place, adapter, "fp32", shape)


def check(place: Workplace, adapter: str, precision: str, shape: Shape) -> None:
    name = f"{adapter}-{precision}-{shape.nodes}x{shape.ranks_per_node}-{shape.copies}"
    job = place.submit(
        name, shape, holds=(FIRST, LAST), adapter=adapter, precision=precision, steps=STEPS, pace_seconds=PACE_SECONDS
    )
    job.reference()
    moment = job.wait_standing_committed(FIRST, 4)
    victim = shape.world - 1
    job.let_go(moment)
    job.kill_rank(victim)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=4)
    assert f"rank {victim} on {job.node_of(victim)} ended: killed, signal 9" in incident["Evidence"][0]
    stored = place.client.list_checkpoints(TrainingJobName=job.name)["Checkpoints"]
    assert [(each["Step"], each["Status"]) for each in stored] == [(STEPS, "Complete")]
    assert_identical(job)
