"""All-reduces between two idle spares: which spares are paired, and what their results mean.

Invariant: pure. A pair has a rate only if both agents report one: the lower one, or 0 if the sum failed. A node is slow
only if two partners each have a much better rate with a third node. So two nodes alone decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from msgspec import structs

from control_plane.core import burn_in
from control_plane.core.launch import MASTER_PORTS
from control_plane.core.observed.facts import SlowNode
from control_plane.core.observed.fleets import NodeRecord
from control_plane.core.observed.nodes import BurnIn, NodeObserved, PairTest
from control_plane.core.states import NodeState
from everstep.protocol.agent_messages import BurnInOutcome, BurnInPartner, BurnInTest
from everstep.protocol.ids import NodeId

LIMIT_SECONDS = 300.0
"""Above the agent's own limit. An agent that restarts, or works for a job, reports no result."""
MOST_PARTNERS = 4
WITNESS_COUNT = 2
SHARE = 0.1
"""Share of another rate below which a rate is bad. On busy CPUs, the rates of equal nodes differ up to ten times."""
Node = Callable[[NodeId], NodeObserved]
Rates = Mapping[NodeId, Mapping[NodeId, int | None]]
"""The rate of each pair in bytes per second, by node and partner. None if an agent has not reported a result."""


def rates_of(rows: Sequence[NodeRecord], now: float) -> Rates:
    """Return the rates of the last `RETEST_SECONDS`. A node that returned to service has none from before."""
    ends = [(row.node_id, pair) for row in rows for pair in _recent(row.burn_in, now)]
    tests = {(node_id, pair.partner.node_id, pair.at): pair.test for node_id, pair in ends}
    rates: dict[NodeId, dict[NodeId, int | None]] = {row.node_id: {} for row in rows}
    for (node_id, partner, at), test in tests.items():
        if (partner, node_id, at) in tests:
            both = [each for each in (test, tests[partner, node_id, at]) if each is not None]
            known = [each.rate or 0 for each in both if each.outcome is not BurnInOutcome.UNKNOWN]
            rates[node_id][partner] = min(known) if len(known) == 2 else None
    return rates


def due(rows: Sequence[NodeRecord], node: Node, rates: Rates, now: float) -> list[NodeRecord]:
    """Return the idle spares that now receive orders: untested ones, and ones without a good rate yet."""
    free = {row.node_id: row for row in rows if _is_idle(row, node(row.node_id), now)}
    free = {id: free[id] for id in sorted(free) if len(rates[id]) < MOST_PARTNERS}
    least, ordered = _least(rates), list[NodeRecord]()
    for id in tuple(free):
        if id not in free or (rates[id] and _best(rates[id]) > least):
            continue
        if others := [other for other in free if other != id and other not in rates[id]]:
            pair = free.pop(id), free.pop(max(others, key=lambda other: _best(rates[other])))
            ordered += [_ordered(pair[place], node(pair[1 - place].node_id), place, now) for place in (0, 1)]
    return ordered


def _is_idle(row: NodeRecord, node: NodeObserved, now: float) -> bool:
    is_spare = row.state is NodeState.SPARE and row.request is None and now - row.since >= burn_in.IDLE_SECONDS
    is_free = node.is_connected and node.has_reported and node.member is None
    is_tested = row.burn_in is not None and row.burn_in.level == burn_in.IDLE_LEVEL and not row.burn_in.is_pending
    return is_spare and is_free and is_tested and (node.protocol_minor or 0) >= BurnInPartner.since_minor


def _ordered(row: NodeRecord, partner: NodeObserved, place: int, now: float) -> NodeRecord:
    assert row.burn_in is not None
    port = MASTER_PORTS[int(now) % len(MASTER_PORTS)]
    to = BurnInPartner(node_id=partner.node_id, address=partner.address, port=port, place=place)
    pairs = (*_recent(row.burn_in, now), PairTest(at=now, partner=to))
    return replace(row, burn_in=replace(row.burn_in, number=row.burn_in.number + 1, ordered_at=now, pairs=pairs))


def follow(record: BurnIn | None, node: NodeObserved, *, since: float, now: float) -> BurnIn | None:
    """Return a spare's record with the result of its pending all-reduce, or without one if a job has interrupted it."""
    if record is None or record.result is None or (pair := record.pending_pair) is None:
        return record
    tests: Sequence[BurnInTest] = ()
    if node.burn_in is not None and node.burn_in.number == record.number:
        tests = node.burn_in.tests
    elif since <= pair.at >= now - LIMIT_SECONDS:
        return record
    if tests:
        text = f"{tests[0].text} (with {pair.partner.node_id})".lstrip()
        rate = tests[0].rate if tests[0].outcome is BurnInOutcome.PASSED else None
        pair = replace(pair, test=structs.replace(tests[0], rate=rate, text=text))
    own = structs.replace(record.result, number=record.number)
    return replace(record, result=own, pairs=(*record.pairs[:-1], pair))


def slowness(node_id: NodeId, rates: Rates) -> SlowNode | None:
    """Return the bad rates of a node with partners that have better rates with other nodes, or None."""
    own = rates[node_id]
    best = {partner: _best({id: rate for id, rate in rates[partner].items() if id != node_id}) for partner in own}
    bad = [best[partner] for partner, rate in own.items() if rate is not None and rate < SHARE * best[partner]]
    if len(bad) < WITNESS_COUNT or _best(own) > _least(rates):
        return None
    return SlowNode(test="all-reduce", rate=_best(own), median_rate=int(median(bad)), other_count=len(bad))


def _best(rates: Mapping[NodeId, int | None]) -> int:
    return max((rate or 0 for rate in rates.values()), default=0)


def _least(rates: Rates) -> float:
    return SHARE * max(map(_best, rates.values()), default=0)


def _recent(record: BurnIn | None, now: float) -> list[PairTest]:
    return [pair for pair in record.pairs if now - pair.at < burn_in.RETEST_SECONDS] if record is not None else []
