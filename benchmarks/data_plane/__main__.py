"""Command of the data plane benchmark: `make bench-data-plane`.

    python -m benchmarks.data_plane [--quick] [--only systems tls] [--sizes 256 1024] [--peers NAME …] [--without-model]

    per size: floors A floors B floors C … Z floors │ A floors B floors C floors │ Z floors … C floors B floors A floors

Every system A to Z is launched once in this order and once in reverse, so that a drift of the machine's speed affects
all equally. In between, Everstep and its main compared systems are launched once more. Floors are also measured before
each of Everstep's restores.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.cluster_jobs import Bench, started_bench
from benchmarks.command import HOME, Begun
from benchmarks.data_plane import char_gpt, encryption, report
from benchmarks.data_plane.everstep import NODES, EverstepLaunch, run_everstep
from benchmarks.data_plane.launches import FloorPair, run_peer
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.data_plane.rows import (
    EVERSTEP,
    GOALS,
    Figure,
    LaunchFloor,
    Of,
    broken,
    judged,
    peer_figure,
    shown,
)
from benchmarks.data_plane.samples import of_everstep, of_peer, per_gib
from benchmarks.data_plane.systems import PEERS, System, install
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Summary
from everstep import __version__
from infra.local_cloud.up import ClusterOptions

SPAN_SECONDS_PER_GIB, SPAN_SECONDS = 1.0, 0.15
"""Long span per GiB of state, and a constant part. It replaces forward and backward, and suffices to copy a snapshot.
"""
TIGHT_SECONDS_PER_GIB, TIGHT_SECONDS = 0.15, 0.02
"""Short span per GiB of state, and a constant part: about twice the time of copying the state once."""
LAUNCH_SECONDS = 150.0
PARTS = ("systems", "tls")
"""Choices of `--only`: all systems, or the cost of TLS between nodes."""
LARGE_STATE_MIB = 512
HELD_AGAINST = tuple(dict.fromkeys(goal.peer[0] for goal in GOALS if goal.peer is not None))
LARGE_PEERS = (*HELD_AGAINST, "DLRover flash checkpoint")
"""Systems that a large state measures as well: those of `GOALS`, and DLRover, whose local restore is the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A state size, with the repetitions of each measurement."""

    state_mib: int
    peers: tuple[System, ...]
    everstep: Repeats
    peer: Repeats


def sizes_of(sizes_mib: list[int], peers: tuple[System, ...], *, is_quick: bool) -> list[Size]:
    """Return one `Size` per state size."""

    def repeats(state_mib: int, *, spaced: int, tight: int, local_restores: int, others: int) -> Repeats:
        gib = state_mib / 1024
        return Repeats(
            spaced_steps=spaced,
            tight_steps=tight,
            protects=others,
            local_restores=local_restores,
            peer_restores=others,
            span_seconds=SPAN_SECONDS_PER_GIB * gib + SPAN_SECONDS,
            tight_span_seconds=TIGHT_SECONDS_PER_GIB * gib + TIGHT_SECONDS,
        )

    def everstep(state_mib: int) -> Repeats:
        # Train `spaced` steps with a long forward and backward, and `tight` steps with a short one. Two ranks in three
        # launches take at least 100 snapshots in the `spaced` steps, enough for a 99th percentile. In `tight` steps,
        # Everstep takes a snapshot at every third step only. A small state gets more steps, because its slowest
        # snapshot varies most.
        spaced, tight = (18, 8) if state_mib >= LARGE_STATE_MIB else (48, 64)
        full = repeats(state_mib, spaced=spaced, tight=tight, local_restores=2, others=4)
        return repeats(state_mib, spaced=8, tight=10, local_restores=2, others=2) if is_quick else full

    return [
        Size(
            state_mib=mib,
            peers=tuple(peer for peer in peers if mib < LARGE_STATE_MIB or peer.name in LARGE_PEERS),
            everstep=everstep(mib),
            peer=repeats(mib, spaced=5, tight=3, local_restores=5, others=5),
        )
        for mib in sizes_mib
    ]


def order_of(names: Sequence[str], thrice: Collection[str]) -> list[str]:
    """Return the order of launches: all systems, those in `thrice`, and all systems in reverse."""
    return [*names, *(name for name in names if name in thrice), *reversed(names)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="MiB of state per rank")
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS], help="compare these systems only")
    parser.add_argument("--without-model", action="store_true", help="leave the char-GPT out")


def measure(begun: Begun) -> dict[str, Any]:
    """Launch every system with every state size. Return all measured values and floors."""
    found: dict[str, Any] = {"figures": [], "floors": {}, "encryption": ()}
    if "tls" in begun.parts:
        begun.say("one stream, plain and with TLS")
        found["encryption"] = encryption.measure(rounds=1 if begun.is_quick else encryption.ROUNDS)
    return {**found, **_measure_systems(begun)} if "systems" in begun.parts else found


def _measure_systems(begun: Begun) -> dict[str, Any]:
    arguments, home = begun.arguments, begun.home
    peers = tuple(peer for peer in PEERS if arguments.peers is None or peer.name in arguments.peers)
    sizes = sizes_of([256], (), is_quick=True) if begun.is_quick else sizes_of(arguments.sizes, peers, is_quick=False)
    install(tuple({peer for size in sizes for peer in size.peers}), HOME / "venvs", begun.say)
    figures: list[Figure] = []
    floors: report.Floors = {}
    for size in sizes:
        with _bench(home, size.state_mib, begun.say) as bench:
            found, floors[size.state_mib] = _measure_size(bench, size)
        figures += found
    if not (begun.is_quick or arguments.without_model):
        with _bench(home, 64, begun.say) as bench:
            versions = {EVERSTEP: __version__, "lm-resiliency": _version("lm-resiliency")}
            has_peer = any(peer.name == "lm-resiliency" for size in sizes for peer in size.peers)
            for kind in char_gpt.KINDS:
                try:
                    launches = char_gpt.measure(bench, HOME / "venvs", kind, with_peer=has_peer)
                except BenchmarkFailed as error:
                    figures.append(broken(EVERSTEP, __version__, f"char_gpt_{kind}_slowdown", 0, str(error)))
                else:
                    figures += char_gpt.figures(kind, launches, versions)
    return {"figures": figures, "floors": floors}


@contextlib.contextmanager
def _bench(home: Path, state_mib: int, say: Callable[[str], None]) -> Iterator[Bench]:
    """Start a local cluster of two nodes, each with memory for its own rank's state and a copy of the other's."""
    slots_bytes = 4 * state_mib * 1024**2 * 5 // 4 + 64 * 1024**2
    with started_bench(home, say, ClusterOptions(nodes=NODES, spares=0, node_memory_bytes=slots_bytes)) as bench:
        bench.wait_until_warm(NODES)
        yield bench


def _measure_size(bench: Bench, size: Size) -> tuple[list[Figure], dict[str, LaunchFloor]]:
    names = [EVERSTEP, *(peer.name for peer in size.peers)]
    systems = {peer.name: peer for peer in size.peers}
    launches: dict[str, list[Any]] = {name: [] for name in names}
    floors: dict[str, list[list[report.Seconds]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    state_bytes = size.state_mib * 1024**2
    with FloorPair(bench.directory / f"floors-{size.state_mib}", size.state_mib) as pair:
        before = pair.measure()
        order = order_of(names, (EVERSTEP, *HELD_AGAINST))
        for number, name in enumerate(order):
            bench.say(f"{size.state_mib} MiB: {name}, launch {order[: number + 1].count(name)} of {order.count(name)}")
            home = bench.directory / f"{size.state_mib}-{number}"
            around = [before]

            def beside(found: list[report.Seconds] = around) -> None:
                found.append(pair.measure(rounds=1))

            try:
                launches[name].append(_launch(bench, home, systems.get(name), size, beside))
            except BenchmarkFailed as error:
                failed[name] = str(error)
                bench.say(f"  {error}")
            before = pair.measure()
            floors[name].append([*around, before])
    versions = {EVERSTEP: __version__, **{peer.name: peer.version(HOME / "venvs") for peer in size.peers}}
    figures = [broken(name, versions[name], "launches", size.state_mib, reason) for name, reason in failed.items()]
    of: dict[str, Of] = {}
    for name in (name for name in names if launches[name]):
        measured = of_everstep(launches[name]) if name == EVERSTEP else of_peer(launches[name], systems[name].metrics)
        of[name] = Of(
            system=name,
            version=versions[name],
            state_mib=size.state_mib,
            measured=measured,
            floors=floors_of(floors[name], state_bytes),
        )
    if (own := of.pop(EVERSTEP, None)) is not None:
        figures += judged(own, of)
        figures += shown(own)
    figures += [peer_figure(peer, metric) for peer in of.values() for metric in peer.measured.values]
    return figures, floors_of(floors[EVERSTEP], state_bytes)


def _launch(
    bench: Bench, home: Path, peer: System | None, size: Size, beside: Callable[[], None]
) -> EverstepLaunch | list[dict[str, Any]]:
    if peer is None:
        return run_everstep(
            bench, f"data-plane-{home.name}", state_mib=size.state_mib, repeats=size.everstep, beside=beside
        )
    try:
        return run_peer(
            peer, HOME / "venvs", home, state_mib=size.state_mib, repeats=size.peer, timeout_seconds=LAUNCH_SECONDS
        )
    # Try again, because DLRover's saver process sometimes fails to start.
    except BenchmarkFailed as error:
        bench.say(f"  retrying once: {error}")
        return run_peer(
            peer,
            HOME / "venvs",
            home.with_name(f"{home.name}-again"),
            state_mib=size.state_mib,
            repeats=size.peer,
            timeout_seconds=LAUNCH_SECONDS,
        )


def floors_of(launches: list[list[report.Seconds]], state_bytes: int) -> dict[str, LaunchFloor]:
    """Return the floors of one system's launches.

    A single launch is split into halves, to show whether they changed.
    """
    if len(launches) == 1:
        (alone,) = launches
        launches = [alone[: len(alone) // 2], alone[len(alone) // 2 :]]

    def summary(name: str, measured: list[report.Seconds]) -> Summary:
        return Summary.of([per_gib(seconds, state_bytes) for once in measured for seconds in once[name]])

    return {name: LaunchFloor(tuple(summary(name, launch) for launch in launches)) for name in launches[0][0]}


def _version(name: str) -> str:
    return next(peer for peer in PEERS if peer.name == name).version(HOME / "venvs")


if __name__ == "__main__":
    sys.exit(command.run(report.PAGE, measure, parts=PARTS, options=options))
