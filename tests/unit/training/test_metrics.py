from __future__ import annotations

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import Logged
from everstep.training.metrics import MetricRing


def test_a_full_ring_drops_and_counts() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(3), sent.append, capacity=2)
    for step in range(5):
        ring.add(Step(step), {"loss": float(step)})
    ring.close()
    (message,) = sent
    assert message.generation == 3
    assert [record.step for record in message.records] == [0, 1]
    assert message.dropped_count == 3


def test_nothing_is_sent_of_nothing() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.flush()
    ring.close()
    assert sent == []


def test_what_was_sent_is_not_sent_again() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.add(Step(1), {"loss": 1.0})
    ring.flush()
    ring.add(Step(2), {"loss": 2.0})
    ring.close()
    assert [record.step for message in sent for record in message.records] == [1, 2]
