"""An agent on a full disk reports a fault of its job and of its node.

It withdraws the fault when the disk has space again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.protocol.agent_messages import FaultCode, Load, MemberPhase, NodeFault, Prepare, Release
from everstep.protocol.ids import Generation
from tests.integration.worker.agent.fleet import JOB, KEY_BYTES, RUN, Fleet, until
from worker.core.tree import TreeReports
from worker.errors import RequirementsRefused
from worker.logs.journal import LogJournal
from worker.node.full_disks import QUIET_SECONDS
from worker.provisioning.packages import PackageLayers
from worker.provisioning.source import SourceArchives
from worker.provisioning.supplies import Supplies

pytestmark = pytest.mark.integration


def faults_of(fleet: Fleet) -> list[NodeFault]:
    report = fleet.control.reports.get(fleet.nodes[1].id)
    return [fault for fault in report.faults if fault.code == FaultCode.DISK_FULL] if report is not None else []


def failing(number: int) -> Callable[[object], None]:
    """Return a replacement for `write` that raises an error with this error number."""

    def write(_: object) -> None:
        raise OSError(number, os.strerror(number))

    return write


async def cleared(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by `QUIET_SECONDS`, and wait for a report without the fault.

    The agent withdraws the fault if no write has failed during this time.
    """
    disks = fleet.nodes[1].agent.full_disks
    before = disks.monotonic
    monkeypatch.setattr(disks, "monotonic", lambda: before() + QUIET_SECONDS)
    await until("the end of the fault", lambda: faults_of(fleet) == [])


@pytest.mark.parametrize(
    ("kind", "name"), [(SourceArchives, "get"), (Supplies, "gather")], ids=["sources", "packages and inputs"]
)
async def test_a_launch_that_finds_no_space_names_the_disk(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str
) -> None:
    victim = fleet.nodes[1].agent.archives if kind is SourceArchives else fleet.nodes[1].agent.supplies

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(fleet.nodes[1].state_dir / "sources" / "tree"))

    await fleet.prepare()
    with monkeypatch.context() as patched:
        patched.setattr(victim, name, full)
        plan = fleet.make_plan()
        for node in fleet.nodes:
            await fleet.send(node, Load(plan=plan, key=bytes([1]) * KEY_BYTES))
        await until(
            "the refusal",
            lambda: (told := fleet.control.member(fleet.nodes[1].id)) and told.phase is MemberPhase.LOAD_FAILED,
        )
    member = fleet.control.member(fleet.nodes[1].id)
    assert member is not None
    (fault,) = member.faults
    assert (fault.code, fault.is_permanent) == (FaultCode.DISK_FULL, False)
    assert fault.message.startswith(
        f"{fleet.nodes[1].state_dir / 'sources'} takes no more data: No space left on device"
    )
    assert [each.device for each in faults_of(fleet)] == [str(fleet.nodes[1].state_dir / "sources")]
    await fleet.launch()
    await fleet.train(3)
    await cleared(fleet, monkeypatch)


async def test_rounds_that_find_no_space_name_the_disk_instead_of_a_bug(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.launch()
    await fleet.train(2)
    node = fleet.nodes[1]
    assert node.agent.lifecycle.member is not None
    rounds = node.agent.lifecycle.member.rounds
    full = [OSError(errno.ENOSPC, "No space left on device", str(node.state_dir / "rounds" / "file"))]
    newest = rounds.newest_reports

    def look() -> TreeReports:
        if full:
            raise full.pop()
        return newest()

    monkeypatch.setattr(rounds, "newest_reports", look)
    await fleet.train(5)
    await until("the report", lambda: [each.device for each in faults_of(fleet)] == [str(node.state_dir / "rounds")])
    member = fleet.control.member(node.id)
    assert member is not None
    assert member.faults == ()
    await cleared(fleet, monkeypatch)


async def test_pip_that_finds_no_space_is_no_fault_of_the_job(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> Any:
        raise RequirementsRefused("requirements.txt: pip ended with code 1: [Errno 28] No space left on device")

    await fleet.prepare()
    monkeypatch.setattr(PackageLayers, "install", full)
    plan = fleet.make_plan()
    plan = msgspec.structs.replace(plan, script=msgspec.structs.replace(plan.script, requirements="requirements.txt"))
    for node in fleet.nodes:
        await fleet.send(node, Load(plan=plan, key=bytes([1]) * KEY_BYTES))
    await until(
        "the refusal",
        lambda: (told := fleet.control.member(fleet.nodes[1].id)) and told.phase is MemberPhase.LOAD_FAILED,
    )
    member = fleet.control.member(fleet.nodes[1].id)
    assert member is not None
    assert [(fault.code, fault.is_permanent) for fault in member.faults] == [(FaultCode.DISK_FULL, False)]
    assert faults_of(fleet)


async def test_a_promise_that_the_disk_does_not_take_names_the_disk(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.connected()
    node = fleet.nodes[1]

    with monkeypatch.context() as patched:
        patched.setattr(node.agent.promises, "write", failing(errno.ENOSPC))
        await fleet.send(node, Prepare(job=JOB, run=RUN, generation=Generation(1), parent=Generation(0)))
        await until("the fault", lambda: faults_of(fleet))
    assert [fault.device for fault in faults_of(fleet)] == [str(node.state_dir)]
    await cleared(fleet, monkeypatch)
    await fleet.launch()


async def test_lines_that_the_disk_does_not_take_name_the_disk(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.launch()
    node = fleet.nodes[1]
    folder = node.state_dir / "logs"
    read = LogJournal.read

    def full(journal: LogJournal, *arguments: Any) -> Any:
        if Path(journal.folder).is_relative_to(folder):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "journal"))
        return read(journal, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LogJournal, "read", full)
        patched.setattr(LogJournal, "has_news", lambda _: True)
        await until("the fault", lambda: faults_of(fleet))
    assert [fault.device for fault in faults_of(fleet)] == [str(folder)]
    await cleared(fleet, monkeypatch)


async def test_a_promise_that_the_disk_keeps_does_not_hold_up_the_release(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.prepare()
    node = fleet.nodes[1]

    with monkeypatch.context() as patched:
        patched.setattr(node.agent.promises, "write", failing(errno.EIO))
        await fleet.send(node, Release(run=RUN))
        await until(
            "a report without a member",
            lambda: (report := fleet.control.reports.get(node.id)) is not None and report.member is None,
        )
    await fleet.prepare()
