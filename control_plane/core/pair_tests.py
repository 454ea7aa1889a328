"""All-reduces between two idle spares: which spares are paired, and what their results mean.

    a spare after its own tests of level 3      once in `RETEST_SECONDS`, with the partner that has the best rate
    a node without a good rate                  again, with other partners

Invariant: pure. A pair has a rate only if both agents report one: the lower one, or 0 if the sum failed. A node is slow
only if two partners each have a much better rate with a third node. So two nodes alone decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from msgspec import structs

from control_plane.core.burn_in import IDLE_LEVEL, IDLE_SECONDS, RETEST_SECONDS
from control_plane.core.launch import MASTER_PORTS
from control_plane.core.observed.facts import SlowNode
from control_plane.core.observed.fleets import NodeRecord
from control_plane.core.observed.nodes import BurnIn, NodeObserved, PairTest
from control_plane.core.states import NodeState
from everstep.protocol.agent_messages import BurnInOutcome, BurnInPartner
from everstep.protocol.ids import NodeId

LIMIT_SECONDS = 300.0
"""Above the agent's own limit. An agent that restarts, or works for a job, reports no result."""
MOST_PARTNERS = 4
WITNESS_COUNT = 2
SHARE = 0.1
"""Share of another rate below which a rate is bad. On busy CPUs, the rates of equal nodes differ up to ten times."""
Rates = Mapping[NodeId, Mapping[NodeId, int]]
"""The rate of each pair in bytes per second, by node and partner."""


def rates_of(rows: Sequence[NodeRecord], now: float) -> Rates:
    """Return the rates of all pairs within the last `RETEST_SECONDS`."""
    reported = {
        (row.node_id, pair.partner.node_id, pair.at): (test.rate or 0) * (test.outcome is BurnInOutcome.PASSED)
        for row in rows
        for pair in _recent(row.burn_in, now)
        if (test := pair.test) is not None and test.outcome is not BurnInOutcome.UNKNOWN
    }
    rates: dict[NodeId, dict[NodeId, int]] = {row.node_id: {} for row in rows}
    for (node_id, partner, at), rate in reported.items():
        if (other := reported.get((partner, node_id, at))) is not None:
            rates[node_id][partner] = min(rate, other)
    return rates


def paired(
    rows: Sequence[NodeRecord], node: Callable[[NodeId], NodeObserved], rates: Rates, now: float
) -> list[NodeRecord]:
    """Return the records of idle spares that receive an order for an all-reduce now."""
    stored = {(row.node_id, pair.at) for row in rows for pair in _recent(row.burn_in, now)}
    # A node that returns to service no longer stores its earlier pairs, so its partners may test it again.
    tried = {
        row.node_id: {
            pair.partner.node_id for pair in _recent(row.burn_in, now) if (pair.partner.node_id, pair.at) in stored
        }
        for row in rows
    }
    free = {
        row.node_id: row
        for row in sorted(rows, key=lambda row: row.node_id)
        if _is_idle(row, node(row.node_id), now) and len(tried[row.node_id]) < MOST_PARTNERS
    }
    ordered: list[NodeRecord] = []
    least = _least(rates)
    for id in tuple(free):
        if id not in free or (tried[id] and _best(rates[id]) > least):
            continue
        if others := [other for other in free if other != id and other not in tried[id]]:
            pair = free.pop(id), free.pop(max(others, key=lambda other: _best(rates[other])))
            ordered += [_ordered(pair[place], node(pair[1 - place].node_id), place, now) for place in (0, 1)]
    return ordered


def _is_idle(row: NodeRecord, node: NodeObserved, now: float) -> bool:
    record = row.burn_in
    is_tested = (
        row.state is NodeState.SPARE and record is not None and record.level == IDLE_LEVEL and not record.is_pending
    )
    is_supported = node.protocol_minor is not None and node.protocol_minor >= BurnInPartner.since_minor
    is_reported = node.is_connected and node.has_reported and node.member is None and row.request is None
    return is_tested and is_supported and is_reported and now - row.since >= IDLE_SECONDS


def _ordered(row: NodeRecord, partner: NodeObserved, place: int, now: float) -> NodeRecord:
    assert row.burn_in is not None
    port = MASTER_PORTS[int(now) % len(MASTER_PORTS)]
    to = BurnInPartner(node_id=partner.node_id, address=partner.address, port=port, place=place)
    others = [pair for pair in _recent(row.burn_in, now) if pair.partner.node_id != to.node_id]
    pairs = (*others, PairTest(at=now, partner=to))
    return replace(row, burn_in=replace(row.burn_in, number=row.burn_in.number + 1, ordered_at=now, pairs=pairs))


def follow(record: BurnIn | None, node: NodeObserved, *, since: float, now: float) -> BurnIn | None:
    """Return a spare's record with the result of its pending all-reduce, or without one if a job has interrupted it."""
    if record is None or record.result is None or (pair := record.pending_pair) is None:
        return record
    result = node.burn_in if node.burn_in is not None and node.burn_in.number == record.number else None
    if result is None and since <= pair.at >= now - LIMIT_SECONDS:
        return record
    for test in result.tests[:1] if result is not None else ():
        text = ": ".join(filter(None, (f"with {pair.partner.node_id}", test.text)))
        pair = replace(pair, test=structs.replace(test, text=text))
    own = structs.replace(record.result, number=record.number)
    return replace(record, result=own, pairs=(*record.pairs[:-1], pair))


def slowness(node_id: NodeId, rates: Rates) -> SlowNode | None:
    """Return the bad rates of a node with partners that have better rates with other nodes, or None."""
    own = rates[node_id]
    if len(own) < WITNESS_COUNT or _best(own) > _least(rates):
        return None
    best = {partner: _best({id: rate for id, rate in rates[partner].items() if id != node_id}) for partner in own}
    bad = [partner for partner in own if own[partner] < SHARE * best[partner]]
    if len(bad) < WITNESS_COUNT:
        return None
    middle = int(median(best[partner] for partner in bad))
    return SlowNode(test="all-reduce", rate=_best(own), median_rate=middle, other_count=len(bad))


def _best(rates: Mapping[NodeId, int]) -> int:
    return max(rates.values(), default=0)


def _least(rates: Rates) -> float:
    return SHARE * max(map(_best, rates.values()), default=0)


def _recent(record: BurnIn | None, now: float) -> list[PairTest]:
    return [pair for pair in record.pairs if now - pair.at < RETEST_SECONDS] if record is not None else []
