from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from everstep.training.capture import StateTensor
from everstep.training.copier import CopyTicket
from everstep.training.guard import AUDITED_AT_START, AUDITED_EVERY, Flight, Guard
from everstep.training.sources import Sources


class Settled:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.errors: list[BaseException] = []

    def __call__(self, changed: Sequence[str], error: BaseException | None) -> None:
        self.calls.append(list(changed))
        self.errors += [error] if error is not None else []


def flight(live: torch.Tensor, settle: Settled, *, is_audited: bool) -> Flight:
    ticket = CopyTicket()
    ticket.finish()
    sources = Sources([(0, StateTensor("w", live, True))])
    marks = sources.marks()
    return Flight(
        sources, lambda: sources.moved(marks), [live.detach().clone()] if is_audited else None, ticket, settle, 0.25
    )


def test_an_untouched_tensor_settles_without_a_word() -> None:
    guard, settled = Guard(clock=iter([1.0, 3.0]).__next__), Settled()
    guard.arm(flight(torch.tensor([float("nan"), -0.0]), settled, is_audited=True))
    guard.reach()
    guard.reach()
    assert settled.calls == [[]]
    assert list(guard.blocked_seconds) == [2.25]
    assert guard.unstable == set()


@pytest.mark.parametrize("is_audited", [True, False])
def test_a_change_that_torch_counts_is_always_found(is_audited: bool) -> None:
    guard, settled, live = Guard(), Settled(), torch.ones(3)
    guard.arm(flight(live, settled, is_audited=is_audited))
    live.add_(1)
    with pytest.warns(RuntimeWarning, match="w changed outside an optimizer step"):
        guard.reach()
    assert settled.calls == [["w"]]
    assert guard.unstable == {"w"}


def test_a_change_behind_torchs_back_is_found_by_an_audit_alone() -> None:
    live = torch.nn.Parameter(torch.ones(3))
    for is_audited, found in ((False, []), (True, ["w"])):
        guard, settled = Guard(), Settled()
        guard.arm(flight(live, settled, is_audited=is_audited))
        live.data.add_(1)
        if found:
            with pytest.warns(RuntimeWarning):
                guard.reach()
        else:
            guard.reach()
        assert settled.calls == [found]


def test_a_flipped_sign_of_zero_is_a_change() -> None:
    guard, settled, live = Guard(), Settled(), torch.nn.Parameter(torch.zeros(2))
    guard.arm(flight(live, settled, is_audited=True))
    live.data.neg_()
    with pytest.warns(RuntimeWarning):
        guard.reach()
    assert settled.calls == [["w"]]


def test_other_memory_is_a_change() -> None:
    guard, settled, live = Guard(), Settled(), torch.nn.Parameter(torch.ones(2))
    guard.arm(flight(live, settled, is_audited=False))
    live.data = torch.ones(2)
    with pytest.warns(RuntimeWarning):
        guard.reach()
    assert settled.calls == [["w"]]


def test_a_tensor_is_reported_once() -> None:
    guard, settled, live = Guard(), Settled(), torch.ones(3)
    for number in range(2):
        guard.arm(flight(live, settled, is_audited=False))
        live.add_(1)
        if number == 0:
            with pytest.warns(RuntimeWarning):
                guard.reach()
        else:
            guard.reach()
    assert settled.calls == [["w"], ["w"]]


def test_the_first_and_every_thousandth_snapshot_are_audited() -> None:
    guard = Guard()
    audited = []
    for number in range(1, 2 * AUDITED_EVERY + 1):
        if guard.is_next_audited():
            audited.append(number)
        guard.arm(flight(torch.ones(1), Settled(), is_audited=False))
        guard.reach()
    assert audited == [*range(1, AUDITED_AT_START + 1), AUDITED_EVERY, 2 * AUDITED_EVERY]


def test_the_guard_waits_for_the_copy() -> None:
    guard, settled, ticket = Guard(), Settled(), CopyTicket()
    waited = []
    ticket.wait = lambda: waited.append(True)  # type: ignore[method-assign]
    guard.arm(Flight(Sources([]), list, None, ticket, settled, 0.0))
    guard.reach()
    assert waited == [True]


def test_a_wait_that_is_broken_off_is_waited_again() -> None:
    class Interrupted(CopyTicket):
        wait_count = 0

        def wait(self) -> None:
            self.wait_count += 1
            if self.wait_count == 1:
                raise KeyboardInterrupt

    guard, settled, ticket = Guard(), Settled(), Interrupted()
    guard.arm(Flight(Sources([]), list, None, ticket, settled, 0.0))
    with pytest.raises(KeyboardInterrupt):
        guard.reach()
    guard.reach()
    assert ticket.wait_count == 2
    assert settled.calls == [[]]


def test_what_a_signal_handler_has_settled_meanwhile_is_settled_once() -> None:
    class Handled(CopyTicket):
        wait_count = 0

        def wait(self) -> None:
            self.wait_count += 1
            if self.wait_count == 1:
                guard.reach()  # call the guard inside the guard, as a signal handler could through `fence` or `close`

    guard, settled = Guard(), Settled()
    guard.arm(Flight(Sources([]), list, None, Handled(), settled, 0.0))
    guard.reach()
    assert settled.calls == [[]]
    assert len(guard.blocked_seconds) == 1


def test_a_comparison_that_is_broken_off_is_settled() -> None:
    def fails() -> list[str]:
        raise KeyboardInterrupt

    guard, settled, ticket = Guard(), Settled(), CopyTicket()
    ticket.finish()
    guard.arm(Flight(Sources([]), fails, None, ticket, settled, 0.0))
    with pytest.raises(KeyboardInterrupt):
        guard.reach()
    guard.reach()
    assert settled.calls == [[]]
    assert [type(error) for error in settled.errors] == [KeyboardInterrupt]


@pytest.mark.parametrize("is_audited", [True, False])
@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_a_comparison_that_there_is_no_memory_for_costs_the_snapshot_and_nothing_else(
    is_audited: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[str]:
        raise error

    guard, settled = Guard(), Settled()
    monkeypatch.setattr(Sources, "differing" if is_audited else "moved", fails)
    guard.arm(flight(torch.ones(3), settled, is_audited=is_audited))
    guard.reach()
    guard.reach()
    assert settled.calls == [[]]
    assert settled.errors == [error]
    assert guard.unstable == set()


def test_an_audit_in_a_script_that_captures_a_graph_costs_the_snapshot_and_nothing_else() -> None:
    class Hidden(CopyTicket):
        hides_sources = True

    guard, settled, live = Guard(), Settled(), torch.ones(3)
    begun = flight(live, settled, is_audited=True)
    begun.ticket = Hidden()
    begun.ticket.finish()
    guard.arm(begun)
    guard.reach()
    assert settled.calls == [[]]
    assert [str(error) for error in settled.errors] == ["it cannot be compared while the script captures a graph"]
    assert guard.unstable == set()
