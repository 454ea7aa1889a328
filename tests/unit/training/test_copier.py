"""Tests the copier of host memory: its copies, its threads, and its reports of progress."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from everstep.training.copier import CopierThread, Copies, CpuCopier, parts


def small_copier() -> CpuCopier:
    """Return a copier with small pieces."""
    return CpuCopier(piece_bytes=64, tensors_at_once=3)


def copies_of(*sources: torch.Tensor) -> Copies:
    return Copies(sources, [torch.full(source.shape, -1).to(source.dtype) for source in sources])


SMALL, LARGE = torch.arange(4.0), torch.arange(40.0)
TRANSPOSED = torch.arange(40.0).view(4, 10).t()


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ([SMALL] * 3, [(3, 0)]),
        ([torch.zeros(1)] * 7, [(3, 0), (6, 0), (7, 0)]),
        ([torch.arange(10.0)] * 3, [(1, 0), (2, 0), (3, 0)]),
        ([LARGE], [(0, 64), (0, 128), (1, 0)]),
        ([torch.arange(32.0)], [(0, 64), (1, 0)]),
        ([SMALL, LARGE, SMALL], [(1, 0), (1, 64), (1, 128), (2, 0), (3, 0)]),
        ([TRANSPOSED, SMALL], [(1, 0), (2, 0)]),
        ([torch.zeros(0), SMALL], [(2, 0)]),
        (
            [torch.arange(40, dtype=torch.uint8), torch.arange(20, dtype=torch.int64)],
            [(1, 0), (1, 64), (1, 128), (2, 0)],
        ),
        ([], []),
    ],
    ids=[
        "small ones together",
        "not too many",
        "not too large",
        "a large one in pieces",
        "whole pieces",
        "between",
        "not in one piece",
        "empty",
        "types",
        "none",
    ],
)
def test_what_is_said_to_be_there_is_there(sources: list[torch.Tensor], told: list[tuple[int, int]]) -> None:
    copies = copies_of(*sources)
    copier, said, errors = small_copier(), [], []

    def progress(complete_count: int, piece_bytes: int) -> None:
        said.append((complete_count, piece_bytes))
        assert all(
            torch.equal(to, of) for to, of in list(zip(copies.targets, copies.sources, strict=True))[:complete_count]
        )
        if piece_bytes:
            count = piece_bytes // copies.sources[complete_count].element_size()
            assert torch.equal(
                copies.targets[complete_count].view(-1)[:count], copies.sources[complete_count].reshape(-1)[:count]
            )

    def done(error: BaseException | None) -> None:
        said.append((-1, 0))
        errors.append(error)

    copier.start(copies, done, progress).join()
    copier.close()
    assert errors == [None]
    assert said == [*told, (-1, 0)]
    assert all(torch.equal(to, of) for to, of in zip(copies.targets, copies.sources, strict=True))


def test_parts_are_everything_once_and_in_order() -> None:
    torch.manual_seed(1)
    sources = [torch.randn(int(size)) for size in torch.randint(0, 60, (50,))]
    copies = copies_of(*sources)
    ends = []
    for part, complete_count, piece_bytes in parts(copies, 64, 3):
        for to, of in zip(part.targets, part.sources, strict=True):
            assert bool((to == -1).all()), "copied twice"
            to.copy_(of)
        ends.append((complete_count, piece_bytes))
    assert ends == sorted(ends)
    assert all(torch.equal(to, of) for to, of in zip(copies.targets, copies.sources, strict=True))


def test_nobody_asks_and_nothing_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Copies] = []
    copier = small_copier()
    monkeypatch.setattr(copier, "copy", calls.append)
    copies = copies_of(LARGE, SMALL)
    copier.start(copies, lambda _error: None).join()
    copier.close()
    assert calls == [copies]


def test_a_copy_that_fails_in_the_middle_says_so_and_stops() -> None:
    copies = Copies([SMALL, torch.zeros(3)], [torch.zeros(4), torch.zeros(2)])
    copier, said, errors = small_copier(), [], []
    ticket = copier.start(copies, errors.append, lambda *far: said.append(far))
    ticket.join()
    copier.close()
    assert [type(error) for error in errors] == [RuntimeError]
    assert ticket.error is errors[0]
    assert said == []


def test_a_copy_that_does_not_end_is_drained_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, begun, ends, done = small_copier(), threading.Event(), threading.Event(), list[BaseException | None]()

    def stand(_copies: Copies) -> None:
        begun.set()
        ends.wait()

    monkeypatch.setattr(copier, "copy", stand)
    copier.start(copies_of(SMALL), done.append)
    begun.wait()
    copier.drain(0.01)
    assert done == []
    ends.set()
    copier.drain(30)
    assert done == [None]


def test_whatever_goes_wrong_beside_a_copy_training_waits_for_no_thread_that_is_gone() -> None:
    def fail(*_: object) -> None:
        raise LookupError("a bug")

    copies = Copies([SMALL, SMALL], [torch.zeros_like(SMALL), torch.zeros_like(SMALL)])
    copier, errors = small_copier(), []
    copier.start(copies, errors.append, fail).join()
    assert [type(error) for error in errors] == [LookupError]
    copier.start(copies, fail).join()
    ticket = copier.start(copies, errors.append)
    ticket.join()
    copier.close()
    assert ticket.error is None
    assert errors[1:] == [None]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set as soon as a copier's thread waits for work."""
    event = threading.Event()

    class Queue(queue.SimpleQueue[Any]):
        def get(self, *arguments: Any) -> Any:
            event.set()
            return super().get(*arguments)

    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    return event


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[int]]]:
    """Return a list that receives a pair (thread, cores) for each call that places a thread on cores."""
    asked: list[tuple[int, set[int]]] = []
    place: Callable[[int, Iterable[int]], None] = os.sched_setaffinity

    def note(thread: int, cores: Iterable[int]) -> None:
        asked.append((thread, set(cores)))
        place(thread, cores)

    monkeypatch.setattr(os, "sched_setaffinity", note)
    return asked


def test_where_cores_are_few_the_thread_wakes_up_behind_whoever_gave_it_work_and_is_free_then(
    waits: threading.Event, placed: list[tuple[int, set[int]]]
) -> None:
    everywhere = os.sched_getaffinity(0)
    begun, goes_on, seen = threading.Event(), threading.Event(), list[object]()
    workers: list[int] = []

    def look() -> None:
        workers.append(threading.get_native_id())
        seen.extend((os.sched_getaffinity(0), os.sched_getscheduler(0)))
        begun.set()
        goes_on.wait()

    thread = CopierThread(is_crowded=True)
    waits.wait()
    thread.put(look)
    begun.wait()
    thread.put(lambda: None)  # a thread keeps its cores while it works
    goes_on.set()
    thread.close()
    (who, core), *freed = placed
    assert who == workers[0]
    assert len(core) == 1
    assert core <= everywhere
    assert freed == [(0, everywhere)] * 2
    assert seen == [everywhere, os.SCHED_BATCH]


def test_where_it_may_not_be_said_who_runs_where_the_work_is_done_all_the_same(
    waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    thread, done = CopierThread(is_crowded=True), threading.Event()
    waits.wait()
    thread.put(done.set)
    done.wait()
    thread.close()


def test_with_cores_to_spare_the_kernel_decides_who_runs_where(
    waits: threading.Event, placed: list[tuple[int, set[int]]]
) -> None:
    policies: list[int] = []
    thread = CopierThread()
    waits.wait()
    thread.put(lambda: policies.append(os.sched_getscheduler(0)))
    thread.close()
    assert policies == [os.sched_getscheduler(0)]
    assert placed == []
