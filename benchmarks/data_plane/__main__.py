"""`make bench-data-plane`: all launches in one run, there and back again, then the report.

    python -m benchmarks.data_plane [--quick] [--sizes 256 1024] [--peers NAME …] [--without-model]

    size by size:  floors A floors B floors … Z floors │ floors Z floors … B floors A floors

Every system is launched twice in a palindrome, the floors before and after each launch, and before each of Everstep's restores: drift of the
machine falls on both sides of a pair.
Exit code: 0 all rows pass or are inconclusive, 1 nothing to report, 2 a row falls short.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster_jobs import ROOT, Bench
from benchmarks.data_plane import char_gpt, report
from benchmarks.data_plane.everstep import NODES, EverstepLaunch, run_everstep
from benchmarks.data_plane.launches import FloorPair, run_peer
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.data_plane.rows import EVERSTEP, Figure, Of, Verdict, broken, judged, peer_figure
from benchmarks.data_plane.samples import of_everstep, of_peer, per_gib
from benchmarks.data_plane.systems import PEERS, System, install
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import Machine
from benchmarks.measures import Floor, Summary
from everstep import __version__, failures
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import ClusterOptions, LocalCluster

HOME = ROOT / ".everstep" / "bench"
SPAN_SECONDS_PER_GIB, SPAN_SECONDS = 1.0, 0.15
"""Long spans: beside the optimizer's step long enough for a snapshot to be replicated."""
TIGHT_SECONDS_PER_GIB, TIGHT_SECONDS = 0.15, 0.02
"""Short spans: twice the copy."""
OWN_METRICS = ("blocked_audited", "blocked_tight", "restore_peer_fetch", "restore_added")
"""Shown, with nothing to reach."""
LAUNCH_SECONDS = 150.0
MODEL_STEPS = 40
LARGE_STATE_MIB = 512
LARGE_PEERS = ("lm-resiliency", "DLRover flash checkpoint", "torchft in place")
"""Of a large state only the peers that Everstep is held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is measured of one size of state."""

    state_mib: int
    peers: tuple[System, ...]
    everstep: Repeats
    peer: Repeats


def sizes_of(sizes_mib: list[int], peers: tuple[System, ...], *, is_quick: bool) -> list[Size]:
    """Return what is measured of each size."""

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
        # Two ranks in two launches: 100 snapshots for a p99. Ranks restore from their own node beside every restore from a peer, too.
        full = repeats(state_mib, spaced=26, tight=12, local_restores=3, others=5)
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


def main() -> int:
    """Measure, write the report, and return the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_plane", description="Everstep's data plane beside its peers and the floors.")
    parser.add_argument("--quick", action="store_true", help="256 MiB, few repeats, no peers, no real model: it tries the harness")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="MiB of state per rank")
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS], help="only these")
    parser.add_argument("--without-model", action="store_true", help="leave the char-GPT out")
    parser.add_argument("--json", type=Path, default=HOME / "data_plane.json", help="where the figures go")
    parser.add_argument(
        "--document", type=Path, help="whose section is renewed, with a picture beside it; docs/benchmarks.md, or with --quick a draft"
    )
    arguments = parser.parse_args()
    peers = tuple(peer for peer in PEERS if arguments.peers is None or peer.name in arguments.peers)
    sizes = sizes_of([256], (), is_quick=True) if arguments.quick else sizes_of(arguments.sizes, peers, is_quick=False)
    has_model = not (arguments.quick or arguments.without_model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a terminated run ends its cluster, too
    machine, begun = Machine.observe(), time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    document = arguments.document or (HOME / "data_plane_quick.md" if arguments.quick else ROOT / "docs" / "benchmarks.md")
    home = HOME / "data_plane"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    try:
        install(tuple({peer for size in sizes for peer in size.peers}), HOME / "venvs", say)
        figures, floors = measure(home, sizes, has_model=has_model, say=say)
    except (BenchmarkFailed, LocalCloudError, EverstepError, OSError) as error:
        print(f"the benchmark failed: {error}\nlogs: {home}", file=sys.stderr)
        return 1
    run = report.Run(machine=machine, figures=figures, floors=floors, is_quick=arguments.quick, seconds=time.monotonic() - begun)
    report.write(run, arguments.json, document)
    say(f"written: {arguments.json} and {document}")
    for figure in figures:
        if figure.verdict is not Verdict.NONE:
            print(report.line(figure))
    return 2 if any(figure.verdict is Verdict.SHORT for figure in figures) else 0


def measure(home: Path, sizes: list[Size], *, has_model: bool, say: Callable[[str], None]) -> tuple[list[Figure], report.Floors]:
    """Run every launch and return all figures, and the floors of every size."""
    figures: list[Figure] = []
    floors: report.Floors = {}
    for size in sizes:
        with _bench(home, size.state_mib, say) as bench:
            found, floors[size.state_mib] = _measure_size(bench, size)
        figures += found
    if has_model:
        with _bench(home, 64, say) as bench:
            versions = {EVERSTEP: __version__, "lm-resiliency": _version("lm-resiliency")}
            has_peer = any(peer.name == "lm-resiliency" for size in sizes for peer in size.peers)
            for kind in char_gpt.KINDS:
                try:
                    launches = char_gpt.measure(bench, HOME / "venvs", kind, steps=MODEL_STEPS, with_peer=has_peer)
                except BenchmarkFailed as error:
                    figures.append(broken(EVERSTEP, __version__, f"char_gpt_{kind}_slowdown", 0, str(error)))
                else:
                    figures += char_gpt.figures(kind, launches, versions)
    return figures, floors


@contextlib.contextmanager
def _bench(home: Path, state_mib: int, say: Callable[[str], None]) -> Iterator[Bench]:
    """Start a cluster of two nodes with room for two copies of such a state."""
    slots_bytes = 4 * state_mib * 1024**2 * 5 // 4 + 64 * 1024**2
    say(f"starting {NODES} nodes for {state_mib} MiB of state per rank")
    with LocalCluster(home / "cluster") as cluster:
        cluster.up(ClusterOptions(nodes=NODES, spares=0, node_memory_bytes=slots_bytes))
        with contextlib.closing(cluster.client()) as client, failures.translated():
            bench = Bench(cluster, client, home, say)
            bench.wait_until_warm(NODES)
            yield bench


def _measure_size(bench: Bench, size: Size) -> tuple[list[Figure], dict[str, Floor]]:
    names = [EVERSTEP, *(peer.name for peer in size.peers)]
    systems = {peer.name: peer for peer in size.peers}
    launches: dict[str, list[Any]] = {name: [] for name in names}
    floors: dict[str, list[list[report.Seconds]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    state_bytes = size.state_mib * 1024**2
    with FloorPair(bench.directory / f"floors-{size.state_mib}", size.state_mib) as pair:
        before = pair.measure()
        for number, name in enumerate([*names, *reversed(names)]):
            bench.say(f"{size.state_mib} MiB: {name}, launch {number // len(names) + 1} of 2")
            home = bench.directory / f"{size.state_mib}-{number}"
            around = [before]

            def beside(found: list[report.Seconds] = around) -> None:
                found.append(pair.measure(rounds=1))

            try:
                launches[name].append(_launch(bench, home, systems.get(name), size, beside))
            except BenchmarkFailed as error:  # the others are measured all the same
                failed[name] = str(error)
                bench.say(f"  {error}")
            before = pair.measure()
            floors[name].append([*around, before])
    versions = {EVERSTEP: __version__, **{peer.name: peer.version(HOME / "venvs") for peer in size.peers}}
    figures = [broken(name, versions[name], "launches", size.state_mib, reason) for name, reason in failed.items()]
    of: dict[str, Of] = {}
    for name in (name for name in names if launches[name]):
        measured = of_everstep(launches[name]) if name == EVERSTEP else of_peer(launches[name], systems[name].metrics)
        of[name] = Of(system=name, version=versions[name], state_mib=size.state_mib, measured=measured, floors=floors_of(floors[name], state_bytes))
    if (own := of.pop(EVERSTEP, None)) is not None:
        figures += judged(own, of)
        figures += [own.figure(metric) for metric in OWN_METRICS if metric in own.measured.values]
        figures += [own.figure(metric, unit="ratio") for metric in ("first_raw", "tight_commits") if metric in own.measured.values]
    figures += [peer_figure(peer, metric) for peer in of.values() for metric in peer.measured.values]
    return figures, floors_of(floors[EVERSTEP], state_bytes)


def _launch(bench: Bench, home: Path, peer: System | None, size: Size, beside: Callable[[], None]) -> EverstepLaunch | list[dict[str, Any]]:
    if peer is None:
        return run_everstep(bench, f"data-plane-{home.name}", state_mib=size.state_mib, repeats=size.everstep, beside=beside)
    try:
        return run_peer(peer, HOME / "venvs", home, state_mib=size.state_mib, repeats=size.peer, timeout_seconds=LAUNCH_SECONDS)
    except BenchmarkFailed as error:  # DLRover's saver does not always come up
        bench.say(f"  once more: {error}")
        return run_peer(
            peer, HOME / "venvs", home.with_name(f"{home.name}-again"), state_mib=size.state_mib, repeats=size.peer, timeout_seconds=LAUNCH_SECONDS
        )


def floors_of(launches: list[list[report.Seconds]], state_bytes: int) -> dict[str, Floor]:
    """Return the floors of a system: those of its first launch against those of its last; of a single one, the earlier against the later.

    Args:
        launches: of each, what was measured, in order.
        state_bytes: that every floor moved.
    """
    earlier, later = launches[0], launches[-1]
    if len(launches) == 1:
        earlier, later = earlier[: len(earlier) // 2], later[len(later) // 2 :]

    def summary(name: str, measured: list[report.Seconds]) -> Summary:
        return Summary.of([per_gib(seconds, state_bytes) for once in measured for seconds in once[name]])

    return {name: Floor(summary(name, earlier), summary(name, later)) for name in earlier[0]}


def _version(name: str) -> str:
    return next(peer for peer in PEERS if peer.name == name).version(HOME / "venvs")


if __name__ == "__main__":
    sys.exit(main())
