"""The agent sends logged values at regular times, and sends them again after a lost connection.

It drops the values once the control plane has confirmed them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest

from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from worker.core.metric_outbox import (
    AGAIN_SECONDS,
    MAX_SENT,
    MAX_SENT_BYTES,
    MAX_VALUES,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    POINT_BYTES,
    VALUE_BYTES,
    MetricOutbox,
)

RUN, OTHER = RunId("a" * 32), RunId("b" * 32)


def points(*steps: int, values: int = 1) -> tuple[MetricPoint, ...]:
    return tuple(
        MetricPoint(
            generation=Generation(1), step=Step(step), values={str(n): 1.0 for n in range(values)}, at_seconds=0.0
        )
        for step in steps
    )


def named(of_steps: Iterable[int], count: int) -> tuple[MetricPoint, ...]:
    """Return points whose values have names of the greatest length."""
    values = {"x" * 251 + f"{number:04}": 1.0 for number in range(count)}
    return tuple(
        MetricPoint(generation=Generation(1), step=Step(step), values=values, at_seconds=0.0) for step in of_steps
    )


def named_bytes(count: int) -> int:
    return POINT_BYTES + count * (sys.getsizeof("x" * 255) + VALUE_BYTES)


def steps(batch: MetricBatch | None) -> list[int]:
    return [] if batch is None else [point.step for point in batch.points]


def test_a_batch_is_sent_once_until_it_is_confirmed_late_or_the_line_is_new() -> None:
    outbox = MetricOutbox()
    assert outbox.due(0.0) is None
    outbox.add(RUN, points(1, 2))
    assert steps(outbox.due(0.0)) == [1, 2]
    outbox.add(RUN, points(3))
    assert outbox.due(AGAIN_SECONDS - 0.1) is None
    assert steps(outbox.due(AGAIN_SECONDS)) == [1, 2, 3]
    outbox.connected()
    assert steps(outbox.due(AGAIN_SECONDS)) == [1, 2, 3]
    outbox.confirm(2)
    batch = outbox.due(AGAIN_SECONDS)
    assert batch is not None
    assert (steps(batch), batch.first_number) == ([3], 2)
    outbox.confirm(2)  # the control plane confirms the same number again
    assert outbox.due(AGAIN_SECONDS) is None
    outbox.confirm(3)
    outbox.connected()
    assert outbox.due(AGAIN_SECONDS) is None


def test_a_batch_has_one_run_and_no_gap() -> None:
    outbox = MetricOutbox()
    outbox.add(RUN, points(1))
    outbox.add(RUN, points(5), dropped_count=3)
    outbox.add(OTHER, points(1))
    numbers = []
    while (batch := outbox.due(0.0)) is not None:
        numbers.append((batch.run, batch.first_number, steps(batch)))
        outbox.confirm(batch.first_number + len(batch.points))
    assert numbers == [(RUN, 0, [1]), (RUN, 4, [5]), (OTHER, 5, [1])]


def test_what_waits_and_what_is_sent_is_bounded() -> None:
    outbox = MetricOutbox()
    outbox.add(RUN, points(*range(MAX_WAITING + 3)))
    batch = outbox.due(0.0)
    assert batch is not None
    assert (batch.first_number, steps(batch)) == (3, list(range(3, 3 + MAX_SENT)))
    outbox = MetricOutbox()
    outbox.add(RUN, named(range(100), MAX_VALUES))
    few = steps(outbox.due(0.0))
    assert few == list(range(MAX_SENT_BYTES // named_bytes(MAX_VALUES)))


@pytest.mark.security
def test_long_names_fill_no_more_memory_than_short_names() -> None:
    outbox = MetricOutbox()
    most = MAX_WAITING_BYTES // named_bytes(MAX_VALUES)
    for step in range(most + 5):
        outbox.add(RUN, named([step], MAX_VALUES))
    assert (len(outbox), outbox.dropped_count) == (most, 5)
    batch = outbox.due(0.0)
    assert batch is not None
    assert batch.first_number == 5
    outbox.confirm(most)
    outbox.add(RUN, named(range(most), MAX_VALUES))
    assert (len(outbox), outbox.dropped_count) == (most, 10), "confirmed values do not count"


@pytest.mark.security
def test_a_step_has_the_first_256_values_and_the_others_count_as_dropped() -> None:
    outbox = MetricOutbox()
    outbox.add(RUN, points(1, 2, values=MAX_VALUES + 3))
    batch = outbox.due(0.0)
    assert batch is not None
    assert [list(point.values) for point in batch.points] == [[str(n) for n in range(MAX_VALUES)]] * 2
    assert (batch.first_number, outbox.dropped_count) == (6, 6), "the gap reports the dropped values"


@pytest.mark.security
def test_a_run_does_not_wait_for_more_than_one_message_of_earlier_runs() -> None:
    outbox = MetricOutbox()
    outbox.add(RUN, points(*range(2 * MAX_SENT)))
    outbox.add(RUN, points(*range(10)), dropped_count=1)
    assert outbox.due(0.0) is not None
    outbox.leave_earlier(RUN)
    assert (len(outbox), outbox.dropped_count) == (2 * MAX_SENT + 10, 1)
    outbox.leave_earlier(None)
    assert (len(outbox), outbox.dropped_count) == (10, 1 + 2 * MAX_SENT), "the newest message stays"
    outbox.add(OTHER, points(*range(20)))
    outbox.leave_earlier(OTHER)
    batch = outbox.due(0.0)
    assert batch is not None
    assert (batch.run, steps(batch)) == (RUN, list(range(10)))
    outbox.confirm(batch.first_number + 10)
    batch = outbox.due(0.0)
    assert batch is not None
    assert (batch.run, steps(batch)) == (OTHER, list(range(20)))


def test_dropped_steps_are_counted() -> None:
    outbox = MetricOutbox()
    assert outbox.dropped_count == 0
    outbox.add(RUN, points(1), dropped_count=3)
    outbox.add(RUN, points(5), dropped_count=1)
    assert outbox.dropped_count == 4
    outbox.add(RUN, points(*range(6, 6 + MAX_WAITING)))
    assert (len(outbox), outbox.dropped_count) == (MAX_WAITING, 6)
