"""Peak memory of nodes during snapshots, compared with the amount that the control plane counts when it admits a job.

Three agents and their scripted ranks share one process. The kernel reports its peak memory, so that short allocations
count too. The ranks' states share one buffer that exists before the measurement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.slot import CHUNK_BYTES, SlotIndex, pack_index
from tests.integration.worker.agent import fleet as harness
from tests.integration.worker.agent.fleet import Fleet
from worker.member import rank_slots

pytestmark = pytest.mark.integration
SHARD_BYTES = 32 * 1024**2
ALLOWED_BYTES = 64 * 1024**2
"""Bytes that the buffers of all three agents may use, in addition to the slots of one node."""
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value for `CLEAR_REFS`. It resets the peak `VmHWM` to the present resident memory.

Source: Documentation/filesystems/proc.rst of Linux.
"""


@pytest.fixture(autouse=True)
def large_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks capture one shared state, in which every chunk changes with every step."""
    index = pack_index(SlotIndex(tensors=(), values=b""))
    index_offset = SHARD_BYTES - len(index)
    state = bytearray(b"s" * index_offset + index)

    def payload(rank: int, step: int) -> tuple[memoryview, int]:
        for chunk in range(0, index_offset, CHUNK_BYTES):
            state[chunk : chunk + 8] = rank.to_bytes(4, "big") + step.to_bytes(4, "big")
        return memoryview(state), index_offset

    monkeypatch.setattr(harness, "payload", payload)
    monkeypatch.setattr(harness, "CAPACITY_BYTES", SHARD_BYTES)
    monkeypatch.setattr(harness, "MEMORY_BYTES", 5 * SHARD_BYTES)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Collect the memory, in bytes, that the agent's check of each plan computes for its node."""
    found: set[int] = set()
    count = rank_slots.slot_bytes_per_node

    def counting(**shape: Any) -> int:
        found.add(needed := count(**shape))
        return needed

    monkeypatch.setattr(rank_slots, "slot_bytes_per_node", counting)
    return found


def resident(name: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


async def test_what_is_used_while_steps_are_kept_is_what_admission_counts(fleet: Fleet, counted: set[int]) -> None:
    await fleet.connected()
    CLEAR_REFS.write_text(RESET_PEAK)
    before, shared_before = resident("VmRSS"), resident("RssShmem")
    await fleet.launch()
    await fleet.train(4)
    # Subtract the slots, which are shared memory and stay mapped. The rest of the peak is the agents' private memory.
    private = resident("VmHWM") - before - (resident("RssShmem") - shared_before)
    (needed,) = counted
    for node in fleet.nodes:
        slots = sum(path.stat().st_blocks * 512 for path in node.files("*").values())
        assert 0.95 * needed <= slots <= 1.05 * needed
        assert slots + max(private, 0) <= 1.05 * needed + ALLOWED_BYTES, (
            "all three agents' buffers beside one node's slots"
        )
    assert private < SHARD_BYTES / 2, "nowhere is there a copy of a shard"
