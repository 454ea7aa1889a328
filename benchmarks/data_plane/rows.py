"""Samples become figures, and figures verdicts: what was to be reached, and whether the run can say that it was. Pure.

Invariant: a verdict follows from the run alone. "inconclusive" is said of a figure whose floor moved, of a comparison with a peer that did not
behave as it is known to, and of what was not measured; nothing is repeated because of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from benchmarks.data_plane.samples import Measured
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Floor, bootstrap_interval, moved_ratio, percentile

EVERSTEP = "Everstep"
PEER_TOLERANCE_RATIO = 0.25
"""By how much a peer's figure may lie outside what is known of it, scaled by the floors."""
KNOWN_FLOORS = {"memcpy": 60.0, "one_way": 230.0, "both_ways": 460.0}
"""ms per GiB, on the machine where `KNOWN` was measured (torch 2.13.0, two ranks on 2 cores, one loopback)."""
KNOWN: Mapping[tuple[str, str], tuple[float, float, tuple[str, ...]]] = {
    ("lm-resiliency", "blocked"): (117, 120, ("memcpy",)),
    ("lm-resiliency", "commit"): (860, 970, ("memcpy", "one_way", "one_way")),  # its copy; then one thread of gloo moves both directions
    ("lm-resiliency", "restore_local"): (137, 273, ("memcpy",)),
    ("lm-resiliency", "restore_peer"): (590, 1403, ("one_way",)),
    ("DLRover flash checkpoint", "blocked"): (133, 163, ("memcpy",)),
    ("DLRover flash checkpoint", "restore_local"): (83, 125, ("memcpy",)),
    ("torchft in place", "restore_peer"): (318, 360, ("one_way",)),
    ("torchft HTTP", "restore_peer"): (262, 420, ("one_way",)),
    ("DCP async, thread", "blocked"): (117, 140, ("memcpy",)),
    ("DCP async, process", "blocked"): (106, 158, ("memcpy",)),
    ("torch.save", "blocked"): (2167, 2167, ("memcpy",)),
    ("torch.save", "restore_local"): (534, 821, ("memcpy",)),
}
"""Lowest and highest median that are known of a peer, ms per GiB, and the floors with whose sum they scale."""


class Verdict(StrEnum):
    """PASS: reached. SHORT: not reached. INCONCLUSIVE: the run cannot say. NONE: there is nothing to reach."""

    PASS = "pass"
    SHORT = "falls short"
    INCONCLUSIVE = "inconclusive"
    NONE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of `.everstep/bench/data_plane.json`."""

    system: str
    version: str
    metric: str
    state_mib: int
    value: float
    unit: str
    n: int
    low: float
    high: float
    verified: bool | None
    """By an independent compare of bytes; None where there is nothing to compare."""
    limit: float | None = None
    against: str = ""
    """What the limit is made of."""
    floor_moved_ratio: float | None = None
    verdict: Verdict = Verdict.NONE
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Of:
    """One system at one size, as it was measured."""

    system: str
    version: str
    state_mib: int
    measured: Measured
    floors: Mapping[str, Floor]
    """ms per GiB, from around the system's own launches."""

    def figure(
        self, metric: str, *, statistic: Callable[[Sequence[float]], float] = statistics.median, suffix: str = "", unit: str = "ms/GiB"
    ) -> Figure:
        """Return a figure without a verdict; the metric must have been measured."""
        values = self.measured.values[metric]
        low, high = bootstrap_interval(lambda samples: statistic(samples[0]), values)
        return Figure(
            system=self.system,
            version=self.version,
            metric=metric + suffix,
            state_mib=self.state_mib,
            value=statistic(values),
            unit=unit,
            n=len(values),
            low=low,
            high=high,
            verified=self.measured.verified.get(metric),
        )


def p99(values: Sequence[float]) -> float:
    """By nearest rank; of fewer than 100 values the worst."""
    return percentile(values, 0.99)


@dataclass(frozen=True, slots=True)
class Goal:
    """What Everstep must reach in one metric."""

    metric: str
    title: str
    factor: float
    _: KW_ONLY
    floors: tuple[str, ...] = ()
    """Their sum times the factor is the limit; none: the factor is the limit."""
    watched: tuple[str, ...] = ()
    """Floors that the figure depends on although the limit does not."""
    statistic: Callable[[Sequence[float]], float] = statistics.median
    suffix: str = ""
    unit: str = "ms/GiB"
    is_least: bool = False
    """The figure must not be below the limit."""
    peer: tuple[str, str] | None = None
    """The limit is a peer's figure of this metric instead."""


GOALS = (
    Goal("blocked", "training blocked per snapshot, p50", 5.0, suffix="_p50", watched=("memcpy",)),
    Goal("blocked", "training blocked per snapshot, p99", 20.0, suffix="_p99", watched=("memcpy",), statistic=p99),
    Goal("unblocked", "on steps without a snapshot, p50", 5.0, suffix="_p50", watched=("memcpy",)),
    Goal("unblocked", "on steps without a snapshot, p99", 20.0, suffix="_p99", watched=("memcpy",), statistic=p99),
    Goal("first_blocked", "first snapshot ÷ the other audited ones, blocked", 1.5, watched=("memcpy",), unit="ratio"),
    Goal("first_commit", "first snapshot ÷ the other audited ones, to the commit", 1.5, watched=("both_ways",), unit="ratio"),
    Goal(
        "commits", "commits ÷ steps, a snapshot at every step", 0.95, watched=("both_ways",), unit="ratio", is_least=True, statistic=statistics.fmean
    ),
    Goal("commit", "committed on both nodes, both directions at once", 1.35, floors=("both_ways", "digest")),
    Goal("commit", "the same, beside lm-resiliency", 1.0, suffix="_vs_peer", watched=("both_ways",), peer=("lm-resiliency", "commit")),
    Goal("restore_local", "restore from the own node's memory, from the rank's call", 1.3, floors=("memcpy",)),
    Goal("restore_local_all", "the same, what the agent verified before included", 1.3, floors=("memcpy", "digest")),
    Goal("fetch", "restore from the peer's memory, verified, into the own node's", 1.3, floors=("one_way", "digest")),
    Goal("restore_peer", "from the peer's memory into the model of a rank that waits, verified", 1.3, floors=("one_way", "digest")),
    Goal("restore_peer", "the same, beside torchft", 1.0, suffix="_vs_peer", watched=("one_way",), peer=("torchft in place", "restore_peer")),
    Goal("memory", "host memory per byte of state, two copies", 4.1, unit="bytes/byte"),
)


def judged(everstep: Of, peers: Mapping[str, Of]) -> list[Figure]:
    """Return Everstep's figures with their verdicts.

    Args:
        everstep: at one size.
        peers: the systems of the same size that were measured, by name.
    """
    figures = [_judge(goal, everstep, peers) for goal in GOALS]
    commits = everstep.measured.values.get("commits")
    if not commits:
        return figures
    told = f"commits ÷ steps {statistics.fmean(commits):.2f}"  # a snapshot that is seldom taken blocks seldom
    return [
        replace(each, reason=f"{told}; {each.reason}" if each.reason else told) if each.metric.startswith("blocked") else each for each in figures
    ]


def _judge(goal: Goal, everstep: Of, peers: Mapping[str, Of]) -> Figure:
    if goal.metric not in everstep.measured.values:
        return broken(everstep.system, everstep.version, goal.metric + goal.suffix, everstep.state_mib, "there is no sample of it")
    figure = everstep.figure(goal.metric, statistic=goal.statistic, suffix=goal.suffix, unit=goal.unit)
    moved = _moved(goal, everstep.floors)
    limit, against, reason = _limit(goal, everstep, peers)
    if limit is None:
        return _with(figure, moved, limit, against, Verdict.INCONCLUSIVE, reason)
    reached = figure.value >= limit if goal.is_least else figure.value <= limit
    if figure.verified is False:
        return _with(figure, moved, limit, against, Verdict.SHORT, "the bytes differ from the owner's")
    if moved is not None and moved > FLOOR_TOLERANCE_RATIO:
        return _with(figure, moved, limit, against, Verdict.INCONCLUSIVE, f"its floor moved by {moved:.0%} in the run")
    if reason:
        return _with(figure, moved, limit, against, Verdict.INCONCLUSIVE, reason)
    return _with(figure, moved, limit, against, Verdict.PASS if reached else Verdict.SHORT, "")


def _moved(goal: Goal, floors: Mapping[str, Floor]) -> float | None:
    """Return by how much the floor of a goal moved, that is the sum which its limit is made of, or any floor that is watched; None: there is none."""
    ratios = [floors[name].moved_ratio for name in goal.watched]
    if goal.floors:
        ratios.append(_moved_together([floors[name] for name in goal.floors]))
    return max(ratios, default=None)


def _moved_together(parts: Sequence[Floor]) -> float:
    """Return by how much the sum of floors moved."""
    return moved_ratio(sum(part.before.median for part in parts), sum(part.after.median for part in parts))


def _limit(goal: Goal, everstep: Of, peers: Mapping[str, Of]) -> tuple[float | None, str, str]:
    """Return the limit, what it is made of, and why it may not be held against anything."""
    if goal.peer is None:
        if not goal.floors:
            return goal.factor, "", ""
        total = sum(everstep.floors[name].median for name in goal.floors)
        return goal.factor * total, f"{goal.factor:g} × ({' + '.join(goal.floors)} = {total:.0f})", ""
    name, metric = goal.peer
    peer = peers.get(name)
    if peer is None or metric not in peer.measured.values:
        return None, name, f"{name} was not measured in this run"
    found = peer_figure(peer, metric)
    return found.value, f"{name}'s {found.value:.0f}", f"{name}: {found.reason}" if found.verdict is Verdict.INCONCLUSIVE else ""


def broken(system: str, version: str, metric: str, state_mib: int, reason: str) -> Figure:
    """Return the row of what could not be measured: Everstep falls short of it, of a peer nothing can be said."""
    return Figure(
        system=system,
        version=version,
        metric=metric,
        state_mib=state_mib,
        value=0.0,
        unit="",
        n=0,
        low=0.0,
        high=0.0,
        verified=None,
        verdict=Verdict.SHORT if system == EVERSTEP else Verdict.INCONCLUSIVE,
        reason=reason,
    )


def peer_figure(peer: Of, metric: str) -> Figure:
    """Return a peer's figure; inconclusive, and why, where it is not what is known of it."""
    figure = peer.figure(metric, unit="bytes/byte" if metric == "memory" else "ratio" if metric == "first_raw" else "ms/GiB")
    known = KNOWN.get((peer.system, metric))
    if known is None:
        return figure
    low, high, names = known
    parts = [peer.floors[name] for name in names]
    scale, moved = sum(part.median for part in parts) / sum(KNOWN_FLOORS[name] for name in names), _moved_together(parts)
    low, high = low * scale * (1 - PEER_TOLERANCE_RATIO), high * scale * (1 + PEER_TOLERANCE_RATIO)
    if moved > FLOOR_TOLERANCE_RATIO:
        return _with(figure, moved, None, "", Verdict.INCONCLUSIVE, f"its floor moved by {moved:.0%} in the run")
    if figure.verified is False:
        return _with(figure, moved, None, "", Verdict.INCONCLUSIVE, "the bytes differ from the owner's")
    if not low <= figure.value <= high:
        reason = f"{figure.value:.0f} where {low:.0f} to {high:.0f} is known of it, scaled by {' + '.join(names)}"
        return _with(figure, moved, None, "", Verdict.INCONCLUSIVE, reason)
    return _with(figure, moved, None, "", Verdict.NONE, "")


def _with(figure: Figure, moved: float | None, limit: float | None, against: str, verdict: Verdict, reason: str) -> Figure:
    return replace(figure, floor_moved_ratio=moved, limit=limit, against=against, verdict=verdict, reason=reason)
