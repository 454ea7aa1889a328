"""`everstep jobs …`: submit, list, describe, wait, logs, output, stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import logs as lines
from everstep.cli.accounting import dollars, ettr_words, hours, incident_words, job_time
from everstep.cli.output import (
    Columns,
    Json,
    Output,
    OutputFormat,
    connect,
    listed,
    moment,
    pairs,
    say,
    show_facts,
    show_json,
    show_rows,
    size,
    step,
    when,
    without_none,
)
from everstep.cli.progress import Progress
from everstep.cli.waiting import ended
from everstep.errors import WaitFailed

app = typer.Typer(help="Training jobs.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the training job.")]


class Stream(StrEnum):
    """Which of a rank's streams."""

    STDOUT = "stdout"
    STDERR = "stderr"
    BOTH = "both"


@app.command()
def submit(
    name: Annotated[str, typer.Option(help="Name of the job; never used again.")],
    source_dir: Annotated[
        Path, typer.Option(help="Directory with the code; packed and uploaded, without version control, caches and what .everstepignore names.")
    ],
    entry_point: Annotated[str, typer.Option(help="Python file in the source directory that every rank runs.")],
    node_count: Annotated[int, typer.Option(help="How many nodes.")],
    ranks_per_node: Annotated[int, typer.Option(help="How many ranks on each node.")] = 1,
    copies: Annotated[int | None, typer.Option(help="Nodes that keep every shard in memory, its own included; 2 unless there is one node.")] = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(
            help="What snapshots may cost training, as a part of an iteration; above it they come less often. 0.01 unless said, 1 on a local cluster."
        ),
    ] = None,
    checkpoint_every_steps: Annotated[int, typer.Option(help="A checkpoint in S3 every so many steps; 0: only when the job stops.")] = 0,
    hyperparameter: Annotated[list[str] | None, typer.Option(help="name=value, given to the script; may be repeated.")] = None,
    environment: Annotated[list[str] | None, typer.Option(help="NAME=value, environment variable of the ranks; may be repeated.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Fleet to run on; may be left out where there is one.")] = None,
    priority: Annotated[int, typer.Option(help="Higher first; of equal ones the oldest.")] = 0,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="A job of higher priority may pause this one; it is checkpointed first and resumes by itself.")
    ] = False,
    project: Annotated[str | None, typer.Option(help="Project that the job belongs to.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="The same failure at the same step this many times, and the job has failed.")] = None,
    max_runtime_seconds: Annotated[int | None, typer.Option(help="Stop the job after this long.")] = None,
    max_pending_seconds: Annotated[int | None, typer.Option(help="Give up when the job has not started after this long.")] = None,
    checkpoint_s3_uri: Annotated[str | None, typer.Option(help="s3://bucket/prefix for checkpoints; the service's bucket by default.")] = None,
    output_s3_path: Annotated[str | None, typer.Option(help="s3://bucket/prefix for outputs; the service's bucket by default.")] = None,
    third_slot: Annotated[bool, typer.Option("--third-slot", help="Keep a third slot per shard, so that uploads never delay snapshots.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Upload the code and start a training job."""
    with connect() as service:
        source = service.upload_source(Directory=source_dir)
        created = service.create_training_job(
            TrainingJobName=name,
            Source=source,
            EntryPoint=entry_point,
            NodeCount=node_count,
            RanksPerNode=ranks_per_node,
            CheckpointConfig=without_none(EverySteps=checkpoint_every_steps, S3Uri=checkpoint_s3_uri, ThirdSlot=third_slot),
            HyperParameters=pairs("--hyperparameter", hyperparameter or []),
            Environment=pairs("--environment", environment or []),
            Priority=priority,
            Preemptible=preemptible,
            Tags=pairs("--tag", tag or []),
            OutputDataConfig=without_none(S3OutputPath=output_s3_path),
            StoppingCondition=without_none(MaxRuntimeInSeconds=max_runtime_seconds, MaxPendingTimeInSeconds=max_pending_seconds),
            RetryStrategy=without_none(MaxAttempts=max_attempts),
            **without_none(FleetName=fleet, Project=project, Protection=without_none(Copies=copies, MaxSlowdown=max_slowdown) or None),
        )
    if output is OutputFormat.JSON:
        show_json(created)
        return
    typer.echo(f"submitted {name}: {node_count} nodes × {ranks_per_node} ranks")
    say(f"next: everstep jobs wait {name}   everstep jobs logs {name} --rank 0   everstep protection describe {name}")


@app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="Only with this status: InProgress, Completed, Failed, Stopping, Stopped.")] = None,
    name_contains: Annotated[str | None, typer.Option(help="Only with this text in the name.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Only of this fleet.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List training jobs, newest first."""
    with connect() as service:
        jobs = listed(service, "list_training_jobs", limit, StatusEquals=status, NameContains=name_contains, FleetName=fleet)
    if output is OutputFormat.JSON:
        show_json({"TrainingJobSummaries": jobs})
        return
    columns: Columns = {
        "NAME": "TrainingJobName",
        "STATUS": "TrainingJobStatus",
        "DETAIL": "SecondaryStatus",
        "FLEET": "FleetName",
        "NODES": "NodeCount",
        "STEP": lambda job: step(job["Boundary"]),
        "COMMITTED": lambda job: step(job["CommittedStep"]),
        "CREATED (UTC)": lambda job: when(job["CreationTime"]),
        "REASON": "Reason",
    }
    show_rows(jobs, columns, empty="No training jobs. Submit one: everstep jobs submit --help")


@app.command()
def describe(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Show everything about a training job."""
    with connect() as service:
        job = service.describe_training_job(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    show_facts(_facts(job))


@app.command()
def wait(
    name: Name,
    timeout: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow a training job until it ends. Exit code 0 only when it is Completed."""
    with connect() as service, Progress(service, name) as progress:
        job = ended(service, name, show=progress.show, interval_seconds=interval, timeout_seconds=timeout)
    status = job["TrainingJobStatus"]
    if status != "Completed":
        raise WaitFailed(f"{name} is {status}: {job['Reason']}", hint=f"everstep jobs logs {name} --rank 0")
    typer.echo(f"{name} is Completed at step {step(job['MaxBoundary'])}, {job['IncidentCount']} incidents")
    say(f"next: everstep jobs output {name} --to DIR")


@app.command()
def logs(
    name: Name,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank.")] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Only of this generation (launch of all ranks).")] = None,
    stream: Annotated[Stream, typer.Option(help="Which stream.")] = Stream.BOTH,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what all ranks print, merged, as it comes, until the job has ended.")] = False,
    since: Annotated[str | None, typer.Option(help="Merged over all ranks, from this time on: 90s, 10m, 2h, 1d ago, or 2026-03-01T12:00:00.")] = None,
    grep: Annotated[str | None, typer.Option(help="Merged over all ranks, only lines that have this in them.")] = None,
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="table prints the logs; json lists what there is.")] = OutputFormat.TABLE,
) -> None:
    """Print what the ranks printed, all generations in order; their stdout to stdout, all else to stderr."""
    with connect() as service:
        if follow or since is not None or grep is not None:
            begin = None if since is None else lines.since_when(since, datetime.now(UTC))
            query = without_none(Rank=rank, Generation=generation, FilterPattern=grep, StartTime=begin)
            found = lines.follow(service, name, query) if follow else lines.read(service, name, query)
            of_stream = (event for event in found if stream is Stream.BOTH or event["Stream"] in (stream.value, "gap"))
            lines.show(of_stream, is_json=output is OutputFormat.JSON)
            return
        there = [entry for entry in service.list_logs(TrainingJobName=name)["Logs"] if entry.get("Bytes") != 0]
        entries = [
            entry
            for entry in there
            if (rank is None or entry["Rank"] == rank)
            and (generation is None or entry["Generation"] == generation)
            and (stream is Stream.BOTH or entry.get("Stream") in (stream.value, None))
        ]
        if output is OutputFormat.JSON:
            show_json({"Logs": entries})
            return
        if not entries:
            say(f"Nothing matches; there are logs of {_extent(there)}." if there else "Nothing has been printed or uploaded yet.")
        for entry in entries:
            _print_log(service, name, entry)


@app.command("output")
def download_output(
    name: Name,
    to: Annotated[Path, typer.Option("--to", help="Directory to write to, as rank=<r>/…; made if it is missing.")],
    generation: Annotated[int | None, typer.Option(min=1, help="Which generation's; by default the newest that left anything.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Download the files that the ranks left in EVERSTEP_OUTPUT_DIR."""
    with connect() as service:
        written = service.download_outputs(TrainingJobName=name, Directory=to, Generation=generation)
    if output is OutputFormat.JSON:
        show_json({"Files": [str(path) for path in written]})
        return
    typer.echo(f"{len(written)} files, {size(sum(path.stat().st_size for path in written))}, in {to}")


@app.command()
def stop(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Ask a training job to stop: all ranks stop at one agreed step, which is kept in S3."""
    with connect() as service:
        job = service.stop_training_job(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    typer.echo(f"{name} is {job['TrainingJobStatus']}")
    say(f"next: everstep jobs wait {name}")


def _extent(entries: Sequence[Json]) -> str:
    """Say in words of which ranks and generations there are logs."""
    found = [(what, sorted({entry[what.capitalize()] for entry in entries})) for what in ("rank", "generation")]
    return ", ".join(f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}" for what, numbers in found)


def _print_log(service: Any, name: str, entry: Json) -> None:
    of = f"generation {entry['Generation']} · rank {entry['Rank']}"
    if entry.get("Key") is None:
        say(f"--- {of} · missing: {entry['MissingReason']}")
        return
    say(f"--- {of} · {entry['Stream']} · {size(entry['Bytes'])}")
    target = sys.stdout if entry.get("Stream") == "stdout" else sys.stderr
    target.flush()
    for chunk in service.get_log(TrainingJobName=name, Key=entry["Key"])["Body"].iter_chunks():
        target.buffer.write(chunk)
    target.buffer.flush()


def _facts(job: Json) -> list[tuple[str, object]]:
    stopping = job["StoppingCondition"]
    cost = job.get("CostUsd")
    return [
        ("name", job["TrainingJobName"]),
        ("status", f"{job['TrainingJobStatus']} ({job['SecondaryStatus']})"),
        ("reason", job["Reason"]),
        ("queue", _queue(job) if "QueuePosition" in job else None),
        ("run", job["RunId"]),
        ("fleet", job["FleetName"]),
        ("project", job["Project"]),
        ("ranks", f"{job['NodeCount']} nodes × {job['RanksPerNode']}, {job['Protection']['Copies']} copies of every shard"),
        ("generation", f"{job['Generation']} (from step {job['BaseStep']})" if job["Generation"] else "none yet"),
        ("step", f"{step(job['Boundary'])}, committed {step(job['CommittedStep'])}, highest {step(job['MaxBoundary'])}"),
        ("nodes", ", ".join(job["NodeIds"]) or None),
        ("coordinator", job.get("CoordinatorNodeId")),
        ("incidents", incident_words(job)),
        ("entry point", job["EntryPoint"]),
        ("hyperparameters", ", ".join(f"{name}={value}" for name, value in job["HyperParameters"].items()) or None),
        ("checkpoints", f"every {job['CheckpointConfig']['EverySteps']} steps" if job["CheckpointConfig"]["EverySteps"] else "only when it stops"),
        ("outputs", job["OutputDataConfig"]["S3OutputPath"]),
        ("limits", ", ".join(f"{name} {value}" for name, value in stopping.items() if value is not None) or None),
        ("created", moment(job["CreationTime"])),
        ("started", moment(job.get("TrainingStartTime"))),
        ("ended", moment(job.get("TrainingEndTime"))),
        ("time spent", job_time(job)),
        ("ETTR", ettr_words(job)),
        ("cost so far", None if cost is None else f"{dollars(cost)} for {hours(job['NodeSeconds'])} node-hours"),
        ("story", "\n".join(_story(job)) or None),
    ]


def _queue(job: Json) -> str:
    behind = ", ".join(job["QueuedBehind"])
    return f"place {job['QueuePosition']}{f', behind {behind}' if behind else ''}"


def _story(job: Json) -> list[str]:
    lines = []
    for transition in job["SecondaryStatusTransitions"]:
        time = transition["StartTime"].astimezone(UTC).strftime("%H:%M:%S")
        lines.append(f"{time} {transition['Status']}: {transition['StatusMessage']}")
    return lines
