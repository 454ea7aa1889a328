"""`everstep jobs …`: submit, list, describe, wait, logs, output, pause, resume, update, diff, stop, delete."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import logs as lines
from everstep.cli import plans, submission
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
    file: Annotated[Path | None, typer.Option("--file", "-f", help="The job as YAML or JSON, in the API's words; options win over it.")] = None,
    set_field: Annotated[list[str] | None, typer.Option("--set", help="Field=value, changes the file: NodeCount=8, HyperParameters.lr=1e-3.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; made of the entry point and the time where it is left out.")] = None,
    source_dir: Annotated[Path | None, typer.Option(help="Directory with the code; packed and uploaded, without what .everstepignore names.")] = None,
    entry_point: Annotated[str | None, typer.Option(help="Python file in the source directory that every rank runs.")] = None,
    node_count: Annotated[int | None, typer.Option(help="How many nodes.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="How many ranks on each node; 1 unless said.")] = None,
    copies: Annotated[int | None, typer.Option(help="Nodes that keep every shard in memory, its own included; 2 unless there is one node.")] = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(
            help="What snapshots may cost training, as a part of an iteration; above it they come less often. 0.01 unless said, 1 on a local cluster."
        ),
    ] = None,
    checkpoint_every_steps: Annotated[int | None, typer.Option(help="A checkpoint in S3 every so many steps; 0: only when the job stops.")] = None,
    hyperparameter: Annotated[list[str] | None, typer.Option(help="name=value, given to the script; may be repeated.")] = None,
    environment: Annotated[list[str] | None, typer.Option(help="NAME=value, environment variable of the ranks; may be repeated.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Fleet to run on; may be left out where there is one.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher first; of equal ones the oldest.")] = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Upload the code, show the plan, and start nothing.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Upload the code, show the plan, and start a training job."""
    options = without_none(
        TrainingJobName=name,
        Source=None if source_dir is None else {"Directory": str(source_dir)},
        EntryPoint=entry_point,
        NodeCount=node_count,
        RanksPerNode=ranks_per_node,
        FleetName=fleet,
        Priority=priority,
        Preemptible=preemptible or None,
        Project=project,
        HyperParameters=pairs("--hyperparameter", hyperparameter or []) or None,
        Environment=pairs("--environment", environment or []) or None,
        Tags=pairs("--tag", tag or []) or None,
        Protection=without_none(Copies=copies, MaxSlowdown=max_slowdown) or None,
        CheckpointConfig=without_none(EverySteps=checkpoint_every_steps, S3Uri=checkpoint_s3_uri, ThirdSlot=third_slot or None) or None,
        OutputDataConfig=without_none(S3OutputPath=output_s3_path) or None,
        StoppingCondition=without_none(MaxRuntimeInSeconds=max_runtime_seconds, MaxPendingTimeInSeconds=max_pending_seconds) or None,
        RetryStrategy=without_none(MaxAttempts=max_attempts) or None,
    )
    written = submission.changed(submission.from_file(file) if file is not None else {}, set_field or [])
    if source_dir is not None:
        written.pop("Source", None)
    request = submission.named(submission.joined(written, options))
    with connect() as service:
        directory = submission.directory_of(request)
        if directory is not None:
            request["Source"] = service.upload_source(Directory=directory)
        if dry_run or output is OutputFormat.TABLE:
            planned = service.create_training_job(**{**request, "DryRun": True})
            if output is OutputFormat.TABLE:
                show_facts(plans.facts(planned["Plan"]))
        created = planned if dry_run else service.create_training_job(**request)
    if output is OutputFormat.JSON:
        show_json(created)
        return
    name = request["TrainingJobName"]
    if dry_run:
        say(f"{name} can run as asked; nothing was started. next: the same command without --dry-run")
        return
    typer.echo(f"submitted {name}: {planned['Plan']['NodeCount']} nodes × {planned['Plan']['RanksPerNode']} ranks")
    say(f"next: everstep jobs wait {name}   everstep jobs logs {name} --rank 0   everstep protection describe {name}")


@app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="Only with this status: InProgress, Completed, Failed, Stopping, Stopped.")] = None,
    name_contains: Annotated[str | None, typer.Option(help="Only with this text in the name.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Only of this fleet.")] = None,
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only with this tag: name, or name=value.")] = None,
    sort_by: Annotated[str | None, typer.Option(help="CreationTime (unless said), LastModifiedTime, Name.")] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="The oldest, or the first by name, first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List training jobs, newest first unless sorted otherwise."""
    tag_key, equals, tag_value = (tag or "").partition("=")
    query = {
        "StatusEquals": status,
        "NameContains": name_contains,
        "FleetName": fleet,
        "Project": project,
        "TagKey": tag_key or None,
        "TagValue": tag_value if equals else None,
        "SortBy": sort_by,
        "SortOrder": "Ascending" if ascending else None,
    }
    with connect() as service:
        jobs = listed(service, "list_training_jobs", limit, **query)
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


@app.command()
def pause(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its nodes are free.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Ask a training job to pause: all ranks stop at one agreed step, kept in S3, and its nodes are free until it is resumed."""
    with connect() as service:
        job: Json = service.pause_training_job(TrainingJobName=name)
        if wait:
            service.get_waiter("training_job_paused").wait(TrainingJobName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 3600})
            job = service.describe_training_job(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    typer.echo(f"{name} is {job['SecondaryStatus']}")
    say(f"next: everstep jobs describe {name}   everstep jobs resume {name}")


@app.command()
def resume(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Let a paused training job go on from its checkpoint, once its turn in the queue has come."""
    with connect() as service:
        job = service.resume_training_job(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    typer.echo(f"{name} is {job['SecondaryStatus']}: {job['Reason']}")
    say(f"next: everstep jobs wait {name}")


@app.command()
def update(
    name: Name,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="The job as YAML or JSON; what differs from the job is changed.")] = None,
    set_field: Annotated[list[str] | None, typer.Option("--set", help="Field=value: Priority=5, StoppingCondition.MaxRuntimeInSeconds=0.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Change a training job that has not ended: a new revision. What cannot change is refused by name."""
    wanted = submission.changed(submission.from_file(file) if file is not None else {}, set_field or [])
    with connect() as service:
        request = submission.difference(service.describe_training_job(TrainingJobName=name), wanted)
        answer: Json = service.update_training_job(**{**request, "TrainingJobName": name})
    if output is OutputFormat.JSON:
        show_json(answer)
        return
    if not answer["Changes"]:
        typer.echo(f"{name} is so already: revision {answer['Revision']}")
        return
    typer.echo(f"{name} has revision {answer['Revision']}")
    show_rows(answer["Changes"], _CHANGES, empty="")


@app.command()
def diff(
    name: Name,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A job as YAML or JSON: show what an update with it would change.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show what each revision of a training job has changed, or what a file would change."""
    with connect() as service:
        if file is not None:
            job: Json = service.describe_training_job(TrainingJobName=name)
            changes: list[Json] = list(submission.lines(job, submission.difference(job, submission.from_file(file))))
        else:
            revisions: Sequence[Json] = service.list_training_job_revisions(TrainingJobName=name)["Revisions"]
            changes = [{"REVISION": str(each["Revision"]), "Time": each["Time"], **change} for each in revisions for change in each["Changes"]]
    if output is OutputFormat.JSON:
        show_json({"Changes": changes})
        return
    columns: Columns = _CHANGES if file is not None else {"REVISION": "REVISION", "TIME (UTC)": lambda change: when(change["Time"]), **_CHANGES}
    show_rows(changes, columns, empty="Nothing differs." if file is not None else "Nothing was changed since it was created.")


@app.command()
def delete(
    name: Name,
    delete_objects: Annotated[bool, typer.Option("--delete-objects", help="Its checkpoints, logs and outputs in S3, too; for good.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Forget a training job that has ended; what it left in S3 stays unless asked."""
    with connect() as service:
        gone: Json = service.delete_training_job(TrainingJobName=name, DeleteObjects=delete_objects, DryRun=dry_run)
        count, total = gone["ObjectCount"], gone["ObjectBytes"]
        while not dry_run and gone["HasMoreObjects"]:
            say(f"{count} objects deleted, {size(total)}")
            gone = service.delete_training_job(TrainingJobName=name, DeleteObjects=delete_objects)
            count, total = count + gone["ObjectCount"], total + gone["ObjectBytes"]
    if output is OutputFormat.JSON:
        show_json({**gone, "ObjectCount": count, "ObjectBytes": total})
        return
    rows = f"{gone['GenerationCount']} generations, {gone['CheckpointCount']} checkpoints, {gone['IncidentCount']} incidents"
    more = "more than " if gone["HasMoreObjects"] else ""
    objects = f"{more}{count} objects, {size(total)}, below {', '.join(gone['S3Uris'])}"
    if dry_run:
        typer.echo(f"{name} would be forgotten, with {rows}; {'deleted' if delete_objects else 'kept'} in S3: {objects}")
        return
    typer.echo(
        f"{name} is forgotten, with {rows}"
        + (f"; deleted in S3: {objects}" if delete_objects else f"; what it left in S3 stays: {', '.join(gone['S3Uris'])}")
    )


_CHANGES: Columns = {"FIELD": "Field", "BEFORE": "Before", "AFTER": "After", "APPLIES": "Applies"}


@app.command("take-over")
def take_over(name: Name, reason: Annotated[str, typer.Option(help="Why; told in the history.")] = "", output: Output = OutputFormat.TABLE) -> None:
    """Look after a training job yourself: Everstep observes it and decides nothing until it is handed back."""
    with connect() as service:
        job = service.take_over_training_job(TrainingJobName=name, Reason=reason)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    typer.echo(f"{name} is yours")
    say(f"next: everstep jobs describe {name}   everstep jobs hand-back {name}")


@app.command("hand-back")
def hand_back(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Let Everstep look after a training job again."""
    with connect() as service:
        job = service.hand_back_training_job(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(job)
        return
    typer.echo(f"{name} is looked after by Everstep")


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
