"""Converts measured samples to table rows with verdicts. Pure.

A verdict is inconclusive if the row's floor changed, if the machine was busy, or if the compared system is missing or
outside its known range (`KNOWN`). No measurement is repeated because of its verdict.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from benchmarks.data_plane.samples import Measured
from benchmarks.measures import (
    FLOOR_TOLERANCE_RATIO,
    LEAST_COMMITS_RATIO,
    Summary,
    Verdict,
    bootstrap_interval,
    moved_ratio,
    percentile,
)
from benchmarks.rows import Row

EVERSTEP = "Everstep"
PEER_TOLERANCE_RATIO = 0.25
"""Accepted deviation from the range in `KNOWN`, scaled to this machine."""
KNOWN_FLOORS = {"memcpy": 60.0, "one_way": 230.0, "both_ways": 460.0}
"""ms per GiB on the machine of `KNOWN`: torch 2.13.0, two ranks on 2 cores, one loopback."""
# The lower bound of a commit of lm-resiliency is one copy and two transfers: its only gloo thread first sends this
# rank's state, and then receives the other rank's state. DCP async in a thread needs three times the state's memory:
# its own copy of the state, and two files that the benchmark's adapter keeps on tmpfs.
KNOWN: Mapping[tuple[str, str], tuple[float, float, tuple[str, ...]]] = {
    ("lm-resiliency", "blocked"): (117, 120, ("memcpy",)),
    ("lm-resiliency", "commit"): (
        860,
        970,
        ("memcpy", "one_way", "one_way"),
    ),
    ("lm-resiliency", "restore_local"): (137, 273, ("memcpy",)),
    ("lm-resiliency", "restore_peer"): (590, 1403, ("one_way",)),
    ("DLRover flash checkpoint", "blocked"): (133, 163, ("memcpy",)),
    ("DLRover flash checkpoint", "restore_local"): (125, 125, ("memcpy",)),
    ("torchft in place", "restore_peer"): (360, 360, ("one_way",)),
    ("torchft HTTP", "restore_peer"): (420, 420, ("one_way",)),
    ("DCP async, thread", "blocked"): (117, 140, ("memcpy",)),
    ("DCP async, process", "blocked"): (106, 158, ("memcpy",)),
    ("torch.save", "blocked"): (2167, 2167, ("memcpy",)),
    ("DCP async, thread", "restore_local"): (876, 876, ("memcpy",)),
    ("DCP async, process", "restore_local"): (876, 876, ("memcpy",)),
    # torch.load maps the file into memory, so a memcpy is the lower bound of the restore.
    ("torch.save", "restore_local"): (534, 534, ("memcpy",)),
    ("lm-resiliency", "memory"): (4.0, 4.0, ()),
    ("DLRover flash checkpoint", "memory"): (1.0, 1.0, ()),
    ("DCP async, thread", "memory"): (
        3.0,
        3.0,
        (),
    ),
    ("DCP async, process", "memory"): (3.0, 3.0, ()),
}
"""Lowest and highest median by compared system and metric, in the metric's unit, and the floors that scale them.
Without floors, a range is not scaled. A value far outside shows that the system did not work as its authors intend.
"""
EVERY_STEP = "snapshots ÷ steps 1.00"
"""Beside blocked times of a compared system, whose calls wait for the previous snapshot. Everstep may skip steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Row):
    """One metric of one system with one state size."""

    system: str
    version: str
    metric: str
    state_mib: int


@dataclass(frozen=True, slots=True)
class LaunchFloor:
    """Milliseconds per GiB of one floor, before and after every launch of a system."""

    launches: tuple[Summary, ...]
    """Summaries per launch, in order. At least one."""

    @property
    def median(self) -> float:
        """Mean of the launches' medians, in milliseconds per GiB."""
        return statistics.fmean(launch.median for launch in self.launches)


def moved_together(parts: Sequence[LaunchFloor]) -> float:
    """Return the relative difference between the lowest and the highest launch of the floors' summed medians.

    All parts have the same number of launches.
    """
    sums = [
        sum(launch.median for launch in launches) for launches in zip(*(part.launches for part in parts), strict=True)
    ]
    return moved_ratio(min(sums), max(sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class Of:
    """Measurements of one system with one state size, with the floors beside them."""

    system: str
    version: str
    state_mib: int
    measured: Measured
    floors: Mapping[str, LaunchFloor]

    def figure(
        self,
        metric: str,
        *,
        statistic: Callable[[Sequence[float]], float] = statistics.median,
        suffix: str = "",
        unit: str = "ms/GiB",
    ) -> Figure:
        """Return a metric as a row without limit and verdict."""
        values = self.measured.values[metric]
        low, high = bootstrap_interval(lambda samples: statistic(samples[0]), values)
        return Figure(
            system=self.system,
            version=self.version,
            metric=metric + suffix,
            what=f"{self.system}, {self.state_mib} MiB: {metric + suffix}",
            state_mib=self.state_mib,
            value=statistic(values),
            unit=unit,
            n=len(values),
            low=low,
            high=high,
            verified=self.measured.verified.get(metric),
        )


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile by nearest rank: the largest of fewer than 100 values."""
    return percentile(values, 0.99)


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit of Everstep's value of one metric."""

    metric: str
    title: str
    factor: float
    _: KW_ONLY
    floors: tuple[str, ...] = ()
    """`factor` times their summed medians is the limit. Empty: `factor` itself, in the metric's unit."""
    watched: tuple[str, ...] = ()
    """Floors that affect the value, but not the limit. If one changes, the row is inconclusive."""
    statistic: Callable[[Sequence[float]], float] = statistics.median
    suffix: str = ""
    unit: str = "ms/GiB"
    is_least: bool = False
    """Whether the limit is a minimum instead of a maximum."""
    peer: tuple[str, str] | None = None
    """Compared system and metric whose value is the limit, or None."""


GOALS = (
    Goal("blocked", "training blocked per snapshot, p50", 5.0, suffix="_p50", watched=("memcpy",)),
    Goal("blocked", "training blocked per snapshot, p99", 20.0, suffix="_p99", watched=("memcpy",), statistic=p99),
    Goal("unblocked", "on steps without a snapshot, p50", 5.0, suffix="_p50", watched=("memcpy",)),
    Goal("unblocked", "on steps without a snapshot, p99", 20.0, suffix="_p99", watched=("memcpy",), statistic=p99),
    Goal(
        "first_commit_audited",
        "first snapshot ÷ second and third, all three audited, to the commit",
        1.5,
        watched=("both_ways",),
        unit="ratio",
    ),
    Goal(
        "first_blocked",
        "first snapshot ÷ second and third, all three audited, blocked",
        1.5,
        watched=("memcpy",),
        unit="ratio",
    ),
    Goal(
        "commits",
        "commits ÷ steps, a snapshot at every step",
        LEAST_COMMITS_RATIO,
        watched=("both_ways",),
        unit="ratio",
        is_least=True,
        statistic=statistics.fmean,
    ),
    Goal("commit", "committed on both nodes, both directions at once", 1.35, floors=("both_ways", "digest")),
    Goal(
        "commit",
        "the same, beside lm-resiliency",
        1.0,
        suffix="_vs_peer",
        watched=("both_ways",),
        peer=("lm-resiliency", "commit"),
    ),
    Goal("restore_local", "restore from the own node's memory, from the rank's call", 1.3, floors=("memcpy",)),
    Goal("restore_local_all", "the same, what the agent verified before included", 1.3, floors=("memcpy", "digest")),
    Goal("fetch", "restore from the peer's memory, verified, into the own node's", 1.3, floors=("one_way", "digest")),
    Goal(
        "restore_peer",
        "from the peer's memory into the model of a rank that waits, verified",
        1.3,
        floors=("one_way", "digest"),
    ),
    Goal(
        "restore_peer",
        "the same, beside torchft",
        1.0,
        suffix="_vs_peer",
        watched=("one_way",),
        peer=("torchft in place", "restore_peer"),
    ),
    Goal("memory", "host memory per byte of state, two copies", 4.1, unit="bytes/byte"),
)


def judged(everstep: Of, peers: Mapping[str, Of]) -> list[Figure]:
    """Return Everstep's rows with verdicts. `peers` have the same state size."""
    figures = [_judge(goal, everstep, peers) for goal in GOALS]
    commits = everstep.measured.values.get("commits")
    if not commits:
        return figures
    return [_with_commits(each, statistics.fmean(commits)) if "blocked_p" in each.metric else each for each in figures]


def _with_commits(figure: Figure, commits: float) -> Figure:
    """Add commits ÷ steps to a figure of blocked times, because a job that takes few snapshots is rarely blocked."""
    told = f"commits ÷ steps {commits:.2f}"
    if figure.metric.startswith("blocked") and figure.verdict is Verdict.PASS and commits < LEAST_COMMITS_RATIO:
        return replace(figure, verdict=Verdict.SHORT, reason=f"{told}, {LEAST_COMMITS_RATIO} to reach")
    return replace(figure, reason=f"{told}; {figure.reason}" if figure.reason else told)


def shown(everstep: Of) -> list[Figure]:
    """Return Everstep's rows without a limit."""
    units = {"first_commit": "ratio", "first_raw": "ratio", "tight_commits": "ratio", "agent": "MiB"}
    metrics = (
        "blocked_audited",
        "first_commit",
        "first_raw",
        "blocked_tight",
        "tight_commits",
        "restore_peer_fetch",
        "restore_added",
        "agent",
    )
    figures = [
        everstep.figure(metric, unit=units.get(metric, "ms/GiB"))
        for metric in metrics
        if metric in everstep.measured.values
    ]
    tight = everstep.measured.values.get("tight_commits")
    return [
        _with_commits(each, statistics.fmean(tight)) if tight and each.metric == "blocked_tight" else each
        for each in figures
    ]


def _judge(goal: Goal, everstep: Of, peers: Mapping[str, Of]) -> Figure:
    if goal.metric not in everstep.measured.values:
        return broken(
            everstep.system, everstep.version, goal.metric + goal.suffix, everstep.state_mib, "there is no sample of it"
        )
    figure = everstep.figure(goal.metric, statistic=goal.statistic, suffix=goal.suffix, unit=goal.unit)
    moved = _moved(goal, everstep.floors)
    limit, against, doubt = _limit(goal, everstep, peers)
    figure = replace(figure, floor_moved_ratio=moved, limit=limit, against=against, is_least=goal.is_least)
    if limit is not None and figure.verified is False:
        return replace(figure, verdict=Verdict.SHORT, reason="the bytes differ from the owner's")
    if limit is not None and moved is not None and moved > FLOOR_TOLERANCE_RATIO:
        doubt = f"its floor moved by {moved:.0%} in the run"
    return figure.judged(doubt)


def _moved(goal: Goal, floors: Mapping[str, LaunchFloor]) -> float | None:
    """Return the largest difference between launches of `Goal.watched` and the sum of `Goal.floors`, or None."""
    ratios = [moved_together([floors[name]]) for name in goal.watched]
    if goal.floors:
        ratios.append(moved_together([floors[name] for name in goal.floors]))
    return max(ratios, default=None)


def _limit(goal: Goal, everstep: Of, peers: Mapping[str, Of]) -> tuple[float | None, str, str]:
    """Return a metric's limit (None if not measured), its source, and why it is unusable, or empty."""
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
    return (
        found.value,
        f"{name}'s {found.value:.0f}",
        f"{name}: {found.reason}" if found.verdict is Verdict.INCONCLUSIVE else "",
    )


def broken(system: str, version: str, metric: str, state_mib: int, reason: str) -> Figure:
    """Return the row of a failed measurement: a missed limit for Everstep, else inconclusive."""
    return Figure(
        system=system,
        version=version,
        metric=metric,
        what=f"{system}, {state_mib} MiB: {metric}",
        state_mib=state_mib,
        value=0.0,
        n=0,
        verdict=Verdict.SHORT if system == EVERSTEP else Verdict.INCONCLUSIVE,
        reason=reason,
    )


def peer_figure(peer: Of, metric: str) -> Figure:
    """Return a compared system's metric, inconclusive outside `KNOWN`."""
    figure = peer.figure(
        metric, unit="bytes/byte" if metric == "memory" else "ratio" if metric == "first_raw" else "ms/GiB"
    )
    if metric in ("blocked", "blocked_tight"):
        figure = replace(figure, reason=EVERY_STEP)
    told = f"{figure.reason}; " if figure.reason else ""
    known = KNOWN.get((peer.system, metric))
    if known is None:
        return figure
    low, high, names = known
    parts = [peer.floors[name] for name in names]
    scale = sum(part.median for part in parts) / sum(KNOWN_FLOORS[name] for name in names) if names else 1.0
    moved = moved_together(parts) if names else None
    low, high = low * scale * (1 - PEER_TOLERANCE_RATIO), high * scale * (1 + PEER_TOLERANCE_RATIO)
    figure = replace(figure, floor_moved_ratio=moved)
    if moved is not None and moved > FLOOR_TOLERANCE_RATIO:
        return figure.judged(f"{told}its floor moved by {moved:.0%} in the run")
    if figure.verified is False:
        return figure.judged(f"{told}the bytes differ from the owner's")
    if not low <= figure.value <= high:
        by, digits = (f", scaled by {' + '.join(names)}", 0) if names else ("", 2)
        reason = f"{told}{figure.value:.{digits}f} where {low:.{digits}f} to {high:.{digits}f} is known of it{by}"
        return figure.judged(reason)
    return figure
