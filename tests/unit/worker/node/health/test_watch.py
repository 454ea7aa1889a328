"""Tests the watch over a node's health: its thread, the facts that it publishes, and a driver that does not answer."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS
from worker.core.node_health import GpuFacts, LinkFacts
from worker.core.own_metrics import NodeUsage
from worker.node.health import devices
from worker.node.health import watch as health_watch
from worker.node.health.memory import MemoryFacts
from worker.node.health.watch import HealthWatch


class Gpus:
    """A reader of GPU facts whose results the test sets. While the event `answers` is not set, each read hangs."""

    def __init__(self) -> None:
        self.facts: tuple[GpuFacts, ...] = (GpuFacts(index=0, busy_percent=5.0),)
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.is_closed = False

    def read(self) -> tuple[GpuFacts, ...]:
        self.asked.set()
        self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.facts

    def close(self) -> None:
        self.is_closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def made(tmp_path: Path, gpus: Gpus, clock: Clock, period_seconds: float = 0.001) -> HealthWatch:
    return HealthWatch(
        gpus,
        state=tmp_path,
        monotonic=clock,
        period_seconds=period_seconds,
        close_seconds=30.0,  # on a busy machine, a thread may need this long to end
    )


def codes(watch: HealthWatch) -> list[str]:
    return [fault.code for fault in watch.faults() if fault.code.startswith(("gpu", "disk_silent"))]


def test_a_reading_is_judged_and_a_change_is_said(tmp_path: Path) -> None:
    gpus = Gpus()
    watch = made(tmp_path, gpus, Clock())
    watch.look()
    assert codes(watch) == []
    gpus.facts = (GpuFacts(index=0, is_lost=True),)
    assert watch.look()
    assert codes(watch) == ["gpu_lost"]
    assert not watch.look()
    gpus.facts = ()
    assert watch.look()
    assert codes(watch) == []


def test_what_the_devices_have_done_is_told_for_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()
    watch = made(tmp_path, gpus, Clock())
    assert watch.usage() == NodeUsage()
    gpus.facts = (GpuFacts(index=0, busy_percent=90.0), GpuFacts(index=1, busy_percent=30.0), GpuFacts(index=2))
    links = (
        LinkFacts(name="eth0", is_up=True, byte_count=40),
        LinkFacts(name="eth1", is_up=True),
        LinkFacts(name="eth2", is_up=True, byte_count=2),
    )
    monkeypatch.setattr(devices, "links", lambda: links)
    monkeypatch.setattr(health_watch, "memory_facts", lambda: MemoryFacts(100, 40, 100))
    memory = NodeUsage(memory_total_bytes=100, memory_available_bytes=40, memory_limit_bytes=100)
    watch.look()
    assert watch.usage() == replace(memory, gpu_percent=60.0, gpu_least_percent=30.0, network_bytes=42)
    gpus.facts, links = (), ()
    watch.look()
    assert watch.usage() == memory


def test_a_gpu_is_as_busy_as_it_was_at_the_most_lately(tmp_path: Path) -> None:
    gpus = Gpus()
    watch = made(tmp_path, gpus, Clock())
    assert watch.gpu_percent(0) is None
    for percent in (90.0, *[0.0] * 9):
        gpus.facts = (GpuFacts(index=0, busy_percent=percent),)
        watch.look()
    assert watch.gpu_percent(0) == 90.0
    watch.look()
    assert watch.gpu_percent(0) == 0.0


def test_the_thread_reads_tells_of_changes_and_ends(tmp_path: Path) -> None:
    gpus, told = Gpus(), threading.Event()
    gpus.facts = (GpuFacts(index=0, ecc_uncorrectable=1),)
    watch = made(tmp_path, gpus, Clock())
    watch.start(told.set)
    assert told.wait(30)
    assert codes(watch) == ["gpu_ecc"]
    watch.close()
    assert gpus.is_closed


def test_a_reading_that_raises_is_said_and_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpus, told = Gpus(), threading.Event()
    gpus.error = ValueError("odd answer")
    watch = made(tmp_path, gpus, Clock())
    watch.start(told.set)
    assert gpus.asked.wait(30)
    gpus.asked.clear()
    assert gpus.asked.wait(30)
    gpus.error, gpus.facts = None, (GpuFacts(index=0, is_lost=True),)
    assert told.wait(30)
    watch.close()
    assert caplog.text.count("the node's health cannot be read") == 1


def test_a_driver_that_does_not_answer_is_a_fault_and_holds_up_nobody(tmp_path: Path) -> None:
    gpus, clock = Gpus(), Clock()
    watch = made(tmp_path, gpus, clock)
    gpus.answers.clear()
    watch.start(lambda: None)
    assert gpus.asked.wait(30)
    assert codes(watch) == []
    clock.now += DEVICE_SILENT_SECONDS
    assert codes(watch) == ["gpu_silent"]
    gpus.answers.set()
    watch.close()
    assert codes(watch) == []


def test_a_disk_that_does_not_answer_is_a_fault_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, clock = threading.Event(), threading.Event(), Clock()

    def disk(path: Path) -> None:
        asked.set()
        answers.wait(30)

    monkeypatch.setattr(devices, "disk", disk)
    watch = made(tmp_path, Gpus(), clock)
    watch.start(lambda: None)
    assert asked.wait(30)
    clock.now += DEVICE_SILENT_SECONDS
    assert codes(watch) == ["disk_silent"]
    answers.set()
    watch.close()
    assert codes(watch) == []
