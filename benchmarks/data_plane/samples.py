"""Computes the metrics below from the samples of all launches. Times are in ms per GiB of a rank's state. Pure.

blocked               blocked time of the training thread per snapshot, long spans
blocked_tight         blocked time of the training thread per snapshot, spans of twice a copy's duration
unblocked             blocked time of a step without a snapshot
commits               committed steps ÷ steps, long spans
first_commit          time to commit of the first snapshot ÷ time to commit of later snapshots without an audit
first_commit_audited  time to commit of the first snapshot ÷ time to commit of the other audited snapshots
first_blocked         blocked time of the first snapshot ÷ blocked time of the other audited snapshots
first_raw             blocked time of the first snapshot ÷ blocked time of snapshots without an audit
commit                time until both nodes hold both ranks' snapshots
restore_local         time from the rank's call of restore, from the memory of the rank's node
restore_local_all     restore_local and the agent's verification before it
fetch                 time to copy the state from the other node's memory and verify it
restore_peer          time from the start of the fetch until the model of a waiting rank has the state
restore_peer_fetch    the part of restore_peer until all bytes were verified on the rank's node
restore_added         fetch, then restore of a rank that starts afterwards
memory                bytes of host memory per byte of state
agent                 MiB of an idle agent, which `memory` excludes
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.data_plane.everstep import EverstepLaunch

GIB = 1024**3
AUDITED_COUNT = 3
"""Snapshots of a launch that Everstep audits. A test compares it with `everstep.training.guard.AUDITED_AT_START`, whose
import would load torch.
"""


@dataclass(slots=True)
class Measured:
    """Measured values of one system with one state size."""

    values: dict[str, list[float]] = field(default_factory=dict)
    verified: dict[str, bool] = field(default_factory=dict)

    def add(self, metric: str, values: Sequence[float]) -> None:
        """Add the values of one more launch."""
        if values:
            self.values.setdefault(metric, []).extend(values)

    def verify(self, metric: str, is_equal: bool) -> None:
        """Record whether one more measurement had the correct bytes."""
        self.verified[metric] = self.verified.get(metric, True) and is_equal


def per_gib(seconds: float, state_bytes: int) -> float:
    """Return milliseconds per GiB."""
    return 1000 * seconds * GIB / state_bytes


def of_everstep(launches: Sequence[EverstepLaunch]) -> Measured:
    """Return the measured values of Everstep's launches."""
    found = Measured()
    for launch in launches:
        for rank in launch.ranks:
            _add_rank(found, rank)
        size = launch.ranks[0]["state_bytes"]
        for each in launch.restored:
            # Every restore counts as local here: the rank always reads from its own node's memory, even if the agent
            # has fetched the state from a peer before.
            found.add("restore_local", [per_gib(each.rank_seconds, size)])
            found.verify("restore_local", each.verified)
            whole = per_gib(each.agent_seconds + each.rank_seconds, size)
            if each.source == "peer":
                found.add("fetch", [per_gib(each.agent_seconds, size)])
                found.add("restore_added", [whole])
                found.verify("fetch", each.verified)
                found.verify("restore_added", each.verified)
            else:
                found.add("restore_local_all", [whole])
                found.verify("restore_local_all", each.verified)
        for arrival in launch.arrived:
            found.add("restore_peer", [per_gib(arrival.model_seconds, size)])
            found.add("restore_peer_fetch", [per_gib(arrival.fetch_seconds, size)])
            found.verify("restore_peer", arrival.verified)
        found.add("memory", [launch.memory_ratio])
        found.add("agent", [launch.agent_bytes / 1024**2])
    return found


def _add_rank(found: Measured, rank: Mapping[str, Any]) -> None:
    size = rank["state_bytes"]
    first, spaced, tight = rank["first"], rank["spaced"], rank["tight"]

    def scaled(steps: Mapping[str, Any], has_snapshot: bool) -> list[float]:
        return [
            per_gib(blocked, size)
            for blocked, is_snapshot in zip(steps["blocked"], steps["has_snapshot"], strict=True)
            if is_snapshot is has_snapshot
        ]

    audited = scaled(first, True)
    found.add("blocked", [*audited[AUDITED_COUNT:], *scaled(spaced, True)])
    found.add("blocked_audited", audited[:AUDITED_COUNT])
    found.add("blocked_tight", scaled(tight, True))
    found.add("unblocked", [*scaled(first, False), *scaled(spaced, False), *scaled(tight, False)])
    commits = snapshots_commit_seconds(first)
    later = [*(each for each in commits[AUDITED_COUNT:] if each is not None), *commit_seconds(spaced)]
    found.add("commit", [per_gib(seconds, size) for seconds in commit_seconds(spaced)])
    found.add("commits", [sum(at is not None for at in spaced["committed_at"]) / len(spaced["numbers"])])
    found.add("tight_commits", [sum(at is not None for at in tight["committed_at"]) / len(tight["numbers"])])
    if len(audited) >= AUDITED_COUNT:
        found.add("first_blocked", [audited[0] / statistics.median(audited[1:AUDITED_COUNT])])
        found.add("first_raw", [audited[0] / statistics.median(scaled(spaced, True))])
    if commits and commits[0] is not None:
        audited_commits = [each for each in commits[1:AUDITED_COUNT] if each is not None]
        for metric, others in (("first_commit", later), ("first_commit_audited", audited_commits)):
            found.add(metric, [commits[0] / statistics.median(others)] if others else [])
    # If the holder's copy differs from the rank's bytes, the times until commits and the blocked times are invalid.
    for metric in ("commit", "blocked"):
        found.verify(metric, rank["holder_verified"])


def commit_seconds(steps: Mapping[str, Any]) -> list[float]:
    """Return the seconds from each boundary call to the commit."""
    return [at - began for began, at in zip(steps["began_at"], steps["committed_at"], strict=True) if at is not None]


def snapshots_commit_seconds(steps: Mapping[str, Any]) -> list[float | None]:
    """Return the seconds from the end of each step with a snapshot to its commit, or None."""
    rows = zip(steps["has_snapshot"], steps["began_at"], steps["committed_at"], strict=True)
    return [None if at is None else at - began for has_snapshot, began, at in rows if has_snapshot]


def of_peer(launches: Sequence[Sequence[Mapping[str, Any]]], offers: Sequence[str]) -> Measured:
    """Return a compared system's values of the metrics in `offers`, from both ranks' `loop.Samples` of each launch."""
    found = Measured()
    names: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
        "blocked": lambda rank: rank["blocked"],
        "blocked_tight": lambda rank: rank["tight_blocked"],
        "commit": lambda rank: rank["protect"],
        "restore_local": lambda rank: rank["restore_local"],
        "restore_peer": lambda rank: rank["restore_peer"],
    }
    for ranks in launches:
        for rank in ranks:
            size = rank["state_bytes"]
            for metric, values in names.items():
                found.add(metric, [per_gib(seconds, size) for seconds in values(rank)])
            if rank["blocked"]:
                found.add("first_raw", [rank["first_blocked"] / statistics.median(rank["blocked"])])
            for name, is_equal in rank["verified"].items():
                found.verify({"protect": "commit"}.get(name, name), is_equal)
        if "memory" in offers:
            private = sum(rank["private_after_bytes"] - rank["private_before_bytes"] for rank in ranks)
            shared = max(rank["tmpfs_after_bytes"] for rank in ranks) - min(
                rank["tmpfs_before_bytes"] for rank in ranks
            )
            found.add("memory", [(private + shared) / sum(rank["state_bytes"] for rank in ranks)])
    return found
