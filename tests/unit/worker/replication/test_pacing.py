"""Tests when a pacer admits chunks, on an event loop with a virtual clock.

Hours of virtual time pass immediately, and every time is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.interleave.uniform import UniformPacer
from everstep.protocol.rank_messages import IdleSpan
from tests.unit.worker.replication.wire import BEGIN, Wire
from worker.core.chunks import Link, ScheduledChunk, uniform
from worker.replication.pacing import (
    ENOUGH_TRANSFERS,
    MEASURED_PERIOD_BYTES,
    PATIENCE_ITERATIONS,
    NodePacer,
    Pacer,
    SpanPacer,
    Unpaced,
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only when all tasks wait."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = BEGIN
        really = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> object:
            assert timeout is not None, "everybody waits for ever"
            self.clock += max(0.0, timeout)
            return really(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.clock


def run(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())  # type: ignore[arg-type]


async def departures(pacer: Pacer, count: int, size: int) -> list[float]:
    """Return the times at which the pacer admitted `count` chunks, in seconds since the start."""
    times = []
    for _ in range(count):
        await pacer.admit(size)
        times.append(asyncio.get_running_loop().time() - BEGIN)
    return times


def at_boundary(*spans: IdleSpan, iteration: float = 10.0, bandwidth: float = 100_000.0) -> SpanPacer:
    pacer = SpanPacer(spans, Link(bandwidth), iteration_seconds=iteration)
    pacer.boundary(BEGIN)
    return pacer


def test_unpaced_chunks_do_not_wait() -> None:
    async def work() -> None:
        assert await departures(Unpaced(), 3, 1 << 20) == [0.0, 0.0, 0.0]

    run(work)


def test_a_uniform_pacer_sends_what_the_schedule_says() -> None:
    async def work() -> None:
        plan = uniform(1000, 2, chunk_bytes=100, iteration_seconds=5.0)
        pacer = UniformPacer(2000 / (0.8 * 5.0), 100)
        assert await departures(pacer, len(plan), 100) == pytest.approx([chunk.begin_seconds for chunk in plan])

    run(work)


def test_a_uniform_pacer_does_not_save_up() -> None:
    async def work() -> None:
        pacer = UniformPacer(100.0, 100)
        await pacer.admit(100)
        await asyncio.sleep(50.0)
        assert await departures(pacer, 3, 100) == pytest.approx([50.0, 51.0, 52.0])

    run(work)


def test_chunks_fill_the_middle_of_the_idle_spans_and_nothing_else() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(1.0, 2.0), IdleSpan(6.0, 1.0))
        times = await departures(pacer, 5, 50_000)  # a chunk takes 0.5 s, and the pacer uses 0.85 of a span
        # The spans have room for four chunks. No further step ends, so the fifth chunk waits until its time limit.
        assert times == pytest.approx([1.15, 1.65, 2.15, 6.075, 20.0])

    run(work)


def test_a_boundary_moves_the_openings_of_who_waits_already() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(4.0, 2.0))
        waiting = asyncio.create_task(departures(pacer, 1, 50_000))
        await asyncio.sleep(1.0)
        pacer.boundary(BEGIN + 1.0)
        assert await waiting == pytest.approx([5.15])

    run(work)


def test_late_news_of_an_older_boundary_changes_nothing() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(4.0, 2.0))
        pacer.boundary(BEGIN - 3.0)
        assert await departures(pacer, 1, 50_000) == pytest.approx([4.15])

    run(work)


def test_senders_share_the_link() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(0.0, 4.0))
        one, other = await asyncio.gather(departures(pacer, 3, 50_000), departures(pacer, 3, 50_000))
        assert sorted(one + other) == pytest.approx([0.3, 0.8, 1.3, 1.8, 2.3, 2.8])
        assert one == pytest.approx([0.3, 1.3, 2.3])

    run(work)


def test_who_wakes_up_late_catches_up_within_the_margin_of_a_span() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(0.0, 4.0))  # the part of the span in which chunks may be sent begins after 0.3 s
        assert await departures(pacer, 1, 50_000) == pytest.approx([0.3])
        await asyncio.sleep(0.7)  # wait until 0.2 s after the previous chunk has left the link
        assert await departures(pacer, 2, 50_000) == pytest.approx([1.0, 1.3])
        # wait until 0.7 s after the previous chunk has left the link; the pacer makes up for at most 0.3 s of this
        # delay
        await asyncio.sleep(1.2)
        assert await departures(pacer, 2, 50_000) == pytest.approx([2.5, 2.7])

    run(work)


def test_nothing_is_waited_for_before_the_first_boundary_or_long_after_the_last() -> None:
    async def work() -> None:
        pacer = SpanPacer([IdleSpan(1.0, 1.0)], Link(100_000.0), iteration_seconds=10.0)
        assert await departures(pacer, 2, 10) == [0.0, 0.0]
        pacer.boundary(BEGIN)
        await asyncio.sleep(PATIENCE_ITERATIONS * 10.0)
        # The second chunk leaves right after the first one, at the rate of the link.
        assert await departures(pacer, 2, 10) == pytest.approx([20.0, 20.0001])

    run(work)


def test_a_pause_lets_go_of_who_waits_at_once_and_the_next_boundary_holds_again() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(4.0, 2.0))
        waiting = asyncio.create_task(departures(pacer, 1, 50_000))
        await asyncio.sleep(1.0)
        pacer.pause()
        assert await waiting == [1.0]
        pacer.boundary(BEGIN + 2.0)
        assert await departures(pacer, 1, 50_000) == pytest.approx([6.15])

    run(work)


def test_the_link_is_what_the_fastest_of_enough_transfers_says() -> None:
    wire = Wire(1_000_000.0)
    for number in range(1, ENOUGH_TRANSFERS):
        wire.bytes_per_second = 1_000_000.0 / number
        wire.carry(1_000_000)
        assert wire.pacer.bytes_per_second is None
    wire.bytes_per_second = 1e12  # at this rate, a transfer takes little longer than the link's latency
    wire.carry(MEASURED_PERIOD_BYTES - 1)
    assert wire.pacer.bytes_per_second is None
    wire.bytes_per_second = 3_000_000.0
    wire.carry(3_000_000)
    assert (wire.pacer.bytes_per_second, wire.pacer.transfer_bytes) == (pytest.approx(3_000_000.0), 1_000_000.0)


def learnt(wire: Wire, *sizes: int, verified_seconds: float = 0.0) -> float:
    """Return the rate that the pacer measures if transfers of these sizes run at the same time, again and again."""
    for _ in range(ENOUGH_TRANSFERS):
        wire.carry(*sizes, verified_seconds=verified_seconds)
        wire.wait(5.0)
    assert wire.pacer.bytes_per_second is not None
    return wire.pacer.bytes_per_second


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_transfers_that_go_at_once_are_one_measurement_of_the_link(count: int) -> None:
    assert learnt(Wire(1e9), *[50_000_000] * count) == pytest.approx(1e9)


def test_transfers_of_other_sizes_at_once_are_one_as_well() -> None:
    assert learnt(Wire(1e9), 10_000_000, 30_000_000, 80_000_000) == pytest.approx(1e9)


def test_the_time_until_the_holder_has_verified_the_last_bytes_belongs_to_the_transfer() -> None:
    assert learnt(Wire(1e8), 50_000_000, verified_seconds=0.5) == pytest.approx(5e7)
    assert learnt(Wire(1e8), 10_000_000, 15_000_000, verified_seconds=0.25) == pytest.approx(5e7)


def test_a_measurement_begins_and_ends_with_nobody_under_way() -> None:
    """The pacer measures the link over a period that begins and ends while no transfer runs.

    In the test, three transfers overlap, so the period ends only with the third. The third begins first, but waits
    until its rank has finished the capture, and sends its bytes long after the other two. The time in which no transfer
    sends does not count.
    """
    wire = Wire(1e6)
    for _ in range(ENOUGH_TRANSFERS):
        first, second, third = wire.queue(), wire.queue(), wire.queue()
        with wire.pacer.counted(third):
            with wire.pacer.counted(first):
                first.add([(0, 1)])
                wire.wait(1.0)
                with wire.pacer.counted(second):
                    second.add([(0, 1)])
                    wire.wait(2.0)
                    first.taken(2_000_000)
                    first.finish()
                    wire.pacer.measured(first)
                    wire.wait(1.0)
                    second.taken(2_000_000)
                    second.finish()
                    wire.pacer.measured(second)
            wire.wait(100.0)  # the third transfer waits for its rank, which is still capturing
            assert wire.pacer.bytes_per_second is None
            third.add([(0, 1)])
            wire.wait(1.0)
            third.taken(1_000_000)
            third.finish()
            wire.pacer.measured(third)
    assert wire.pacer.bytes_per_second == pytest.approx(1e6)


@pytest.mark.parametrize(("sent", "tells"), [(0, True), (1, False)])
def test_what_a_transfer_sent_that_broke_or_was_paced_spoils_the_measurement(sent: int, tells: bool) -> None:
    wire = Wire(1e6)
    for _ in range(ENOUGH_TRANSFERS):
        broken = wire.queue()
        with wire.pacer.counted(broken):
            broken.add([(0, 2)])
            if sent:
                broken.taken(sent)
                broken.finish()
            broken.cancel()
            wire.carry(1_000_000)
    assert (wire.pacer.bytes_per_second is not None) is tells
    wire.carry(1_000_000, at_once=False)
    for _ in range(ENOUGH_TRANSFERS):
        wire.carry(1_000_000)
    assert wire.pacer.bytes_per_second == pytest.approx(1e6), "what comes after it tells again"


def test_a_transfer_s_part_is_what_others_left_of_the_time() -> None:
    wire = Wire(1e6)
    small, large = wire.carry(1_000_000, 3_000_000)
    assert (small.busy_seconds, small.part_seconds) == pytest.approx((2.0, 1.0))
    assert (large.busy_seconds, large.part_seconds) == pytest.approx((4.0, 3.0))
    given_up = wire.queue()
    given_up.add([(0, 1)])
    wire.wait(1.0)
    given_up.cancel()
    wire.wait(7.0)
    (alone,) = wire.carry(1_000_000)
    assert (given_up.busy_seconds, alone.part_seconds) == pytest.approx((1.0, 1.0))


def test_a_chunk_that_no_span_can_hold_is_not_held_back_for_ever() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        pacer = at_boundary(iteration=10.0)  # this profile has no idle span

        async def train() -> None:
            while True:
                await asyncio.sleep(10.0)
                pacer.boundary(loop.time())

        training = asyncio.create_task(train())
        assert await departures(pacer, 2, 50_000) == pytest.approx([20.0, 40.0])
        training.cancel()

    run(work)


def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(1.0, 2.0))
        first = asyncio.create_task(departures(pacer, 1, 50_000))
        second = asyncio.create_task(departures(pacer, 1, 50_000))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second == pytest.approx([1.15])

    run(work)


def test_the_size_of_a_chunk_follows_the_spans() -> None:
    wide = SpanPacer([IdleSpan(0.0, 0.2)], Link(100e6), iteration_seconds=2.0)
    narrow = SpanPacer([IdleSpan(0.0, 0.02)], Link(100e6), iteration_seconds=2.0)
    assert wide.chunk_bytes > 5 * narrow.chunk_bytes


def test_a_node_s_pacer_can_be_another_between_two_chunks() -> None:
    async def work() -> None:
        pacer = NodePacer()
        pacer.boundary(BEGIN)
        assert await departures(pacer, 1, 50_000) == [0.0]
        pacer.current = SpanPacer([IdleSpan(4.0, 2.0)], Link(100_000.0), iteration_seconds=10.0)
        pacer.boundary(BEGIN)
        assert pacer.chunk_bytes == pacer.current.chunk_bytes
        assert await departures(pacer, 1, 50_000) == pytest.approx([4.15])

    run(work)


def test_spans_hold_what_partition_puts_into_them() -> None:
    """The pacer admits a chunk only when its whole transfer fits into a window that `partition` computes."""

    async def work() -> None:
        spans = [IdleSpan(0.5, 1.0), IdleSpan(2.0, 0.4), IdleSpan(3.0, 2.0)]
        pacer = at_boundary(*spans, iteration=6.0)
        cost = Link(100_000.0).seconds(20_000)
        sent = [ScheduledChunk(0, 0, 20_000, 0, at) for at in await departures(pacer, 12, 20_000)]
        for chunk in sent:
            assert any(
                span.begin_seconds + 0.075 * span.seconds - 1e-9 <= chunk.begin_seconds
                and chunk.begin_seconds + cost <= span.begin_seconds + 0.925 * span.seconds + 1e-9
                for span in spans
            )

    run(work)


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.seconds = BEGIN

    def __call__(self) -> float:
        return self.seconds


def test_chunks_are_booked_without_the_loop_while_a_window_has_room() -> None:
    clock = Clock()
    pacer = SpanPacer([IdleSpan(0.0, 1.0)], Link(1_000_000.0), iteration_seconds=10.0, clock=clock)
    pacer.boundary(BEGIN)
    assert pacer.book(1000) is None  # the idle span has not begun yet
    clock.seconds += 0.1
    booked = 0
    for _ in range(2000):
        booked += pacer.book(1000) is not None
        clock.seconds += 0.001
    assert 800 <= booked <= 850, "the window has room for 850 of 1 ms, and a part of it had passed"
    clock.seconds += 10.0  # no further step ends, so the window of the last step is over
    assert pacer.book(1000) is None
    pacer.boundary(clock.seconds - 0.1)
    assert pacer.book(1000) == 0.0


def test_a_chunk_is_not_booked_past_one_that_waits_for_its_turn() -> None:
    async def work() -> None:
        pacer = at_boundary(IdleSpan(5.0, 1.0))
        waiting = asyncio.create_task(pacer.admit(100))
        await asyncio.sleep(0)
        pacer._clock = asyncio.get_running_loop().time
        assert pacer.book(1) is None
        await waiting
        assert pacer.book(1) is not None

    run(work)


def test_an_even_pace_is_kept_by_what_is_booked_and_what_waits_together() -> None:
    async def work() -> None:
        pacer = UniformPacer(1_000_000.0, 1000, clock=asyncio.get_running_loop().time)
        assert pacer.book(1000) == 0.0
        assert pacer.book(1000) == pytest.approx(0.001)
        assert pacer.book(1000) == pytest.approx(0.002)
        assert pacer.book(1000) is None
        assert await departures(pacer, 2, 1000) == pytest.approx([0.003, 0.004])

    run(work)


def test_what_is_not_paced_is_booked_at_once() -> None:
    assert NodePacer().book(1 << 30) == 0.0
