"""Stores a snapshot of the whole state in a file of the rank, from which another run of the same script restores."""

from __future__ import annotations

from pathlib import Path

from everstep.protocol.ids import JobName, Step
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header
from everstep.training.capture import CapturePlan, SlotMemory
from everstep.training.copier import Copies, copy_now
from everstep.training.script import Environment
from everstep.training.state import RankState


def keep(path: Path, state: RankState, environment: Environment, step: int) -> None:
    """Write the state after `step` steps into a slot file. Raises CannotResume, or OSError for lack of space."""
    observed = state.observe()
    plan = CapturePlan.make(observed.tensors)
    capacity = plan.capacity_bytes(observed.values)
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + capacity)
    memory = SlotMemory(path, capacity)
    copy_now(Copies([item.tensor for item in observed.tensors], memory.views(plan)))
    index_bytes = memory.write_values(plan, observed.values)
    header = SlotHeader(
        job=JobName(environment.job or "check"),
        run=environment.run,
        owner_rank=environment.rank,
        origin_generation=environment.generation,
        step=Step(step),
        state=SlotState.SEALED,
        capacity_bytes=capacity,
        payload_bytes=plan.index_offset + index_bytes,
        index_offset=plan.index_offset,
        index_bytes=index_bytes,
        layout_hash=state.layout_hash,
    )
    with path.open("r+b") as file:
        file.write(pack_header(header))
