"""Tests the messages about a rank that ran out of memory."""

from __future__ import annotations

import pytest

from control_plane.accounts.out_of_memory import advice, sentence
from everstep.protocol.agent_messages import MemoryEnd, MemoryKind, MemorySource
from everstep.protocol.ids import NodeId, Rank

GIB = 1 << 30
LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
FIGURES = {"rank_bytes": int(7.5 * GIB), "used_bytes": 61 * GIB, "total_bytes": 62 * GIB}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            MemoryEnd(source=MemorySource.KERNEL_LOG, kind=MemoryKind.HOST, **FIGURES),
            "rank 3 on i-1 ran out of memory: the kernel killed it at 7.5 GiB, with 61.0 GiB of 62.0 GiB in use",
        ),
        (
            MemoryEnd(source=MemorySource.CGROUP, kind=MemoryKind.HOST),
            "rank 3 on i-1 ran out of memory: the kernel killed it",
        ),
        (
            MemoryEnd(source=MemorySource.NODE, kind=MemoryKind.HOST, rank_bytes=GIB),
            "rank 3 on i-1 probably ran out of memory: it was killed at 1.0 GiB, while the kernel killed "
            "processes of this node because memory was exhausted",
        ),
        (
            MemoryEnd(source=MemorySource.CGROUP, kind=MemoryKind.HOST, words=LOADER, rank_bytes=GIB),
            "rank 3 on i-1 ran out of memory: the kernel killed one of its DataLoader workers at 1.0 GiB",
        ),
        (
            MemoryEnd(source=MemorySource.NODE, kind=MemoryKind.HOST, words=LOADER),
            "rank 3 on i-1 probably ran out of memory: one of its DataLoader workers was killed, "
            "while the kernel killed "
            "processes of this node because memory was exhausted",
        ),
        (
            MemoryEnd(source=MemorySource.EXCEPTION, kind=MemoryKind.GPU, words="torch.OutOfMemoryError: no"),
            "rank 3 on i-1 ran out of GPU memory: torch.OutOfMemoryError: no",
        ),
        (
            MemoryEnd(source=MemorySource.EXCEPTION, kind=MemoryKind.HOST, words="MemoryError"),
            "rank 3 on i-1 ran out of memory: MemoryError",
        ),
    ],
)
def test_the_sentence_says_only_what_is_certain(end: MemoryEnd, words: str) -> None:
    assert sentence(Rank(3), NodeId("i-1"), end) == words
    assert ("GPU" in advice(end)) is (end.kind is MemoryKind.GPU)
