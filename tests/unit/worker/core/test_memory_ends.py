"""Tests how an agent recognizes that a rank ran out of memory, from evidence that proves it or only suggests it."""

from __future__ import annotations

import pytest

from everstep.protocol.agent_messages import MemoryEnd, MemoryKind, MemorySource
from worker.core.memory_ends import KillCounts, MemoryUse, end_of_killed, end_of_raised, logged_kill, lost_loaders

USE = MemoryUse(rank_bytes=5, used_bytes=9, total_bytes=10)
LOG = """\
6,800,900000000,-;Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:9kB, file-rss:0kB, shmem-rss:0kB, UID:0
6,801,1000000000,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=77,uid=0
 SUBSYSTEM=memory
3,802,1000500000,-;Memory cgroup out of memory: Killed process 77 (a (b) c) total-vm:9000kB, anon-rss:4000kB, file-rss:90kB, shmem-rss:6kB, UID:0
"""


@pytest.mark.parametrize(
    ("before", "after", "logged", "source"),
    [
        (KillCounts(cgroup=1, node=1), KillCounts(cgroup=2, node=2), 7, MemorySource.KERNEL_LOG),
        (KillCounts(cgroup=1, node=1), KillCounts(cgroup=2, node=2), None, MemorySource.CGROUP),
        (KillCounts(cgroup=1, node=1), KillCounts(cgroup=1, node=2), None, MemorySource.NODE),
        (KillCounts(node=1), KillCounts(node=2), None, MemorySource.NODE),
        (KillCounts(cgroup=2, node=2), KillCounts(cgroup=2, node=2), None, None),
        (KillCounts(), KillCounts(cgroup=2, node=2), None, None),
    ],
)
def test_the_strongest_evidence_counts(
    before: KillCounts, after: KillCounts, logged: int | None, source: MemorySource | None
) -> None:
    found = end_of_killed(before, after, USE, logged)
    assert (found.source if found is not None else None) is source
    if found is not None:
        assert (found.kind, found.rank_bytes, found.used_bytes, found.total_bytes) == (
            MemoryKind.HOST,
            logged or 5,
            9,
            10,
        )


TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n"


@pytest.mark.parametrize(
    ("line", "pids"),
    [
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ", (77,)),
        ("RuntimeError: DataLoader worker (pid(s) 7, 77) exited unexpectedly", (7, 77)),
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Segmentation fault. ", None),
        ("RuntimeError: DataLoader worker (pid 77) exited unexpectedly with exit code 1. Details are lost", None),
        ("ValueError: DataLoader worker (pid 77) is killed by signal: Killed. ", None),
    ],
)
def test_the_last_exception_names_the_data_loader_workers_that_ended(line: str, pids: tuple[int, ...] | None) -> None:
    found = lost_loaders(f"{TRACEBACK}{line}\n")
    assert (found.pids if found is not None else None) == pids


def test_a_killed_data_loader_worker_is_not_measured_as_the_rank() -> None:
    loaders = lost_loaders(f"{TRACEBACK}RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. \n")
    assert loaders is not None
    counts = KillCounts(cgroup=1), KillCounts(cgroup=2)
    found = end_of_killed(*counts, USE, None, loaders)
    assert found == MemoryEnd(
        source=MemorySource.CGROUP, kind=MemoryKind.HOST, used_bytes=9, total_bytes=10, words=loaders.words
    )
    assert end_of_killed(KillCounts(cgroup=2), KillCounts(cgroup=2), USE, None, loaders) is None
    logged = end_of_killed(*counts, USE, 7, loaders)
    assert logged is not None
    assert (logged.source, logged.rank_bytes) == (MemorySource.KERNEL_LOG, 7)


def test_the_kernel_log_names_a_process_and_its_memory() -> None:
    assert logged_kill(LOG, 77, 950.0) == (4000 + 90 + 6) * 1024
    assert logged_kill(LOG, 77, 1001.0) is None, "an earlier process had that pid"
    last = max(float(line.split(",")[2]) for line in LOG.splitlines() if line.count(",") >= 3) / 1e6
    assert logged_kill(LOG, 77, last) == (4000 + 90 + 6) * 1024
    assert logged_kill(LOG, 77, last + 1e-6) is None
    assert logged_kill(LOG, 7, 0.0) is None
    assert logged_kill("", 77, 0.0) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
            "of 79.1 GiB",
            MemoryKind.GPU,
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", MemoryKind.GPU),
        ("RuntimeError: CUDA error: out of memory", MemoryKind.GPU),
        ("MemoryError", MemoryKind.HOST),
        ("MemoryError: cannot allocate", MemoryKind.HOST),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array", MemoryKind.HOST),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried",
            MemoryKind.HOST,
        ),
        ("OSError: [Errno 12] Cannot allocate memory", MemoryKind.HOST),
        ("ValueError: MemoryError", None),
        ("MemoryErrorOfMine: no", None),
    ],
)
def test_the_last_exception_counts(line: str, kind: MemoryKind | None) -> None:
    text = (
        "Traceback (most recent call last):\n  File 'x'\nMemoryError\nTraceback (most recent call last):\n "
        f" File 'train.py', line 3\n{line}\nmore"
    )
    found = end_of_raised(text, USE)
    assert (found.kind if found is not None else None) is kind
    if kind is MemoryKind.GPU:
        assert found == MemoryEnd(source=MemorySource.EXCEPTION, kind=kind, words=line), (
            "the node's memory says nothing about a GPU's"
        )
    elif kind is MemoryKind.HOST:
        assert found is not None
        assert (found.words, found.rank_bytes) == (line, 5)


@pytest.mark.parametrize("text", ["", "MemoryError", "Traceback (most recent call last):\n  File 'x'\n"])
def test_without_an_exception_there_is_no_evidence(text: str) -> None:
    assert end_of_raised(text, USE) is None
