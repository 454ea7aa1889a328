"""Tests how much host memory a node's slots take (`core.slot_memory`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import slot_memory
from control_plane.core.observed.specs import JobSpec
from everstep.protocol.slot import CHUNK_BYTES
from tests.unit.control_plane.core.cluster import spec_of

COPIES = replace(spec_of("gpt", "a", 4, 2), ranks_per_node=3, third_slot=True)
PARITY = replace(COPIES, copies=1, parity_group_size=4)


def test_three_slots_of_two_copies_take_six_times_the_state() -> None:
    assert slot_memory.memory_ratio(COPIES) == slot_memory.ratio_of_copies(PARITY) == 6
    assert slot_memory.needed_bytes(COPIES, 100) == 6 * 3 * 100


def test_a_share_of_four_nodes_takes_a_third_of_a_shard() -> None:
    assert slot_memory.needed_bytes(PARITY, 100) == 3 * 3 * 100 * 4 // 3


@pytest.mark.parametrize(("settings", "reserved"), [(COPIES, 0), (PARITY, 3 * 3 * CHUNK_BYTES)])
def test_the_largest_state_fits_and_parity_reserves_a_chunk_per_slot(settings: JobSpec, reserved: int) -> None:
    fits = slot_memory.needed_bytes(settings, 1_000_000)
    assert slot_memory.largest_shard_bytes(settings, fits + reserved) == 1_000_000
    assert slot_memory.largest_shard_bytes(settings, 0) == 0
