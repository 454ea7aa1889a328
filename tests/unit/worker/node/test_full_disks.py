"""Tests when an agent reports a full disk, and when it stops the report."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import FaultCode, NodeFault
from worker.errors import LoadFailed
from worker.node.full_disks import QUIET_SECONDS, FullDisks, full_disk_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_behind_the_error_that_it_caused(code: int) -> None:
    full = OSError(code, "full")
    wrapped = LoadFailed("memory_full", "no", is_permanent=False)
    wrapped.__cause__ = full
    assert full_disk_of(full) is full_disk_of(wrapped) is full
    assert full_disk_of(OSError(errno.EIO, "broken")) is None


def test_a_place_is_named_until_no_write_has_failed_for_a_while(tmp_path: Path) -> None:
    clock = Clock()
    disks = FullDisks(tmp_path, clock)
    assert disks.note(OSError(errno.EIO, "broken")) is None
    assert disks.faults() == ()
    fault = disks.note(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "sources" / "x")))
    assert fault is not None
    assert (fault.code, fault.device, fault.is_permanent) == (FaultCode.DISK_FULL, str(tmp_path / "sources"), False)
    clock.now += QUIET_SECONDS - 1
    assert disks.note(OSError(errno.ENOSPC, "other words", str(tmp_path / "sources" / "y"))) is fault, "its words stay"
    clock.now += QUIET_SECONDS - 1
    assert disks.faults() == (fault,)
    clock.now += 1
    assert disks.faults() == ()


def test_the_figures_and_what_to_do_are_named(tmp_path: Path) -> None:
    fault = FullDisks(tmp_path).note(OSError(errno.ENOSPC, "No space left on device"))
    assert fault is not None
    assert fault.message.startswith(f"{tmp_path} takes no more data: No space left on device, ")
    assert "MiB" in fault.message
    assert "Free space there" in fault.message


def test_a_disk_that_the_health_of_the_node_names_is_named_once(tmp_path: Path) -> None:
    disks = FullDisks(tmp_path)
    fault = disks.note(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "sources" / "x")))

    def other(code: str, device: Path) -> NodeFault:
        return NodeFault(code=code, message="", is_permanent=False, device=str(device))

    assert disks.faults([other("disk_full", tmp_path)]) == ()
    assert disks.faults([other("disk_silent", tmp_path), other("disk_full", tmp_path / "else")]) == (fault,)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device\n", "{state}"),
        ("OSError: [Errno 28] No space left on device: '/data/out/model.bin'", "/data/out"),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/a'", "/home"),
        ("ValueError: no", None),
    ],
)
def test_what_another_process_prints_names_the_place(tmp_path: Path, words: str, place: str | None) -> None:
    fault = FullDisks(tmp_path).note_words(words)
    assert (fault.device if fault is not None else None) == (place and place.format(state=tmp_path))
