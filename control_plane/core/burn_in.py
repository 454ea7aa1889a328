"""Burn-in of nodes: when a spare is tested, and what its results mean.

    a new, rebooted or returned node, or one with a new entry in its fault history    level 1; no job uses it meanwhile
    a spare that is idle for `IDLE_SECONDS`, and again `RETEST_SECONDS` later         level 3; a job may use it
    a slow result                                                                     again, `REPEAT_COUNT` times

Invariant: pure. A test that could not run is no evidence, and a comparison with other nodes never permits the
termination of a node. Nodes of earlier releases have no tests, so jobs use them untested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from control_plane.core.observed.facts import SlowNode
from control_plane.core.observed.nodes import BurnIn, NodeObserved
from everstep.protocol.agent_messages import BurnInOutcome, BurnInResult, FaultCode, NodeFault, RunBurnIn
from everstep.protocol.limits import cut

BOOT_LEVEL, IDLE_LEVEL = 1, 3
BOOT_SECONDS = 120.0
"""A job may use an untested node after this time. Level 1 of DCGM and a first import of torch take a minute each."""
IDLE_SECONDS = 600.0
"""A spare is tested at level 3 after this time without a job, so a busy fleet does not test between two jobs."""
RETEST_SECONDS = 86_400.0
LEAST_OTHERS = 3
"""One bad node would decide the median of only two other nodes alone."""
MOST_SLOW_SHARE = 0.125
"""Largest share of a fleet's nodes that are held for slowness at once, but always one node.

If more nodes seem slow, the rates of the other nodes are probably wrong.
"""
REPEAT_COUNT = 2
"""Other work on the host or its network slows down a single test."""
SHARES: Mapping[str, float] = {"gpu-matmul": 0.5, "disk-write": 0.05, "disk-read": 0.05, "loopback": 0.05}
"""By test, the share of the median of other nodes below which a node is slow.

GPUs of one type differ by some percent. Where other processes use all cores, the rates of disk and loopback differed by
up to ten times between equal nodes. The rate of a matmul on the CPU is not compared.
"""


def can_test(node: NodeObserved) -> bool:
    """Return whether the node's agent is connected and has the command `RunBurnIn`."""
    return node.protocol_minor is not None and node.protocol_minor >= RunBurnIn.since_minor


def is_fit(record: BurnIn | None, node: NodeObserved, now: float) -> bool:
    """Return whether jobs may use a node: it has a result, cannot be tested, or its test takes too long."""
    if record is None or not can_test(node):
        return not can_test(node)
    return record.result is not None or now - record.ordered_at > BOOT_SECONDS


def renewed(record: BurnIn | None, now: float) -> BurnIn | None:
    """Return the record of a node that returns to service, whose earlier results no longer count."""
    return None if record is None else BurnIn(number=record.number + 1, level=BOOT_LEVEL, ordered_at=now)


def follow(
    record: BurnIn | None, node: NodeObserved, others: Sequence[BurnInResult], *, since: float, now: float
) -> BurnIn | None:
    """Return a spare's record with its agent's newest result, or with the next order if one is due.

    The node has been a spare since the Unix time `since`.
    """
    if record is None:
        return BurnIn(number=1, level=BOOT_LEVEL, ordered_at=now) if can_test(node) else None
    if record.is_pending and node.burn_in is not None and node.burn_in.number == record.number:
        record = replace(record, result=node.burn_in, ended_at=max(now, record.ordered_at))
    if record.result is None:
        return record
    newest = max((line.at for line in node.history), default=record.ended_at)
    if newest > record.ended_at:
        # If the clock has stepped back since the incident, the next result still counts as later than the incident.
        return renewed(record, max(now, newest))
    if record.is_pending:
        return record
    if slow_test(record.result, others) is not None:
        again = replace(record, number=record.number + 1, ordered_at=now, result=None)
        return replace(again, repeat_count=record.repeat_count + 1) if record.repeat_count < REPEAT_COUNT else record
    is_idle = record.level < IDLE_LEVEL and now - since >= IDLE_SECONDS
    if is_idle or now - record.ended_at >= RETEST_SECONDS:
        return replace(record, number=record.number + 1, level=IDLE_LEVEL, ordered_at=now, repeat_count=0)
    return record


def order(record: BurnIn | None, node: NodeObserved, *, since: float, now: float) -> RunBurnIn | None:
    """Return the command for a spare whose burn-in is pending, or None."""
    if record is None or not record.is_pending or node.member is not None or not can_test(node):
        return None
    if record.result is not None and now - since < IDLE_SECONDS:
        return None
    pair = record.pending_pair
    return RunBurnIn(number=record.number, level=record.level, partner=pair.partner if pair is not None else None)


def failure(record: BurnIn | None) -> NodeFault | None:
    """Return the fault of a node that failed a test by itself, or None."""
    tests = record.result.tests if record is not None and record.result is not None else ()
    failed = [test for test in tests if test.outcome is BurnInOutcome.FAILED]
    if not failed:
        return None
    text = "; ".join(f"{test.name}: {test.text}" for test in failed)
    return NodeFault(code=FaultCode.BURN_IN_FAILED, message=cut(text), is_permanent=False)


def slowness(record: BurnIn | None, others: Sequence[BurnInResult]) -> SlowNode | None:
    """Return the test in which a node is slow after `REPEAT_COUNT` repetitions, or None."""
    if record is None or record.result is None or record.is_pending or record.repeat_count < REPEAT_COUNT:
        return None
    return slow_test(record.result, others)


def best_rates(results: Iterable[BurnInResult]) -> Mapping[str, int]:
    """Return the highest rate in each test."""
    best: dict[str, int] = {}
    for test in (test for result in results for test in result.tests):
        best[test.name] = max(best.get(test.name, 0), test.rate or 0)
    return best


def may_be_slow(result: BurnInResult, best: Mapping[str, int]) -> bool:
    """Return whether `slow_test` can find a test. False for nearly all nodes, whose others then need no comparison."""
    return any(
        test.rate is not None and test.rate < (_share(test.name) or 0) * best.get(test.name, 0) for test in result.tests
    )


def slow_test(result: BurnInResult, others: Sequence[BurnInResult]) -> SlowNode | None:
    """Return the first test in which a node is much slower than other nodes of its fleet, or None."""
    for test in result.tests:
        share = _share(test.name)
        if share is None or test.rate is None:
            continue
        # One rate per node, its lowest: a node that reports many high rates would otherwise decide the median alone.
        rates = [
            min(rates)
            for other in others
            if (rates := [each.rate for each in other.tests if each.name == test.name and each.rate])
        ]
        if len(rates) >= LEAST_OTHERS and test.rate < share * (middle := median(rates)):
            return SlowNode(test=test.name, rate=test.rate, median_rate=int(middle), other_count=len(rates))
    return None


def _share(test: str) -> float | None:
    return SHARES.get(test.rstrip("0123456789").rstrip("-"))
