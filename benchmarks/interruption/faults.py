"""Injects faults one after another, and measures the time and the steps that each fault costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.cluster_jobs import Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.interruption.contenders import PATIENCE_SECONDS, Contender, UnderEverstep, wait
from benchmarks.interruption.outcomes import Fault, Interruption, resumed
from benchmarks.interruption.survivors import last_gone_at, watched
from infra.local_cloud.fault_kinds import KillControlPlane, Terminate
from infra.local_cloud.processes import descendants


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A node with frozen processes, which EC2 reports as running."""

    verdict_seconds: float
    """Seconds from the freeze until an incident opened."""
    detection_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blackout:
    """A time without a control plane."""

    seconds: float
    """Seconds without a control plane."""
    lost_steps: int
    restarted_ranks: int
    steps: int
    """Steps that the ranks finished in this time."""


def interrupt(contender: Contender, fault: Fault) -> Interruption:
    """Cause one fault and wait until training continues. Restart torchrun or torchft after `PATIENCE_SECONDS`.

    Raises BenchmarkFailed if Everstep does not recover.
    """
    contender.settle()
    pids = contender.pids()
    with watched(pids) as ends:
        hurt_at = time.monotonic()
        contender.hurt(fault)
        gone_at = last_gone_at(ends, timeout_seconds=PATIENCE_SECONDS) if contender.is_relaunched else None

    def resumption() -> object:
        return resumed(
            contender.trace(), hurt_at, waited_for=contender.waited_for, is_relaunched=contender.is_relaunched
        )

    try:
        wait(f"{contender.name} goes on", lambda: resumption() is not None)
    except BenchmarkFailed:
        contender.revive()
        seconds = time.monotonic() - hurt_at
        return Interruption(
            system=contender.name, job=contender.job, fault=fault, seconds=seconds, lost_steps=0, came_back=False
        )
    found = resumed(contender.trace(), hurt_at, waited_for=contender.waited_for, is_relaunched=contender.is_relaunched)
    assert found is not None, "it was waited for"
    return Interruption(
        system=contender.name,
        job=contender.job,
        fault=fault,
        seconds=found.at - hurt_at,
        lost_steps=found.lost_steps,
        stopped_seconds=None if gone_at is None else gone_at - hurt_at,
        phases=contender.phases(),
    )


def silence(bench: Bench, contender: UnderEverstep, detection_seconds: float) -> Silence:
    """Freeze rank 1's node until an incident opens. Then terminate it, so that the fleet replaces it."""
    contender.settle()
    seen = contender.handle.describe()
    node, incidents = seen["NodeIds"][1], seen["IncidentCount"]
    with _frozen(bench, node):
        begun = time.monotonic()
        contender.handle.wait("the verdict on a silent node", lambda seen: seen["IncidentCount"] > incidents)
        lasted = time.monotonic() - begun
        bench.cluster.inject(Terminate(target=node))
    contender.handle.wait("the job trains again", lambda seen: seen["SecondaryStatus"] == "Training")
    return Silence(verdict_seconds=lasted, detection_seconds=detection_seconds)


def blackout(bench: Bench, contender: UnderEverstep, *, seconds: float) -> Blackout:
    """Kill the control plane during training, and start it again after `seconds`.

    Return the steps finished meanwhile, and the lost steps and restarted ranks afterwards, which should be 0.
    """
    contender.settle()
    before, pids = contender.handle.describe(), contender.pids()
    reached = max(each.step for passed in contender.trace() for each in passed)
    begun = time.monotonic()
    bench.cluster.inject(KillControlPlane(down=seconds))
    lasted = time.monotonic() - begun
    after = contender.handle.wait("the control plane hears of steps", lambda seen: seen["CommittedStep"] > reached + 1)
    steps = [each.step for each in contender.trace()[0]]
    return Blackout(
        seconds=lasted,
        lost_steps=len(steps) - len(set(steps)) if after["Generation"] != before["Generation"] else 0,
        restarted_ranks=sum(one != other for one, other in zip(pids, contender.pids(), strict=True)),
        steps=max(steps) - reached,
    )


@contextmanager
def _frozen(bench: Bench, node: str) -> Iterator[None]:
    """SIGSTOP every process of an instance for the `with` block, then SIGCONT."""
    init = bench.cluster.instances().get(node)
    if init is None:
        raise BenchmarkFailed(f"{node} does not run")
    below = descendants(init)
    for process in below:
        process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in below:
            process.send(signal.SIGCONT)


def repeated(what: Callable[[], Interruption], count: int, say: Callable[[str], None]) -> list[Interruption]:
    """Repeat a measurement, and print and return the results."""
    found = []
    for number in range(count):
        each = what()
        found.append(each)
        stopped = (
            "" if each.stopped_seconds is None else f", the others gone after {each.stopped_seconds * 1000:.0f} ms"
        )
        came = (
            f"{each.seconds:.2f} s, {each.lost_steps} steps made again"
            if each.came_back
            else f"not back after {each.seconds:.0f} s"
        )
        say(f"  {number + 1} of {count}: {each.system}, {each.job}, {each.fault}: {came}{stopped}")
    return found
