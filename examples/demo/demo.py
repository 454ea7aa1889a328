"""Runs the demo: a job that loses a process, an instance and all holders of a shard, and still ends bit-identical.

The reference is an undisturbed run of the same job. The demo uses only public interfaces: the Everstep API for jobs,
plain boto3 for the cloud. `make demo` runs it and writes the report to `.everstep/demo/report.json`. With KEEP=1 in the
environment, the cluster stays up until you interrupt the demo.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from comparison import RunResult, differences, read_run
from rich.console import Console
from rich.table import Table

from everstep import failures
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.fault_kinds import Terminate
from infra.local_cloud.processes import exit_when_asked
from infra.local_cloud.up import ClusterOptions, LocalCluster

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(".everstep/demo")
STATIC = ROOT / "control_plane" / "static"
NODES, SPARES, COPIES = 4, 1, 2
STEPS, CHECKPOINT_EVERY, SEED = 240, 25, 7
REHEARSE_AT_STEP, FIRST_FAULT_STEP, SECOND_FAULT_STEP = 5, 30, 60
REMAINING_STEPS = 50
TOLD_EVERY_STEPS = 20
TOLD_EVERY_SECONDS = 10.0
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.1


class DemoFailed(Exception):
    """The demo did not show the expected recovery."""


class Demo:
    """One run of the demo on its own local cluster."""

    def __init__(self, cluster: LocalCluster, console: Console) -> None:
        self.cluster = cluster
        self.client = cluster.client()
        self.console = console
        self.begun = time.monotonic()

    # -- progress output

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self.console.print(f"[dim]{time.monotonic() - self.begun:6.1f} s[/]  {text}")

    def wait(self, what: str, job: str, arrived: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the job until `arrived` returns True, and print its progress meanwhile.

        Raises:
            DemoFailed: the job ended, or its state and step have not changed for `PATIENCE_SECONDS`.
        """
        told_state: tuple[object, ...] = ()
        told_step, last, moved_at, told_at = -1, None, time.monotonic(), time.monotonic()
        while True:
            description = self.client.describe_training_job(TrainingJobName=job)
            if arrived(description):
                return description
            if description["TrainingJobStatus"] in ("Failed", "Stopped", "Completed"):
                raise DemoFailed(
                    f"job {job} is {description['TrainingJobStatus']} ({description['Reason']}) while waiting "
                    f"for {what}"
                )
            state = (description["SecondaryStatus"], description["Generation"])
            step = max(description["Boundary"], 0)
            if state != told_state:
                self.say(
                    f"[cyan]{job}[/] {description['SecondaryStatus'].lower()} (launch "
                    f"{description['Generation']}): {description['Reason']}"
                )
                told_state, told_step, told_at = state, step, time.monotonic()
            elif step >= told_step + TOLD_EVERY_STEPS:
                self.say(
                    f"[cyan]{job}[/] step {step} of {STEPS}; step {max(description['CommittedStep'], 0)} is "
                    f"safe in memory on {COPIES} nodes"
                )
                told_step, told_at = step, time.monotonic()
            elif time.monotonic() - told_at > TOLD_EVERY_SECONDS:
                self.say(f"[cyan]{job}[/] step {step}, {description['Reason']}")
                told_at = time.monotonic()
            if (now := (state, step, description["Reason"])) != last:
                last, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > PATIENCE_SECONDS:
                raise DemoFailed(
                    f"no progress for {PATIENCE_SECONDS:.0f} s while waiting for {what}: {description['Reason']}"
                )
            _pause()

    # -- the job

    def submit(self, job: str, *, rehearses: bool) -> None:
        """Submit the character GPT through the public API."""
        source = self.client.upload_source(Directory=ROOT / "examples" / "char_gpt")["SourceId"]
        self.client.create_training_job(
            TrainingJobName=job,
            Source={"SourceId": source},
            EntryPoint="train.py",
            HyperParameters={"steps": str(STEPS), "seed": str(SEED)},
            NodeCount=NODES,
            RanksPerNode=1,
            Protection={"Copies": COPIES},
            CheckpointConfig={"EverySteps": CHECKPOINT_EVERY},
            Rehearsal={"Mode": "On" if rehearses else "Off", "AtStep": REHEARSE_AT_STEP},
        )
        self.say(
            f"submitted [cyan]{job}[/]: char-GPT, DeepSpeed ZeRO-3, {NODES} ranks, {STEPS} steps, every shard "
            f"on {COPIES} nodes"
        )

    def result(self, job: str) -> RunResult:
        """Download and read the output of a finished job."""
        folder = HOME / "outputs" / job
        shutil.rmtree(folder, ignore_errors=True)
        self.client.download_outputs(TrainingJobName=job, Directory=folder)
        return read_run(folder, NODES)

    def incident(self, job: str, number: int) -> dict[str, Any]:
        """Wait until the job's incident of this number (from 1) is closed, and print its outcome."""
        what = f"incident {number} to be closed"

        def closed(_: dict[str, Any]) -> bool:
            incidents = self.client.list_incidents(TrainingJobName=job)["Incidents"]
            return len(incidents) >= number and "ClosedAt" in incidents[number - 1]

        self.wait(what, job, closed)
        incident: dict[str, Any] = self.client.list_incidents(TrainingJobName=job)["Incidents"][number - 1]
        self.say(
            f"[green]recovered[/] from {incident['Cause']} out of [bold]{incident['RestoreSource']}[/] memory"
            if incident["RestoreSource"] != "s3"
            else f"[green]recovered[/] from {incident['Cause']} out of [bold]S3[/]"
        )
        self.say(
            f"  resumed from step {incident['FromStep']}, {incident['LostSteps']} steps done again, "
            f"{_total(incident):.1f} s in all"
        )
        return incident

    def rehearsal(self, job: str) -> dict[str, Any]:
        """Wait until the job has rehearsed its resume, and return the result.

        Raises:
            DemoFailed: the repeated steps differ, or the job could not rehearse.
        """
        result: dict[str, Any] = self.wait("its rehearsal", job, lambda seen: "RehearsalResult" in seen)[
            "RehearsalResult"
        ]
        if result["Verdict"] != "Proven":
            raise DemoFailed(f"the rehearsal is {result['Verdict']}: {result.get('Message', '')}")
        self.say(
            f"[green]resume proven[/] at step {result['Step']}: all ranks restarted and repeated {result['Steps']} "
            f"steps bit for bit, in {result['Seconds']:.1f} s"
        )
        return result

    # -- faults

    def kill_rank(self, job: str) -> None:
        """Kill one rank during training. Everstep must then restore from the memory of the rank's own node."""
        description = self.wait("the first steps", job, lambda seen: seen["CommittedStep"] >= FIRST_FAULT_STEP)
        rank = 2
        pid = self.cluster.kill_rank(description["NodeIds"][rank], rank)
        self.say(f"[red]killed[/] rank {rank} (pid {pid}, SIGKILL) on {description['NodeIds'][rank]}")

    def terminate_instance(self, job: str) -> None:
        """Terminate one EC2 instance directly, not through its Auto Scaling group.

        Everstep must then restore from another node's memory.
        """
        description = self.wait("more steps", job, lambda seen: seen["CommittedStep"] >= SECOND_FAULT_STEP)
        victim = description["NodeIds"][1]
        self.cluster.inject(Terminate(target=victim))
        self.say(f"[red]terminated[/] instance {victim}")

    def terminate_group(self, job: str, base: int, newcomer: str) -> None:
        """Wait for a checkpoint of a later step than `base`, then terminate both nodes that hold one shard.

        Both nodes are terminated at the same time, so the shard can be restored only from S3. The function does not
        terminate `newcomer`, the replacement instance of the previous incident.
        """

        def checkpointed(_: dict[str, Any]) -> bool:
            last = self.client.describe_protection(TrainingJobName=job).get("LastCheckpoint")
            return last is not None and last["Step"] > base

        self.wait(f"a checkpoint in S3 newer than step {base}", job, checkpointed)
        protection = self.client.describe_protection(TrainingJobName=job)
        if STEPS - protection["Boundary"] < REMAINING_STEPS:
            raise DemoFailed(f"only {STEPS - protection['Boundary']} steps remain for the third incident")
        groups = [{holder["NodeId"] for holder in shard["Holders"]} for shard in protection["Shards"]]
        victims = sorted(next(group for group in groups if newcomer not in group))
        self.say(
            f"checkpoint of step {protection['LastCheckpoint']['Step']} is in S3; shard holders read from "
            "DescribeProtection"
        )
        # Terminate both nodes in one call, so that Everstep cannot copy the shard to another node between two calls.
        self.cluster.aws("ec2").terminate_instances(InstanceIds=victims)
        self.say(f"[red]terminated[/] both holders of one group at once: {', '.join(victims)}")

    # -- the complete demo

    def run(self) -> dict[str, Any]:
        """Train a job while it loses a rank, an instance, and both nodes that hold one shard.

        Then compare it with an undisturbed job. Return the report.

        Raises:
            DemoFailed: a step of the demo had another outcome than expected.
        """
        self.submit("survivor", rehearses=True)
        rehearsal = self.rehearsal("survivor")
        self.kill_rank("survivor")
        incidents = [self.incident("survivor", 1)]
        self.terminate_instance("survivor")
        incidents.append(self.incident("survivor", 2))
        self.terminate_group("survivor", incidents[1]["FromStep"], incidents[1]["ReplacementInstanceId"])
        incidents.append(self.incident("survivor", 3))
        self.wait("the end", "survivor", lambda seen: seen["TrainingJobStatus"] == "Completed")
        self.say("[cyan]survivor[/] completed; now the same job once more, undisturbed")
        self.submit("reference", rehearses=False)
        self.wait("the end", "reference", lambda seen: seen["TrainingJobStatus"] == "Completed")
        run, reference = self.result("survivor"), self.result("reference")
        unequal = differences(run, reference)
        table(self.console, rehearsal, incidents)
        report = {
            "identical": not unequal,
            "final_digest": run.digest,
            "reference_digest": reference.digest,
            "first_loss": float.fromhex(run.losses[0][0]),
            "last_loss": float.fromhex(run.losses[0][-1]),
            "rehearsal": {key.lower(): rehearsal[key] for key in ("Verdict", "Step", "Steps", "Seconds")},
            "incidents": [summary(incident) for incident in incidents],
            "steps": STEPS,
            "world_size": NODES,
            "seconds": round(time.monotonic() - self.begun, 3),
        }
        (HOME / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        if unequal:
            raise DemoFailed("; ".join(unequal))
        check(incidents, report)
        return report


def check(incidents: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Check the incidents, and that the loss fell.

    Each incident must have the expected cause and restore source, and at most the expected number of lost steps.

    Raises:
        DemoFailed: an incident or the loss differs.
    """
    expected = [
        ("rank_exit", "local", 3),
        ("instance_terminated", "peer", 3),
        ("group_lost", "s3", CHECKPOINT_EVERY + 3),
    ]
    for incident, (cause, source, lost_steps) in zip(incidents, expected, strict=True):
        seen = (incident["Cause"], incident.get("RestoreSource"))
        if seen != (cause, source) or incident["LostSteps"] > lost_steps or incident["FromStep"] <= 0:
            raise DemoFailed(
                f"expected {cause} restored from {source} with at most {lost_steps} lost steps; "
                f"it was {seen[0]} from {seen[1]}, base {incident['FromStep']}, {incident['LostSteps']} lost steps"
            )
    if not report["last_loss"] < 0.8 * report["first_loss"]:
        raise DemoFailed(f"the loss did not fall: {report['first_loss']:.3f} to {report['last_loss']:.3f}")


def summary(incident: dict[str, Any]) -> dict[str, Any]:
    """Return those fields of an incident that the report contains, by their names in the report."""
    return {
        "cause": incident["Cause"],
        "evidence": incident["Evidence"],
        "decision": incident["Decision"],
        "reason": incident["Reason"],
        "restore_source": incident["RestoreSource"],
        "from_step": incident["FromStep"],
        "lost_steps": incident["LostSteps"],
        "phases": {
            f"{phase}_seconds": incident[f"{phase.title()}Seconds"]
            for phase in ("detect", "replace", "restore", "rework")
        },
        "instance_id": incident.get("InstanceId"),
        "replacement_instance_id": incident.get("ReplacementInstanceId"),
    }


def table(console: Console, rehearsal: dict[str, Any], incidents: list[dict[str, Any]]) -> None:
    """Print a table of the rehearsal, the incidents and their costs."""
    shown = Table(title="What happened to the job, and what it cost", show_lines=True)
    shown.add_column("incident", no_wrap=True)
    shown.add_column("evidence", max_width=48)
    shown.add_column("restored from", no_wrap=True)
    for column in ("detect s", "replace s", "restore s", "rework s", "lost steps"):
        shown.add_column(column, justify="right", no_wrap=True)
    repeated, seconds = f"{rehearsal['Steps']} steps repeated bit for bit", f"{rehearsal['Seconds']:.2f}"
    shown.add_row("rehearsal", repeated, f"own copy, step {rehearsal['Step']}", "", "", "", seconds, "0")
    for incident in incidents:
        phases = [f"{incident[f'{phase}Seconds']:.2f}" for phase in ("Detect", "Replace", "Restore", "Rework")]
        source = f"{incident['RestoreSource']}, step {incident['FromStep']}"
        shown.add_row(incident["Cause"], "\n".join(incident["Evidence"]), source, *phases, str(incident["LostSteps"]))
    console.print(shown)


def _total(incident: dict[str, Any]) -> float:
    return sum(float(incident[f"{phase}Seconds"]) for phase in ("Detect", "Replace", "Restore", "Rework"))


def _pause() -> None:
    threading.Event().wait(POLL_SECONDS)


class Steps:
    """Prints the start of the cluster step by step."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print the title and the duration of a step."""
        begun = time.monotonic()
        yield
        self.console.print(f"[dim]  ·  {title}: {time.monotonic() - begun:.1f} s[/]")


def main() -> int:
    """Run the demo and return the exit code of the process."""
    exit_when_asked(with_parent=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if any(part.is_alive for part in LocalCluster(HOME / "cluster").status()):
        console.print(f"[red bold]the demo is up already[/] in {HOME}: end it first (Ctrl-C where it runs)")
        return 1
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    cluster = LocalCluster(HOME / "cluster", progress=Steps(console))
    console.print(f"[bold]Everstep demo[/]: {NODES} nodes, {SPARES} spare, one training job, three failures")
    try:
        with cluster:
            cluster.up(ClusterOptions(nodes=NODES, spares=SPARES))
            console.print(
                dashboard(cluster.endpoint_url, cluster.token_file, is_built=(STATIC / "index.html").is_file()),
                soft_wrap=True,
            )
            code = told(Demo(cluster, console))
            if os.environ.get("KEEP"):
                stay(console, cluster.endpoint_url, cluster.state_dir)
    except (LocalCloudError, EverstepError, OSError, ValueError) as error:
        console.print(f"[red bold]the demo failed:[/] {error}", markup=True)
        return 1
    return code


def told(demo: Demo) -> int:
    """Run the demo on a running cluster, print the outcome and return the exit code."""
    console = demo.console
    try:
        with failures.translated():
            report = demo.run()
    except (DemoFailed, LocalCloudError, EverstepError, OSError, ValueError) as error:
        console.print(f"[red bold]the demo failed:[/] {error}", markup=True)
        console.print(
            f"logs: {demo.cluster.logs}/*.log (control plane, local AWS), {demo.cluster.nodes_directory}/*/ "
            "(agents and ranks)"
        )
        return 1
    console.print(
        f"[green bold]bit-identical[/]: weights, optimizer state and all {STEPS * NODES} losses equal the "
        "undisturbed run "
        f"(SHA-256 {report['final_digest'][:16]}…; loss {report['first_loss']:.3f} → "
        f"{report['last_loss']:.3f}; {report['seconds']:.0f} s)"
    )
    console.print(f"report: {HOME / 'report.json'}")
    return 0


def dashboard(address: str, token_file: Path, *, is_built: bool) -> str:
    """Return a line with the address of the dashboard.

    Args:
        address: URL of the control plane, which serves the dashboard.
        token_file: contains the token to sign in with.
        is_built: whether the dashboard was built in this checkout with `make web`.
    """
    build = "" if is_built else "; not built yet: `make web` in another terminal takes a minute, then reload"
    return f"dashboard: [bold]{address}[/] (sign in with the token in {token_file}{build})"


def stay(console: Console, address: str, state: Path) -> None:
    """Keep the cluster up until the user interrupts the demo."""
    console.print(f"KEEP=1: the cluster stays up, its dashboard at [bold]{address}[/]; Ctrl-C ends it", soft_wrap=True)
    console.print(
        f'in another terminal: eval "$(everstep local env --state-dir {state})"; everstep incidents list',
        soft_wrap=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
