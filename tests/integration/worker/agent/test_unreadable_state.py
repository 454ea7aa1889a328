"""An agent connects whatever an earlier agent process has left, and says what it gave up."""

from __future__ import annotations

import errno

import pytest

from tests.integration.worker.agent.fleet import Fleet, Node, until
from tests.integration.worker.agent.test_generations import check_restored
from worker.agent.promise import PromiseFile
from worker.member.member import Member

pytestmark = pytest.mark.integration


def reports_a_fault(fleet: Fleet, number: int) -> bool:
    report = fleet.control.reports.get(fleet.nodes[number].id)
    member = report.member if report is not None else None
    faults = () if report is None else report.faults if member is None else member.faults
    return [fault.code for fault in faults] == ["agent_error"]


async def stopped(fleet: Fleet) -> Node:
    """Train some steps, and stop the agent of a node. Its ranks continue."""
    await fleet.launch()
    await fleet.train(4)
    node = fleet.nodes[1]
    await node.stop()
    return node


async def test_a_generation_that_cannot_be_resumed_ends_and_its_slots_stay(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await stopped(fleet)
    with monkeypatch.context() as patched:
        patched.setattr(Member, "adopt", lambda _: 1 / 0)
        node.start()
        await until("its fault", lambda: reports_a_fault(fleet, 1))
    assert node.shim.ended, "the ranks of the generation end"
    await fleet.launch()
    check_restored(fleet)
    member = fleet.control.member(node.id)
    assert member is not None
    assert member.restored_from == ("local",)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x80"])
async def test_a_damaged_promise_is_put_aside(fleet: Fleet, content: bytes) -> None:
    node = await stopped(fleet)
    (node.state_dir / "promise").write_bytes(content)
    node.start()
    await until("its fault", lambda: reports_a_fault(fleet, 1))
    assert (node.state_dir / "promise.unreadable").read_bytes() == content
    await fleet.launch()
    check_restored(fleet)
    member = fleet.control.member(node.id)
    assert member is not None
    assert member.restored_from == ("local",), "the slots are the run's"


async def test_a_run_that_can_never_be_opened_leaves_the_node_free(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await stopped(fleet)
    with monkeypatch.context() as patched:
        patched.setattr("worker.shm.store.SlotStore.open_run", lambda *_: 1 / 0)
        node.start()
        await until("its fault", lambda: reports_a_fault(fleet, 1))
        assert fleet.control.member(node.id) is None
    await fleet.launch()
    check_restored(fleet)


async def test_a_disk_that_does_not_answer_costs_no_promise(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await stopped(fleet)
    promise = (node.state_dir / "promise").read_bytes()

    def fail(_: PromiseFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PromiseFile, "read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        await node.agent.lifecycle.resume()
    assert (node.state_dir / "promise").read_bytes() == promise
