"""Tests the newest logged values of a node's ranks, as the agent reports them."""

from __future__ import annotations

from everstep.protocol.agent_messages import MAX_SERIES, RankValues
from everstep.protocol.ids import Rank, Step
from everstep.protocol.rank_messages import LogRecord
from worker.core.rank_values import MAX_NAMES, NewestValues


def record(step: int, **values: float) -> LogRecord:
    return LogRecord(step=Step(step), values=values, at_seconds=float(step))


def test_the_newest_value_of_each_name_is_reported_in_rank_order() -> None:
    newest = NewestValues(world_size=4)
    newest.record(Rank(3), [record(1, loss=9.0)])
    newest.record(Rank(1), [record(1, loss=3.0, rate=0.1), record(2, loss=2.0)])
    newest.record(Rank(2), [])
    assert newest.report() == (
        RankValues(rank=Rank(1), values={"loss": 2.0, "rate": 0.1}),
        RankValues(rank=Rank(3), values={"loss": 9.0}),
    )


def test_a_report_is_bounded() -> None:
    newest = NewestValues(world_size=MAX_SERIES)
    newest.record(Rank(1), [record(1, **{f"name{number}": 1.0 for number in range(MAX_NAMES + 5)})])
    newest.record(Rank(1), [record(2, name0=2.0, another=2.0)])
    ((_, values),) = ((each.rank, each.values) for each in newest.report())
    assert (len(values), values["name0"], "another" in values) == (MAX_NAMES, 2.0, False)
    larger = NewestValues(world_size=MAX_SERIES + 1)
    larger.record(Rank(1), [record(1, loss=1.0)])
    assert larger.report() == ()
