"""A bad day: a local fleet, three training jobs, and a plan of faults. `rules` then judges the collected facts.

A *strike* is a fault that the day injects. Two jobs fill the fleet. A third job of higher priority waits until one of
them has ended. All jobs train the same small script. The day compares their results with runs of the script outside
Everstep, which take place before the day.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.errors import EverstepError
from everstep.failures import translated
from infra.local_cloud import network
from infra.local_cloud.calls import RecordedCall
from infra.local_cloud.up import FLEET, MAX_NODES, ClusterOptions, LocalCluster
from tests.bad_day import facts, rules
from tests.bad_day.plan import plan, temptation
from tests.bad_day.strikes import Strikes
from tests.bad_day.watch import Watch
from tests.e2e.reference import References
from tests.production.orphans import orphans
from tests.production.stack import Servers, stack
from tests.warm_parent import Launch, WarmParent

SCRIPTS: Final = Path(__file__).parent / "scripts"
SABOTAGE: Final = Path(__file__).parent / "sabotage"
SABOTAGE_VARIABLE: Final = "BAD_DAY_WITHOUT"
SERVER_NAME: Final = "everstep-"
"""Beginning of the application id with which servers of the control plane call AWS."""
NODE_MEMORY_BYTES: Final = 64 * 1024**2
CONNECT_SECONDS: Final = 300.0
BEGIN_SECONDS: Final = 240.0
"""Maximum duration of each wait for one of the first two jobs.

The first wait ends when the job has nodes, the second when the job has committed a step.
"""
STEP_SECONDS: Final = 0.11
"""Minimum duration of a training step.

Without a minimum, the jobs would end too early on a fast machine. On a busy machine with two cores, a step takes about
this time anyway.
"""
SHARES: Final = (("early", 0.4, 0), ("long", 1.0, 0), ("urgent", 0.6, 10))
"""Each job's name, the minimum part of the day that its steps take, and its priority.

The third job begins when the first has ended, so that two jobs train until the end of the day.
"""
if TYPE_CHECKING:
    from everstep.service import EverstepClient

ENDED: Final = ("Completed", "Stopped", "Failed")
Json = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DayOptions:
    """Settings of a bad day: its length, its jobs, and the safeguards that are missing or tested."""

    seed: int
    minutes: float
    nodes_per_job: int = 3
    """Nodes of each job. Two jobs fill the fleet."""
    checkpoint_every: int = 50
    without: str = ""
    """Safeguard that the control plane lacks on this day: lease, contract or evidence (`sabotage`).

    Empty: it lacks none.
    """
    has_standby: bool = False
    """True to start a second control plane as a standby."""
    is_production: bool = False
    """True to run two servers behind HAProxy on resources that Terraform made (`stack`)."""
    temptation: str = ""
    """Safeguard that a short plan of one minute tests (`plan.temptation`). Empty: the day runs the full plan."""
    keeps: Path | None = None
    """Folder in which the day keeps all logs and facts. None: the day deletes them."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    name: str
    steps: int
    seed: int
    priority: int
    nodes: int


def spend(options: DayOptions, tell: Tell, parent: WarmParent | None = None) -> facts.Day:
    """Run a bad day and return the collected facts.

    If one of the first two jobs does not begin, the day injects no fault, and the facts show the missing start.

    Args:
        options: settings of the day.
        tell: receives a line for each injected fault, each incident and each change of a job's status.
        parent: process that forks the ranks of undisturbed runs. None starts one for this day.

    Returns:
        The collected facts.

    Raises:
        LocalCloudError: the local cloud did not start.
    """
    has_links = network.obstacle() is None
    directory = Path(tempfile.mkdtemp(prefix="everstep-bad-day-"))
    jobs = _jobs(options)
    tell(
        f"seed {options.seed}, {options.minutes:g} minutes, lines can {'' if has_links else 'NOT '}be cut; "
        f"files in {directory}"
    )
    undisturbed = _undisturbed(jobs, directory, parent)
    tell("undisturbed runs are done")
    cluster = LocalCluster(directory / "cluster")
    control_plane = {"PYTHONPATH": str(SABOTAGE), SABOTAGE_VARIABLE: options.without} if options.without else {}
    try:
        with stack() if options.is_production else nullcontext() as parts, cluster:
            size = 2 * options.nodes_per_job
            wanted = ClusterOptions(
                nodes=size,
                spares=1,
                max_nodes=MAX_NODES,
                node_memory_bytes=NODE_MEMORY_BYTES,
                connect_seconds=CONNECT_SECONDS,
                has_namespaces=has_links,
                seed=options.seed,
                control_plane_environment=control_plane,
                has_standby=options.has_standby or options.temptation == "lease",
            )
            cluster.up(wanted if parts is None else parts.options(wanted))
            servers = None if parts is None else Servers(cluster, parts.database)
            tell(f"{size} nodes and a spare are connected")
            # leave room for replacements, as the owner of a real fleet would
            with closing(cluster.aws("autoscaling")) as auto_scaling:
                auto_scaling.update_auto_scaling_group(AutoScalingGroupName=cluster.group, MaxSize=size + 2)
            day = _live(options, cluster, servers, jobs, undisturbed, directory, tell, has_links=has_links)
            if servers is not None:
                day = msgspec.structs.replace(day, orphans=tuple(orphans(cluster, servers.database.url)))
    finally:
        if options.keeps is not None:
            shutil.copytree(directory, options.keeps, dirs_exist_ok=True, ignore=_no_sockets, symlinks=True)
        shutil.rmtree(directory, ignore_errors=True)
    if options.keeps is not None:
        (options.keeps / "day.json").write_bytes(msgspec.json.encode(day))
    return day


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())]


def _jobs(options: DayOptions) -> list[_Plan]:
    seconds = options.minutes * 60
    return [
        _Plan(
            name=name,
            steps=max(60, int(seconds * share / STEP_SECONDS)),
            seed=options.seed % 1000 + number,
            priority=priority,
            nodes=options.nodes_per_job,
        )
        for number, (name, share, priority) in enumerate(SHARES)
    ]


def _undisturbed(jobs: list[_Plan], directory: Path, parent: WarmParent | None) -> dict[str, list[Json]]:
    with _ranks_from(parent) as runs:
        found = {}
        for job in jobs:
            own = {"seed": str(job.seed), "steps": str(job.steps)}
            launch: Launch = runs.start(SCRIPTS / "train.py", job.nodes, directory / "undisturbed" / job.name, own)
            found[job.name] = launch.results()
    return found


@contextmanager
def _ranks_from(parent: WarmParent | None) -> Iterator[References]:
    if parent is not None:
        yield References(parent)
        return
    with closing(WarmParent()) as own:
        yield References(own)


def _live(
    options: DayOptions,
    cluster: LocalCluster,
    servers: Servers | None,
    jobs: list[_Plan],
    undisturbed: dict[str, list[Json]],
    directory: Path,
    tell: Tell,
    *,
    has_links: bool,
) -> facts.Day:
    traces = directory / "traces"
    traces.mkdir()
    with closing(cluster.client()) as client:
        source = client.upload_source(Directory=SCRIPTS)
        submitted: dict[str, float] = {}
        have_nodes = True
        for job in jobs:
            _submit(client, source, job, traces, options)
            submitted[job.name] = time.monotonic()
            if job.priority == 0 and have_nodes:
                have_nodes = _arrives(lambda name=job.name: _describe(client, name)["NodeIds"], BEGIN_SECONDS)
        tell(f"{', '.join(job.name for job in jobs)} are submitted; {jobs[-1].name} has to wait")
        watch = Watch(cluster, [job.name for job in jobs])
        watch.start()
        starts: list[facts.Start] = []
        for job in jobs[:2]:
            patience = BEGIN_SECONDS if have_nodes and rules.has_begun(starts) else 0.0
            starts.append(_start(client, job.name, submitted[job.name], patience))
        strikes = Strikes(cluster, watch, tell, servers)
        has_begun = rules.has_begun(starts)
        if not has_begun:
            lines = []
        elif options.temptation:
            lines = temptation(options.temptation, seed=options.seed)
        else:
            lines = plan(
                seed=options.seed, minutes=options.minutes, has_links=has_links, has_servers=servers is not None
            )
        teller = _Teller(client, [job.name for job in jobs], tell)
        teller.start()
        strikes.play(
            lines, lambda: any(watch.jobs.get(job.name, {}).get("TrainingJobStatus") not in ENDED for job in jobs)
        )
        tell(
            "the play is over; the jobs may end in peace"
            if has_begun
            else "not all jobs that fill the fleet began: nothing was played"
        )
        if has_begun:
            patience = 90.0 if options.temptation else options.minutes * 90 + 240
            _arrives(lambda: all(_describe(client, job.name)["TrainingJobStatus"] in ENDED for job in jobs), patience)
        teller.end()
        watch.end()
        return _collected(
            options, cluster, client, jobs, undisturbed, traces, starts, watch, strikes, has_links=has_links
        )


def _start(client: EverstepClient, name: str, submitted: float, patience_seconds: float) -> facts.Start:
    """Wait for a job's first committed step. Return the job's state at the end of the wait."""
    seen: Json = {}

    def has_committed() -> bool:
        seen.update(_describe(client, name))
        return bool(seen["CommittedStep"] > 0)

    _arrives(has_committed, patience_seconds)
    return facts.Start(
        job=name,
        waited_seconds=time.monotonic() - submitted,
        status=seen["TrainingJobStatus"],
        secondary=seen["SecondaryStatus"],
        reason=seen["Reason"],
        node_count=len(seen["NodeIds"]),
        committed_step=seen["CommittedStep"],
    )


def _submit(client: EverstepClient, source: Any, job: _Plan, traces: Path, options: DayOptions) -> None:
    client.create_training_job(
        TrainingJobName=job.name,
        Source=source,
        EntryPoint="train.py",
        HyperParameters={
            "name": job.name,
            "seed": str(job.seed),
            "steps": str(job.steps),
            "step_seconds": str(STEP_SECONDS),
            "trace": str(traces),
        },
        NodeCount=job.nodes,
        RanksPerNode=1,
        Protection={"Copies": 2},
        CheckpointConfig={"EverySteps": options.checkpoint_every},
        RetryStrategy={"MaxAttempts": 10},
        Priority=job.priority,
    )


def _items(client: EverstepClient, operation: str, key: str, **query: Any) -> Iterator[Json]:
    """Yield the items of all pages of a list operation."""
    for page in client.get_paginator(operation).paginate(**query):
        yield from page[key]


def _describe(client: EverstepClient, name: str) -> Json:
    try:
        with translated():
            answer: Json = client.describe_training_job(TrainingJobName=name)
    except EverstepError:
        return {
            "TrainingJobStatus": "unknown",
            "SecondaryStatus": "unknown",
            "NodeIds": [],
            "CommittedStep": -1,
            "Reason": "no answer",
        }
    return answer


def _arrives(is_there: Callable[[], Any], patience_seconds: float) -> bool:
    """Poll `is_there` until it returns a true value. Return False if time runs out first."""
    deadline = time.monotonic() + patience_seconds
    while not (has_come := bool(is_there())) and time.monotonic() < deadline:
        threading.Event().wait(0.3)
    return has_come


class _Teller(threading.Thread):
    """Prints a line when an incident opens or closes, and when a job's status changes."""

    def __init__(self, client: EverstepClient, names: list[str], tell: Tell) -> None:
        super().__init__(name="teller", daemon=True)
        self._client, self._names, self._tell = client, names, tell
        self._over = threading.Event()
        self._told: set[object] = set()

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(1.0):
            for name in self._names:
                with suppress(EverstepError), translated():
                    seen = self._client.describe_training_job(TrainingJobName=name)
                    self._once(
                        (name, seen["TrainingJobStatus"]),
                        f"  {name} is {seen['TrainingJobStatus']} ({seen.get('SecondaryStatus')}), step "
                        f"{seen.get('Boundary')}",
                    )
                    for incident in _items(self._client, "list_incidents", "Incidents", TrainingJobName=name):
                        key = incident["IncidentId"]
                        self._once(
                            (key, 0), f"  {key} of {name} opens: {incident['Cause']}, {incident.get('Decision')}"
                        )
                        if incident.get("ClosedAt") is not None:
                            words = (
                                f"from {incident.get('RestoreSource')}, step {incident.get('FromStep')}, "
                                f"{incident.get('LostSteps')} lost"
                            )
                            self._once((key, 1), f"  {key} of {name} is over: {words}")

    def _once(self, key: object, words: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._tell(words)


def _collected(
    options: DayOptions,
    cluster: LocalCluster,
    client: EverstepClient,
    jobs: list[_Plan],
    undisturbed: dict[str, list[Json]],
    traces: Path,
    starts: list[facts.Start],
    watch: Watch,
    strikes: Strikes,
    *,
    has_links: bool,
) -> facts.Day:
    lines = [line for path in sorted(traces.iterdir()) for line in path.read_bytes().splitlines()]
    boundaries = [msgspec.json.decode(line, type=facts.Boundary) for line in lines]
    incidents = [
        _incident(incident)
        for job in jobs
        for incident in _items(client, "list_incidents", "Incidents", TrainingJobName=job.name)
    ]
    return facts.Day(
        seed=options.seed,
        minutes=options.minutes,
        is_temptation=bool(options.temptation),
        boundaries=boundaries,
        calls=[_call(call) for call in cluster.calls()],
        ended=[
            facts.Ended(instance=instance, at=at)
            for instance, at in sorted(watch.ended.items(), key=lambda item: item[1])
        ],
        strikes=sorted(strikes.done, key=lambda strike: strike.at),
        decisions=list(_decisions(client, "→ draining", "→ held")),
        returned=tuple(_decisions(client, "held → spare")),
        incidents=incidents,
        jobs=[_job(client, job, undisturbed[job.name], traces.parent) for job in jobs],
        has_links=has_links,
        has_servers=options.is_production,
        wrong_calls=tuple(cluster.wrong_calls()),
        starts=starts,
        refused=strikes.refused,
    )


def _job(client: EverstepClient, job: _Plan, undisturbed: list[Json], directory: Path) -> facts.Job:
    seen = client.describe_training_job(TrainingJobName=job.name)
    outputs = directory / "outputs" / job.name
    result: list[Json] = []
    with suppress(EverstepError, OSError), translated():
        client.download_outputs(TrainingJobName=job.name, Directory=outputs)
        result = [json.loads((outputs / f"rank={rank}" / "result.json").read_text()) for rank in range(job.nodes)]
    return facts.Job(
        name=job.name,
        status=seen["TrainingJobStatus"],
        nodes=job.nodes,
        priority=job.priority,
        created_at=_unix(seen["CreationTime"]),
        started_at=_moment(seen.get("TrainingStartTime")),
        ended_at=_moment(seen.get("TrainingEndTime")),
        accounted_until=_moment(seen.get("AccountedUntil")),
        accounting_seconds=seen.get("AccountingSeconds", {}),
        ettr=seen.get("Reliability", {}).get("EttrRatio"),
        checkpoint_every=seen["CheckpointConfig"]["EverySteps"],
        result=result,
        undisturbed=undisturbed,
    )


def _incident(seen: Json) -> facts.Incident:
    return facts.Incident(
        id=seen["IncidentId"],
        job=seen["TrainingJobName"],
        cause=seen["Cause"],
        source=seen.get("RestoreSource"),
        from_step=seen.get("FromStep"),
        lost_steps=seen.get("LostSteps"),
        generation_before=seen["GenerationBefore"],
        generation_after=seen.get("GenerationAfter"),
        instances=tuple(seen.get("InstanceIds") or ()),
        evidence=tuple(seen.get("Evidence") or ()),
        failed_at=_unix(seen["FailedAt"]),
        opened_at=_unix(seen["OpenedAt"]),
        closed_at=_moment(seen.get("ClosedAt")),
        phase_seconds=tuple(seen.get(f"{phase}Seconds") or 0.0 for phase in ("Detect", "Replace", "Restore", "Rework")),
        faulted=tuple(seen.get("FaultedInstanceIds") or ()),
    )


def _decisions(client: EverstepClient, *moves: str) -> Iterator[facts.Decision]:
    """Yield the events about nodes that changed their state in one of the ways `moves`, in the words of the events."""
    for event in _items(client, "list_events", "Events", FleetName=FLEET):
        node = event.get("NodeId")
        if node and event["Type"] == "NodeStateChanged" and any(move in event["Message"] for move in moves):
            yield facts.Decision(at=_unix(event["Time"]), instance=node, words=event["Message"])


def _call(call: RecordedCall) -> facts.Call:
    desired = call.parameters.get("DesiredCapacity")
    return facts.Call(
        at=call.at,
        action=call.action,
        instance=call.parameters.get("InstanceId", ""),
        desired=int(desired) if desired else None,
        launched=int(call.parameters.get("RequestedCapacity", 0)),
        token=call.parameters.get("ClientToken", ""),
        is_decrement=call.parameters.get("ShouldDecrementDesiredCapacity", "").lower() == "true",
        status=call.status,
        server=call.caller if call.caller.startswith(SERVER_NAME) else "",
    )


def _moment(value: Any) -> float | None:
    return None if value is None else _unix(value)


def _unix(value: Any) -> float:
    if isinstance(value, datetime):
        return value.timestamp()
    return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
