"""The agent sends logged values at regular times, and sends them again after a lost connection.

It drops the values once the control plane has confirmed them.
"""

from __future__ import annotations

from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from worker.core.metric_outbox import AGAIN_SECONDS, MAX_SENT, MAX_SENT_VALUES, MAX_WAITING, MetricOutbox

RUN, OTHER = RunId("a" * 32), RunId("b" * 32)


def points(*steps: int, values: int = 1) -> tuple[MetricPoint, ...]:
    return tuple(
        MetricPoint(
            generation=Generation(1), step=Step(step), values={str(n): 1.0 for n in range(values)}, at_seconds=0.0
        )
        for step in steps
    )


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
    outbox.add(RUN, points(1, 2, 3, values=MAX_SENT_VALUES // 2))
    assert steps(outbox.due(0.0)) == [1, 2]
    outbox = MetricOutbox()
    outbox.add(RUN, points(1, 2, values=MAX_SENT_VALUES + 1))
    assert steps(outbox.due(0.0)) == [1]


def test_dropped_steps_are_counted() -> None:
    outbox = MetricOutbox()
    assert outbox.dropped_count == 0
    outbox.add(RUN, points(1), dropped_count=3)
    outbox.add(RUN, points(5), dropped_count=1)
    assert outbox.dropped_count == 4
    outbox.add(RUN, points(*range(6, 6 + MAX_WAITING)))
    assert (len(outbox), outbox.dropped_count) == (MAX_WAITING, 6)
