"""Tests facts about memory, read from recorded proc and cgroup files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.core.memory_ends import KillCounts
from worker.node.health.memory import (
    MemoryFacts,
    ProcessMemory,
    kernel_log,
    kill_counts,
    memory_facts,
    oom_kill_count,
    process_memory,
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   800 kB\n")
    (folder / "vmstat").write_text("pgfault 5\noom_kill 7\n")
    (folder / "self" / "cgroup").write_text("0::/\n")
    return folder


def test_without_a_cgroup_the_machine_counts(proc: Path, tmp_path: Path) -> None:
    assert memory_facts(proc, tmp_path / "none") == MemoryFacts(1000 * 1024, 800 * 1024)
    assert oom_kill_count(proc, tmp_path / "none") == 7


def test_cgroup_v2(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/jobs/a\n")
    group = tmp_path / "cgroup" / "jobs" / "a"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (group / "memory.max").write_text("102400\n")
    (group / "memory.current").write_text("2400\n")
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 100_000, 102_400)
    assert oom_kill_count(proc, tmp_path / "cgroup") == 2
    (group / "memory.max").write_text("max\n")
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(1000 * 1024, 800 * 1024)


def test_cgroup_v1(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("8:cpu:/\n4:memory:/jobs\n0::/\n")
    group = tmp_path / "cgroup" / "memory" / "jobs"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    (group / "memory.limit_in_bytes").write_text("102400\n")
    (group / "memory.usage_in_bytes").write_text("400\n")
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 102_000, 102_400)
    assert oom_kill_count(proc, tmp_path / "cgroup") == 4
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_facts(proc, tmp_path / "cgroup").total_bytes == 1000 * 1024


@pytest.mark.parametrize(
    ("line", "path", "files", "stat"),
    [
        (
            "0::/job",
            "job",
            ("memory.events", "memory.max", "memory.current"),
            "anon 5\ninactive_file 90000\nactive_file 7\n",
        ),
        (
            "4:memory:/job",
            "memory/job",
            ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            "cache 5\ninactive_file 3\ntotal_inactive_file 90000\n",
        ),
    ],
    ids=["v2", "v1"],
)
def test_files_that_a_cgroup_has_read_are_given_back_when_memory_is_needed(
    proc: Path, tmp_path: Path, line: str, path: str, files: tuple[str, str, str], stat: str
) -> None:
    (proc / "self" / "cgroup").write_text(f"{line}\n")
    group = tmp_path / "cgroup" / path
    group.mkdir(parents=True)
    for name, text in zip(files, ("oom_kill 0\n", "102400\n", "102000\n"), strict=True):
        (group / name).write_text(text)
    assert memory_facts(proc, tmp_path / "cgroup").available_bytes == 400, "what is not known is not given back"
    (group / "memory.stat").write_text(stat)
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 90_400, 102_400)
    # the agent reads the two files one after the other, so the group may seem to use less memory than its file pages
    (group / files[2]).write_text("50000\n")
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 102_400, 102_400)


def test_the_lowest_limit_of_a_cgroup_and_its_parents_counts(proc: Path, tmp_path: Path) -> None:
    """The agent reports the lowest memory limit among the shim's cgroup and the parents of this cgroup.

    In the test, the shim's own scope has no limit, and the slice above it has one.
    """
    (proc / "77").mkdir()
    (proc / "77" / "cgroup").write_text("0::/ranks.slice/shim.scope\n")
    scope = tmp_path / "cgroup" / "ranks.slice" / "shim.scope"
    scope.mkdir(parents=True)
    (scope / "memory.events").write_text("oom_kill 3\n")
    for group, limit, used in ((scope, "max", "500"), (scope.parent, "102400", "102000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
    assert memory_facts(proc, tmp_path / "cgroup", "77") == MemoryFacts(102_400, 400, 102_400)
    assert kill_counts(proc, tmp_path / "cgroup", "77") == KillCounts(cgroup=3, node=7)
    (scope / "memory.max").write_text("1024\n")
    assert memory_facts(proc, tmp_path / "cgroup", "77") == MemoryFacts(1024, 400, 1024)
    (proc / "77" / "cgroup").unlink()
    assert kill_counts(proc, tmp_path / "cgroup", "77") == KillCounts(node=7), "the process has ended"


def test_what_nobody_counts_is_unknown(proc: Path, tmp_path: Path) -> None:
    (proc / "vmstat").write_text("pgfault 5\n")
    assert oom_kill_count(proc, tmp_path / "none") is None


def test_kills_are_counted_by_the_cgroup_and_by_the_machine(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("4:memory:/jobs\n0::/\n")
    group = tmp_path / "cgroup" / "memory" / "jobs"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill 4\n")
    assert kill_counts(proc, tmp_path / "cgroup") == KillCounts(cgroup=4, node=7)
    (group.parent / "memory.oom_control").write_text("oom_kill 9\n")
    (proc / "self" / "cgroup").write_text("4:memory:/\n")
    assert kill_counts(proc, tmp_path / "cgroup") == KillCounts(node=7), "that cgroup is the whole machine"


def test_the_memory_of_a_process(proc: Path) -> None:
    folder = proc / "77"
    folder.mkdir()
    (folder / "status").write_text("Name:\tpy: thon\nVmHWM:\t    9000 kB\nVmRSS:\t    5000 kB\nThreads:\t1\n")
    assert process_memory(77, proc) == ProcessMemory(5000 * 1024, 9000 * 1024)
    (folder / "status").write_text("Name:\tpython\nState:\tZ (zombie)\n")
    assert process_memory(77, proc) is None
    assert process_memory(78, proc) is None
    own = process_memory(os.getpid())
    assert own is not None
    assert 0 < own.resident_bytes <= own.peak_bytes


def test_the_kernel_log_is_read_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,2,-;first\n" + "6,2,3,-;more\n" * 10_000)
    assert kernel_log(log) == log.read_text()
    assert kernel_log(tmp_path / "none") == ""


def test_this_machine_has_memory() -> None:
    facts = memory_facts()
    assert 0 < facts.available_bytes <= facts.total_bytes
