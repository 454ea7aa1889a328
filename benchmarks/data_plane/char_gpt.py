"""What keeping every step costs a real model: the char-GPT with DDP and ZeRO-3, kept by nobody, by Everstep and by lm-resiliency, alternated."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.cluster_jobs import EVERY_STEP, ROOT, Bench, Json
from benchmarks.data_plane.everstep import agents_of
from benchmarks.data_plane.launches import RANKS, run_ranks
from benchmarks.data_plane.rows import EVERSTEP, Figure
from benchmarks.data_plane.systems import PEERS
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, LEAST_COMMITS_RATIO, Verdict, bootstrap_interval, moved_ratio

SCRIPT = Path(__file__).parent / "rank" / "char_gpt.py"
EXAMPLE = ROOT / "examples" / "char_gpt"
KINDS = {"ddp": "DDP", "zero3": "ZeRO-3"}
NOBODY, LM_RESILIENCY = "none", "lm_resiliency"
WARM_UP_STEPS = 60
"""In which the network is profiled and, mostly, pacing is tried (`worker.core.pacing_trial`)."""
GIB = 1024**3


@dataclass(slots=True)
class Launches:
    """All launches of one system with one kind of model."""

    step_seconds: list[list[float]] = field(default_factory=list)
    """Of rank 0, launch by launch."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all ranks and agents per step, launch by launch."""
    commits_ratio: list[float] = field(default_factory=list)
    state_bytes: int = 0
    """Of all ranks together."""
    verified: bool | None = None
    """By compares of bytes on the holders, one of each rank and launch; None: nothing was compared."""

    def add(self, ranks: Sequence[Json]) -> None:
        """Take one launch."""
        steps = ranks[0]["step_seconds"]
        self.step_seconds.append(steps)
        self.cpu_seconds.append(sum(rank["cpu_seconds"] for rank in ranks) / len(steps))
        self.commits_ratio.append(min(rank["commits"] for rank in ranks) / len(steps))
        if compared := [rank["verified"] for rank in ranks if rank["verified"] is not None]:
            self.verified = self.verified is not False and all(compared)
        self.state_bytes = sum(rank["state_bytes"] for rank in ranks)

    @property
    def pooled(self) -> list[float]:
        """All steps of all launches."""
        return [seconds for launch in self.step_seconds for seconds in launch]


def measure(bench: Bench, environments: Path, kind: str, *, steps: int, with_peer: bool, order: str = "NELNELLEN") -> dict[str, Launches]:
    """Launch a model `len(order)` times.

    Args:
        bench: where Everstep's jobs run.
        environments: of the peers.
        kind: ddp or zero3.
        steps: of each launch, warm-up included.
        with_peer: lm-resiliency, too.
        order: N nobody, E Everstep, L lm-resiliency.

    Returns:
        By system: none, everstep, lm_resiliency.

    Raises:
        BenchmarkFailed: a launch ended otherwise; one of the peer's is left out.
    """
    found: dict[str, Launches] = {}
    systems = {"N": NOBODY, "E": "everstep", "L": LM_RESILIENCY}
    for number, letter in enumerate(order):
        system = systems[letter]
        if system == LM_RESILIENCY and not with_peer:
            continue
        directory = bench.directory / f"char-gpt-{kind}-{number}-{system}"
        directory.mkdir(parents=True)
        parameters = {"system": system, "kind": kind, "steps": steps, "warm_up": WARM_UP_STEPS}
        try:
            ranks = _job(bench, directory, parameters) if letter == "E" else _alone(environments, directory, parameters)
        except BenchmarkFailed as error:
            if system != LM_RESILIENCY:
                raise
            bench.say(f"  {error}")  # reported as not measured
            continue
        found.setdefault(system, Launches()).add(ranks)
        bench.say(f"char-GPT, {KINDS[kind]}, {system}: {1000 * statistics.median(found[system].step_seconds[-1]):.1f} ms a step")
    return found


def _job(bench: Bench, directory: Path, parameters: Mapping[str, object]) -> list[Json]:
    source = directory / "source"
    source.mkdir()
    shutil.copy(SCRIPT, source / "train.py")
    agents = " ".join(str(pid) for pid in agents_of(bench))
    environment = {"BENCH_DIRECTORY": str(directory), "BENCH_EXAMPLE": str(EXAMPLE), "BENCH_AGENTS": agents}
    job = bench.submit(
        directory.name.replace("_", "-"),
        source,
        "train.py",
        nodes=RANKS,
        copies=2,
        hyperparameters=parameters,
        max_slowdown=EVERY_STEP,
        Environment=environment,
    )
    job.completed()
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def _alone(environments: Path, directory: Path, parameters: Mapping[str, object]) -> list[Json]:
    (peer,) = (system for system in PEERS if system.name == "lm-resiliency")
    python = str(peer.python(environments)) if parameters["system"] == LM_RESILIENCY else None
    told = json.dumps({key: str(value) for key, value in parameters.items()})
    environment = {"BENCH_DIRECTORY": str(directory), "BENCH_EXAMPLE": str(EXAMPLE), "EVERSTEP_HYPERPARAMETERS": told}
    if python is not None:  # the same extension built for two environments in turn would be built at every launch
        environment["TORCH_EXTENSIONS_DIR"] = str(environments / "torch_extensions")
    run_ranks([str(SCRIPT)], directory, environment, python=python, timeout_seconds=200)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def figures(kind: str, found: Mapping[str, Launches], versions: Mapping[str, str]) -> list[Figure]:
    """Return slowdown and processor time of every system that keeps steps, Everstep's with a verdict.

    Args:
        kind: ddp or zero3.
        found: what `measure` returned.
        versions: by system's name as it is shown.
    """
    nobody = found[NOBODY]
    medians = [statistics.median(steps) for steps in nobody.step_seconds]
    moved = moved_ratio(min(medians), max(medians)) if len(medians) > 1 else None
    names = {EVERSTEP: "everstep", "lm-resiliency": LM_RESILIENCY}
    slowdowns = {name: _slowdown(kind, name, versions[name], nobody, found[key], moved) for name, key in names.items() if key in found}
    own, peer = slowdowns[EVERSTEP], slowdowns.get("lm-resiliency")
    commits = {key: min(launches.commits_ratio) for key, launches in found.items()}
    slowdowns[EVERSTEP] = _judged(own, peer, commits, moved)
    cpu = [_cpu(kind, name, versions[name], nobody, found[key]) for name, key in names.items() if key in found]
    return [*slowdowns.values(), *cpu]


def _slowdown(kind: str, name: str, version: str, nobody: Launches, launches: Launches, moved: float | None) -> Figure:
    def ratio(samples: Sequence[Sequence[float]]) -> float:
        return statistics.median(samples[0]) / statistics.median(samples[1]) - 1

    low, high = bootstrap_interval(ratio, launches.pooled, nobody.pooled)
    return Figure(
        system=name,
        version=version,
        metric=f"char_gpt_{kind}_slowdown",
        state_mib=round(launches.state_bytes / RANKS / 1024**2),
        value=ratio([launches.pooled, nobody.pooled]),
        unit="ratio",
        n=len(launches.pooled),
        low=low,
        high=high,
        verified=launches.verified,
        floor_moved_ratio=moved,
        reason=f"commits ÷ steps {min(launches.commits_ratio):.2f}",
    )


def _judged(own: Figure, peer: Figure | None, commits: Mapping[str, float], moved: float | None) -> Figure:
    told = own.reason
    if own.verified is False:
        return replace(own, verdict=Verdict.SHORT, reason=f"{told}; the bytes differ from the owner's")
    if moved is None or moved > FLOOR_TOLERANCE_RATIO:
        why = "the model alone was launched once" if moved is None else f"the model alone moved by {moved:.0%}"
        return replace(own, verdict=Verdict.INCONCLUSIVE, reason=f"{told}; {why}")
    if peer is None:
        return replace(own, verdict=Verdict.INCONCLUSIVE, reason=f"{told}; no other system that replicates was measured")
    if commits["everstep"] < LEAST_COMMITS_RATIO:
        return replace(own, verdict=Verdict.INCONCLUSIVE, limit=peer.value, against="lm-resiliency's", reason=f"{told}: not the same interval")
    if commits[LM_RESILIENCY] < LEAST_COMMITS_RATIO:
        why = f"lm-resiliency's {commits[LM_RESILIENCY]:.2f}: not the same interval"
        return replace(own, verdict=Verdict.INCONCLUSIVE, limit=peer.value, against="lm-resiliency's", reason=f"{told}; {why}")
    verdict = Verdict.PASS if own.value <= peer.value else Verdict.SHORT
    return replace(own, verdict=verdict, limit=peer.value, against="lm-resiliency's", reason=told)


def _cpu(kind: str, name: str, version: str, nobody: Launches, launches: Launches) -> Figure:
    """Processor seconds beyond the model's own, per GiB of snapshot that was kept twice."""
    gib_per_step = launches.state_bytes / GIB * statistics.fmean(launches.commits_ratio)

    def extra(samples: Sequence[Sequence[float]]) -> float:
        return (statistics.fmean(samples[0]) - statistics.fmean(samples[1])) / max(gib_per_step, 1e-9)

    low, high = bootstrap_interval(extra, launches.cpu_seconds, nobody.cpu_seconds)
    return Figure(
        system=name,
        version=version,
        metric=f"char_gpt_{kind}_cpu",
        state_mib=round(launches.state_bytes / RANKS / 1024**2),
        value=extra([launches.cpu_seconds, nobody.cpu_seconds]),
        unit="cpu s/GiB",
        n=len(launches.cpu_seconds),
        low=low,
        high=high,
        verified=launches.verified,
    )
