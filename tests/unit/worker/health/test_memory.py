"""Memory facts, read from written-down proc and cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.health.memory import MemoryFacts, memory_facts, oom_kill_count, slot_memory_bytes, tmpfs_free_bytes


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
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 100_000)
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
    assert memory_facts(proc, tmp_path / "cgroup") == MemoryFacts(102_400, 102_000)
    assert oom_kill_count(proc, tmp_path / "cgroup") == 4
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_facts(proc, tmp_path / "cgroup").total_bytes == 1000 * 1024


def test_what_nobody_counts_is_unknown(proc: Path, tmp_path: Path) -> None:
    (proc / "vmstat").write_text("pgfault 5\n")
    assert oom_kill_count(proc, tmp_path / "none") is None


def test_this_machine_has_memory(tmp_path: Path) -> None:
    facts = memory_facts()
    assert 0 < facts.available_bytes <= facts.total_bytes
    assert 0 < slot_memory_bytes(tmp_path) <= min(tmpfs_free_bytes(tmp_path) + (1 << 30), facts.total_bytes)
