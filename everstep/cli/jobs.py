"""`everstep jobs …`: submit, list, describe, top, wait, logs, output, pause, resume, rehearse, update, diff, stop …

The module has more than 500 lines. It is not divided, because each command is one short function. Larger parts (tables,
logs, progress) are in separate modules.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from everstep import refusals, sources
from everstep.cli import determinism, plans, steps, submission
from everstep.cli import logs as lines
from everstep.cli.accounting import dollars, ettr_words, hours, incident_words, job_time
from everstep.cli.board import Board, picture, with_jobs
from everstep.cli.commands import Output, Pages, Query, Service, Shown, command, searched, show_value
from everstep.cli.formats import OutputFormat
from everstep.cli.names import JobName
from everstep.cli.output import (
    FAILED,
    OLDER_CHECKPOINT,
    Facts,
    Json,
    Rows,
    condition_words,
    counted,
    duty_words,
    moment,
    plot,
    protection_words,
    say,
    show,
    size,
    stdout,
    step,
    when,
    without_none,
)
from everstep.cli.progress import Progress
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns, Detail, Prose
from everstep.cli.top import jobs_under_way, live
from everstep.cli.waiting import ended
from everstep.errors import ConfigurationError, WaitFailed
from everstep.protocol.rank_messages import OWN_METRICS

app = typer.Typer(no_args_is_help=True, add_completion=False)

PLOT_POINTS: Final = 40
"""Number of points of a plot, each one character wide."""
LEFT_OUT_SHOWN: Final = 6
"""Maximum number of excluded files and directories that `jobs submit` names."""
MAX_STDIN_LENGTH: Final = 65_536
"""Maximum number of characters that `jobs exec` sends to the program's stdin. The service's contract sets the limit."""


class Stream(StrEnum):
    """The output of each rank that `jobs logs` prints: stdout, stderr or both."""

    STDOUT = "stdout"
    STDERR = "stderr"
    BOTH = "both"


_FIELDS: Final = FieldsOf(
    "CreateTrainingJob",
    names={
        "TrainingJobName": "--name",
        "FleetName": "--fleet",
        "HyperParameters": "--hyperparameter",
        "Secrets": "--secret",
        "Tags": "--tag",
        "InputDataConfig": "--input",
        "OutputDataConfig.S3OutputPath": "--output-s3-path",
        "InitialCheckpoint.TrainingJobName": "--initial-checkpoint-job",
        "CheckpointConfig.ThirdSlot": "--third-slot/--no-third-slot",
        "CheckpointConfig.MaxUploadsInFlight": "--max-uploads-in-flight",
        "CheckpointConfig.MaxUploadBytesPerSecond": "--checkpoint-max-bytes-per-second",
        "CheckpointConfig.StorePatienceSeconds": "--store-patience-seconds",
        "StoppingCondition.MaxPendingTimeInSeconds": "--max-pending-seconds",
        # These come from the command line and from other options.
        **dict.fromkeys(("Source.SourceId", "Arguments", "ClientRequestToken", "DryRun"), ""),
    },
)


_FILTERS: Final = FieldsOf(
    "ListTrainingJobs",
    names={
        "FleetName": "--fleet",
        "StatusEquals": "--status",
        **dict.fromkeys(("TagKey", "TagValue", "SortOrder", "ChangesSince"), ""),
    },
)


@command(app)
def submit(
    service: Service,
    command_line: Annotated[
        list[str] | None,
        typer.Argument(help="The script with its arguments, after --: everstep jobs submit -- python train.py --fp16"),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="The job as YAML or JSON with the API's fields, - for stdin; options override it."
        ),
    ] = None,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", help="Field=value; overrides a field of the file: NodeCount=8, HyperParameters.lr=1e-3."),
    ] = None,
    source_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the code to upload, without the files that .everstepignore and .gitignore name."
        ),
    ] = None,
    fields: Annotated[Request, _FIELDS],
    check_determinism: Annotated[
        bool,
        typer.Option(
            "--check-determinism",
            help="Instead of training, repeat the first steps after a restart and name the first difference.",
        ),
    ] = False,
    check_steps: Annotated[
        int | None, typer.Option(min=2, max=1000, help="Steps of a determinism check; by default 8.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload the code, show the plan, and start nothing.")
    ] = False,
    list_source: Annotated[
        bool, typer.Option("--list-source", help="List the files to upload and those left out, and start nothing.")
    ] = False,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> Shown:
    """Upload the code, show the plan, and start a training job."""
    check = determinism.variables(check_steps, is_check=check_determinism)
    if check:
        fields = submission.joined(fields, {"Environment": check})
    if patterns := fields.get("OutputDataConfig", {}).get("Keep"):
        fields["OutputDataConfig"]["Keep"] = ",".join(patterns).split(",")
    fields = submission.joined(fields, submission.of_command_line(command_line or []))
    written = submission.changed(submission.from_file(file) if file is not None else {}, set_field or [])
    if source_dir is not None:
        written["Source"] = {"Directory": str(source_dir)}
    if "InputDataConfig" in fields:
        fields["InputDataConfig"] = submission.channels(written.get("InputDataConfig"), fields["InputDataConfig"])
    request = submission.named(submission.joined(written, fields))
    dry_run = bool(request.pop("DryRun", False)) or dry_run
    directory = submission.directory_of(request)
    if list_source:
        return _source_of(directory)
    if directory is not None:
        files, left_out = sources.listing(Path(directory))
        if left_out:
            say(
                f"left out: {', '.join(f'{each.path} ({each.reason})' for each in left_out[:LEFT_OUT_SHOWN])}"
                f"{' …' if len(left_out) > LEFT_OUT_SHOWN else ''}. --list-source shows all"
            )
        given = [f"--{name}={value}" for name, value in request.get("HyperParameters", {}).items()]
        paths = (path for path, _ in files)
        for place, option, refusal in refusals.find(Path(directory), paths, [*given, *request.get("Arguments", ())]):
            say(f"{place}: Everstep refuses {option} when training begins: {refusal.reason}. {refusal.alternative}")
        request["Source"] = service.upload_source(Directory=directory)
    name = request["TrainingJobName"]
    planned: Json = {}
    if dry_run or output is OutputFormat.TABLE:
        planned = cast(Json, service.create_training_job(**request, DryRun=True))
    plan = Facts(plans.facts(planned["Plan"])) if planned else Facts(())
    if dry_run:
        return Shown(
            planned,
            plan,
            f"{name} can run with this request; nothing was started. next: the same command without --dry-run",
        )
    if planned and query is None:
        show(plan)  # Print the plan before the request, so that an error appears below it.
    created = service.create_training_job(**request)
    if check:
        return determinism.verdict_of(service, request["TrainingJobName"])
    shape = (planned["Plan"]["NodeCount"], planned["Plan"]["RanksPerNode"]) if planned else (0, 0)
    ranks = f"{counted(shape[0], 'node')} × {counted(shape[1], 'rank')}" if planned else ""
    commands = ("jobs top", "jobs wait", "jobs logs -f", "protection describe")
    return Shown(
        created, f"submitted {name}: {ranks}", f"next: {'   '.join(f'everstep {each} {name}' for each in commands)}"
    )


def _source_of(directory: str | None) -> Shown:
    if directory is None:
        raise ConfigurationError("--list-source needs --source-dir.")
    found = sources.listing(Path(directory))
    rows = [{"Path": path, "Bytes": count} for path, count in found.files]
    left_out = [{"Path": each.path, "Reason": each.reason} for each in found.left_out]
    return Shown(
        {"Files": rows, "LeftOut": left_out},
        (
            Rows(rows, {"FILE": "Path", "SIZE": lambda row: size(row["Bytes"])}, f"{directory} has no file to run"),
            Rows(left_out, {"LEFT OUT": "Path", "REASON": "Reason"}, "nothing is left out"),
        ),
        f"{counted(len(rows), 'file')}, {size(sum(count for _, count in found.files))}",
    )


@command(app, "list")
def list_jobs(
    service: Service,
    pages: Pages,
    tag: Annotated[str | None, typer.Option(help="Only jobs with this tag: name, or name=value.")] = None,
    ascending: Annotated[
        bool, typer.Option("--ascending", help="Sort in ascending order: oldest first, or by name from A.")
    ] = False,
    *,
    fields: Annotated[Request, _FILTERS],
) -> Shown:
    """List training jobs, newest first by default."""
    tag_key, equals, tag_value = (tag or "").partition("=")
    answer = pages.of(
        service,
        "list_training_jobs",
        TagKey=tag_key or None,
        TagValue=tag_value if equals else None,
        SortOrder="Ascending" if ascending else None,
        **fields,
    )
    found = answer["TrainingJobSummaries"]
    has_several_projects = len({job["Project"] for job in found}) > 1
    columns: Columns = {
        "NAME": "TrainingJobName",
        **({"PROJECT": "Project"} if has_several_projects else {}),
        "STATUS": lambda job: f"{job['SecondaryStatus']}{', in the trash' if 'PurgeTime' in job else ''}",
        "STEP": steps.reached,
        "LEFT": lambda job: steps.remaining(job) or "-",
        "NODES": Detail("NodeCount"),
        "COMMITTED": Detail(lambda job: step(job["CommittedStep"])),
        "FLEET": Detail("FleetName"),
        "CREATED (UTC)": Detail(lambda job: when(job["CreationTime"])),
        "TO DO": Prose(duty_words),
        "REASON": Prose("Reason"),
    }
    return Shown(answer, Rows(found, columns, empty="No training jobs. Submit one: everstep jobs submit --help"))


@command(app)
def describe(service: Service, name: JobName) -> Shown:
    """Show all details of a training job."""
    job = service.describe_training_job(TrainingJobName=name)
    return Shown(job, Facts(_facts(job)))


@command(app)
def top(
    service: Service,
    name: Annotated[str | None, typer.Argument(help="Only this training job: its name or RunId.")] = None,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> Shown | None:
    """Watch unfinished jobs live until ^C: status, steps, step rate and events.

    Where stdout is not a terminal, the command prints the current state once.
    """
    console = stdout()
    if output is not OutputFormat.TABLE or query is not None:
        return Shown({"TrainingJobSummaries": jobs_under_way(service, name)}, ())
    if console.is_terminal:
        live(service, name, console)
    else:
        now = datetime.now(UTC)
        console.print(picture(with_jobs(Board(), jobs_under_way(service, name), now), now, console.width))
    return None


@command(app)
def wait(
    service: Service,
    name: JobName,
    timeout: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two polls.")] = 1.0,
) -> Shown:
    """Follow a training job until it ends. Exit code 0 only for Completed, 255 if the job has not ended in time.

    Exit code 3 if the job completed, and its final checkpoint lies before its last step.
    """
    with Progress(service, name) as progress:
        job = ended(service, name, show=progress.show, interval_seconds=interval, timeout_seconds=timeout)
    status = job["TrainingJobStatus"]
    if status != "Completed":
        raise WaitFailed(f"{name} is {status}: {job['Reason']}", hint=f"everstep jobs logs {name} --rank 0 --tail 50")
    sentence = f"{name} is Completed at step {step(job['MaxBoundary'])}, {counted(job['IncidentCount'], 'incident')}"
    is_older = job["SecondaryStatus"] == "CompletedWithOlderCheckpoint"
    if is_older:
        sentence += f". Its final checkpoint is older: step {step(job['FinalCheckpointStep'])}"
    exit_code = OLDER_CHECKPOINT if is_older else 0
    return Shown(job, sentence, f"next: everstep jobs output {name} --to DIR", exit_code=exit_code)


@command(app)
def note(service: Service, name: JobName, text: Annotated[str, typer.Argument(help="Text of the note.")]) -> Shown:
    """Add a note to a training job, ended or not. `notes` shows the notes."""
    added = service.create_training_job_note(TrainingJobName=name, Text=text)
    return Shown(added, f"note {added['NoteId']} was added to {name}")


@command(app)
def notes(service: Service, name: JobName) -> Shown:
    """List the notes of a training job. The notes of an incident are shown with the incident."""
    answer = service.list_training_job_notes(TrainingJobName=name)
    columns: Columns = {
        "TIME (UTC)": lambda row: when(row["CreationTime"]),
        "AUTHOR": "Author",
        "NOTE": Prose("Text"),
    }
    return Shown(answer, Rows(answer["Notes"], columns, empty=f"{name} has no notes."))


@command(app)
def logs(
    service: Service,
    name: JobName,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Only this generation (launch of all ranks).")] = None,
    stream: Annotated[Stream, typer.Option(help="Stream to print.")] = Stream.BOTH,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new output of all ranks, merged, until the job has ended."),
    ] = False,
    since: Annotated[
        str | None, typer.Option(help="Start 90s, 10m, 2h or 1d ago, or at a time such as 2026-03-01T12:00:00.")
    ] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines that contain this text.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only this many of the newest lines. Not with -f.")] = None,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> None:
    """Print the output of all ranks, merged, with times. The ranks' stdout goes to stdout, all else to stderr."""
    is_printed = output is OutputFormat.TABLE and query is None
    begin = None if since is None else lines.since_when(since, datetime.now(UTC))
    wanted = without_none(Rank=rank, Generation=generation, FilterPattern=grep, StartTime=begin)
    if tail is not None and follow:
        raise typer.BadParameter("--tail and --follow exclude each other; use --since with -f", param_hint="--tail")
    if tail is not None:
        found = iter(lines.tail(service, name, wanted, tail))
    else:
        found = lines.follow(service, name, wanted) if follow else lines.read(service, name, wanted)
    of_stream = (event for event in found if stream is Stream.BOTH or event["Stream"] in (stream.value, "gap"))
    lines.show(
        lines.settled(of_stream) if is_printed and not follow else of_stream,
        None if is_printed else lambda event: show_value(searched(event, query), output, is_one_of_many=True),
    )


@command(app)
def metrics(
    service: Service,
    name: JobName,
    metric: Annotated[
        str | None, typer.Option(help="Only this metric. Names that begin with everstep/ are measured by Everstep.")
    ] = None,
) -> Shown:
    """Print the newest value of each metric that the script logs, with a plot over the steps of the job."""
    answer = service.get_metric_data(TrainingJobName=name, MaxPoints=PLOT_POINTS, **without_none(MetricName=metric))
    rows = [
        {**each, "Step": each["LastSteps"][-1], "Value": f"{each['LastValues'][-1]:.6g}", "Plot": plot(each["Means"])}
        for each in answer["MetricDataResults"]
        if each["Steps"] and (metric is not None or not each["MetricName"].startswith(OWN_METRICS))
    ]
    columns: Columns = {"METRIC": "MetricName", "STEP": "Step", "VALUE": "Value", "MEANS BY STEP": Detail("Plot")}
    return Shown(cast(Json, answer), Rows(rows, columns, "The script has logged no values yet (session.log)."))


@command(app, "exec")
def execute(
    service: Service,
    name: JobName,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- PROGRAM [ARGUMENT]…", help="Program to run; {pid} is replaced by the rank's process id."
        ),
    ],
    rank: Annotated[int, typer.Option(min=0, help="Rank on whose node the program runs.")],
    timeout: Annotated[int, typer.Option(min=1, max=50, help="Kill the program after this many seconds.")] = 30,
    stdin: Annotated[
        bool,
        typer.Option("--stdin", "-i", help="Send this command's stdin to the program, at most 65,536 characters."),
    ] = False,
) -> Shown:
    """Run a program on the node of a rank: jobs exec gpt --rank 0 -- py-spy dump.

    The program runs without a shell, as the Linux user of the job's ranks. The fleet must allow commands, and the job's
    history records each command.
    """
    given = without_none(Stdin=_stdin_text() if stdin else None)
    answer = service.execute_command(TrainingJobName=name, Rank=rank, Command=words, TimeoutInSeconds=timeout, **given)
    cut = ["the rest of the output was discarded"] if answer["IsOutputCut"] else []
    late = [f"ended after {timeout} s"] if answer["IsTimedOut"] else []
    error_output = [answer["Stderr"].removesuffix("\n")] if answer["Stderr"] else []
    person = answer["Stdout"].removesuffix("\n") if answer["Stdout"] else ()
    return Shown(answer, person, "\n".join([*error_output, *cut, *late]), exit_code=answer.get("ExitCode", FAILED))


def _stdin_text() -> str:
    """Return all of stdin, cut to one character more than the limit, so that the service can reject a longer text."""
    try:
        return sys.stdin.read(MAX_STDIN_LENGTH + 1)
    except UnicodeDecodeError as error:
        raise ConfigurationError("The content of stdin is not UTF-8 text.") from error


@command(app, "output")
def download_output(
    service: Service,
    name: JobName,
    to: Annotated[Path, typer.Option("--to", help="Directory for the files, as rank=<r>/…; created if missing.")],
    generation: Annotated[
        int | None, typer.Option(min=1, help="Only this generation; by default the newest file of each path.")
    ] = None,
) -> Shown:
    """Download the files that the ranks wrote to EVERSTEP_OUTPUT_DIR, and those that --keep stored."""
    written = service.download_outputs(TrainingJobName=name, Directory=to, Generation=generation)
    files, total = counted(len(written), "file"), size(sum(path.stat().st_size for path in written))
    job = service.describe_training_job(TrainingJobName=name)
    lines = [f"not in S3: {each['Path']} ({each['Cause']})" for each in job["UnstoredOutputs"]]
    if (more := job["UnstoredOutputCount"] - len(lines)) > 0:
        lines.append(f"not in S3: {more} more")
    body = {"Files": [str(path) for path in written], "UnstoredOutputs": job["UnstoredOutputs"]}
    return Shown(body, f"{files}, {total}, in {to}", "\n".join(lines))


@command(app)
def stop(service: Service, name: JobName) -> Shown:
    """Ask a training job to stop: all ranks stop at the same step, and the state at this step is stored in S3."""
    job = service.stop_training_job(TrainingJobName=name)
    return Shown(job, f"{name} is {job['TrainingJobStatus']}", f"next: everstep jobs wait {name}")


@command(app)
def pause(
    service: Service,
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the nodes of the job are free.")] = False,
) -> Shown:
    """Ask a training job to pause: all ranks stop at the same step, and its state is stored in S3.

    The nodes of the job are free until the job is resumed.
    """
    job: Json = service.pause_training_job(TrainingJobName=name)
    if wait:
        service.get_waiter("training_job_paused").wait(
            TrainingJobName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 3600}
        )
        job = service.describe_training_job(TrainingJobName=name)
    return Shown(
        job, f"{name} is {job['SecondaryStatus']}", f"next: everstep jobs describe {name}   everstep jobs resume {name}"
    )


@command(app)
def resume(service: Service, name: JobName) -> Shown:
    """Continue a paused training job from its checkpoint when its turn in the queue comes."""
    job = service.resume_training_job(TrainingJobName=name)
    return Shown(job, f"{name} is {job['SecondaryStatus']}: {job['Reason']}", f"next: everstep jobs wait {name}")


@command(app)
def rehearse(service: Service, name: JobName) -> Shown:
    """Let a training job prove that a restart repeats its steps bit for bit. The job loses no progress."""
    job = service.rehearse_training_job(TrainingJobName=name)
    return Shown(job, f"{name} rehearses its resume when it trains", f"next: everstep jobs describe {name}")


@command(app)
def update(
    service: Service,
    name: JobName,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The job as YAML or JSON, - for stdin; fields that differ are changed."),
    ] = None,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", help="Field=value: Priority=5, StoppingCondition.MaxRuntimeInSeconds=0."),
    ] = None,
) -> Shown:
    """Change an unfinished training job: creates a new revision. The service names each field that cannot change."""
    job: Json = service.describe_training_job(TrainingJobName=name)
    written = submission.from_file(file) if file is not None else {}
    wanted = submission.changed({**submission.texts_of(job, set_field or []), **written}, set_field or [])
    request: dict[str, Any] = {**submission.difference(job, wanted), "TrainingJobName": name}
    answer: Json = service.update_training_job(**request)
    if not answer["Changes"]:
        return Shown(answer, f"{name} already has these values: revision {answer['Revision']}")
    return Shown(answer, (f"{name} has revision {answer['Revision']}", Rows(answer["Changes"], _CHANGES, empty="")))


@command(app)
def diff(
    service: Service,
    name: JobName,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="A job as YAML or JSON, - for stdin: show the changes of an update with this file."
        ),
    ] = None,
) -> Shown:
    """Show the changes of each revision of a training job, or the changes that a file would cause."""
    if file is not None:
        job: Json = service.describe_training_job(TrainingJobName=name)
        changes: list[Json] = list(submission.lines(job, submission.difference(job, submission.from_file(file))))
    else:
        revisions: Sequence[Json] = list(
            service.get_paginator("list_training_job_revisions").paginate(TrainingJobName=name).search("Revisions[]")
        )
        changes = [
            {"REVISION": str(each["Revision"]), "Time": each["Time"], **change}
            for each in revisions
            for change in each["Changes"]
        ]
    columns: Columns = (
        _CHANGES
        if file is not None
        else {"REVISION": "REVISION", "TIME (UTC)": lambda change: when(change["Time"]), **_CHANGES}
    )
    empty = "Nothing differs." if file is not None else "The job has not changed since its creation."
    return Shown({"Changes": changes}, Rows(changes, columns, empty))


def _goes(given: Json) -> str | None:
    """Return the question to confirm before a job is deleted; None for a dry run, which deletes nothing."""
    if given["dry_run"]:
        return None
    what = f"Delete the training job {given['name']}{', with all that it has in S3' if given['delete_objects'] else ''}"
    is_trashed = given["delete_objects"] and not given["skip_trash"]
    return f"{what} {'after its time in the trash' if is_trashed else 'permanently'}?"


@command(app, asks=_goes)
def delete(
    service: Service,
    name: JobName,
    delete_objects: Annotated[
        bool, typer.Option("--delete-objects", help="Also delete its checkpoints, logs and outputs in S3.")
    ] = False,
    skip_trash: Annotated[
        bool, typer.Option("--skip-trash", help="With --delete-objects: at once and for good, also from the trash.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
) -> Shown:
    """Delete a training job that has ended. Its objects in S3 are kept unless --delete-objects is set.

    With --delete-objects, the job stays in the trash for CheckpointConfig.TrashHours, with all that it has in S3.
    """
    given: Any = {"TrainingJobName": name, "DeleteObjects": delete_objects, "SkipTrash": skip_trash}
    gone = cast(Json, service.delete_training_job(**given, DryRun=dry_run))
    count, total = gone["ObjectCount"], gone["ObjectBytes"]
    while not dry_run and gone["HasMoreObjects"]:
        say(f"{counted(count, 'object')} deleted, {size(total)}")
        gone = cast(Json, service.delete_training_job(**given))
        count, total = count + gone["ObjectCount"], total + gone["ObjectBytes"]
    whole = {**gone, "ObjectCount": count, "ObjectBytes": total}
    rows = ", ".join(
        counted(gone[f"{noun.capitalize()}Count"], noun) for noun in ("generation", "checkpoint", "incident")
    )
    more = "more than " if gone["HasMoreObjects"] else ""
    objects = f"{more}{counted(count, 'object')}, {size(total)}, below {', '.join(gone['S3Uris'])}"
    if dry_run:
        return Shown(
            whole,
            (
                f"Would delete {name} with {rows}; objects in S3 that would be "
                f"{'deleted' if delete_objects else 'kept'}: {objects}"
            ),
        )
    if "PurgeTime" in gone:
        words = f"{name} is in the trash until {when(gone['PurgeTime'])} UTC, with {rows} and all objects in S3"
        return Shown(whole, words, f"to undo: everstep jobs undelete {name}")
    left = f"deleted in S3: {objects}" if delete_objects else f"objects kept in S3: {', '.join(gone['S3Uris'])}"
    return Shown(whole, f"deleted {name} with {rows}; {left}")


@command(app)
def undelete(service: Service, name: JobName) -> Shown:
    """Take a training job out of the trash, with all of its checkpoints."""
    job = service.undelete_training_job(TrainingJobName=name)
    return Shown(job, f"{name} is out of the trash", f"next: everstep checkpoints list {name}")


_CHANGES: Columns = {"FIELD": "Field", "BEFORE": "Before", "AFTER": "After", "APPLIES": "Applies"}


@command(app, "take-over")
def take_over(
    service: Service, name: JobName, reason: Annotated[str, typer.Option(help="Reason, recorded in the history.")] = ""
) -> Shown:
    """Take control of a training job: Everstep observes the job but decides nothing until you hand it back."""
    job = service.take_over_training_job(TrainingJobName=name, Reason=reason)
    return Shown(job, f"{name} is yours", f"next: everstep jobs describe {name}   everstep jobs hand-back {name}")


@command(app, "hand-back")
def hand_back(service: Service, name: JobName) -> Shown:
    """End a person's takeover of a training job, so that Everstep controls the job again."""
    job = service.hand_back_training_job(TrainingJobName=name)
    return Shown(job, f"Everstep manages {name} again")


@command(app, "accept-loss")
def accept_loss(
    service: Service,
    name: JobName,
    from_step: Annotated[int, typer.Option(min=0, help="Step from which the job repeats its training.")],
) -> Shown:
    """Let a job that waits for a decision continue from an older step, and repeat the training since then."""
    job = service.accept_loss(TrainingJobName=name, FromStep=from_step)
    return Shown(job, f"{name} continues from step {from_step}", f"next: everstep jobs describe {name}")


def _facts(job: Json) -> list[tuple[str, object]]:
    stopping = job["StoppingCondition"]
    cost = job.get("CostUsd")
    return [
        ("name", job["TrainingJobName"]),
        ("status", f"{job['TrainingJobStatus']} ({job['SecondaryStatus']})"),
        ("in the trash until", moment(job["PurgeTime"]) if "PurgeTime" in job else None),
        ("reason", job["Reason"]),
        ("to do", duty_words(job)),
        ("conditions", condition_words(job)),
        ("queue", _queue(job) if "QueuePosition" in job else None),
        ("run", job["RunId"]),
        ("fleet", job["FleetName"]),
        ("project", job["Project"]),
        (
            "ranks",
            f"{counted(job['NodeCount'], 'node')} × {job['RanksPerNode']}, {protection_words(job['Protection'])}",
        ),
        ("generation", f"{job['Generation']} (from step {job['BaseStep']})" if job["Generation"] else "none yet"),
        ("progress", steps.words(job)),
        ("committed step", step(job["CommittedStep"])),
        ("highest step", step(job["MaxBoundary"])),
        ("nodes", ", ".join(job["NodeIds"]) or None),
        ("coordinator", job.get("CoordinatorNodeId")),
        ("incidents", incident_words(job)),
        ("entry point", job["EntryPoint"]),
        ("module", job.get("Module")),
        ("arguments", shlex.join(job.get("Arguments", [])) or None),
        ("hyperparameters", ", ".join(f"{name}={value}" for name, value in job["HyperParameters"].items()) or None),
        ("resume", _resume(job)),
        ("checkpoints", job["CheckpointActivity"]["Policy"]),
        ("next checkpoint", _next_checkpoint(job["CheckpointActivity"])),
        ("upload", _upload(job["CheckpointActivity"])),
        ("last upload", _last_upload(job["CheckpointActivity"])),
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


def _resume(job: Json) -> str | None:
    result, pending = job.get("RehearsalResult"), "a rehearsal is pending" if job.get("IsRehearsalPending") else None
    if result is None:
        return pending
    if result["Verdict"] == "Proven":
        words = f"Resume proven at step {result['Step']} ({result['Seconds']:.0f} s)"
    elif "Rank" not in result:
        words = f"not rehearsed until step {result['Step']}"
    else:
        what = {
            "Refused": "cannot rehearse at",
            "Unstable": "is not deterministic after",
            "Unproven": "repeats its steps and loses values after",
        }
        words = f"rank {result['Rank']} {what.get(result['Verdict'], 'differs after')} step {result['Step']}"
    if texts := [text for text in (result.get("Message"), result.get("Advice")) if text]:
        words += f": {'. '.join([*(text.rstrip('.') for text in texts[:-1]), texts[-1]])}"
    return f"{words}; {pending}" if pending else words


def _next_checkpoint(activity: Json) -> str | None:
    due = [
        *([f"from step {activity['NextStep']} on"] if "NextStep" in activity else []),
        *([f"from {moment(activity['NextTime'])} on"] if "NextTime" in activity else []),
    ]
    return " or ".join(due) or None


def _upload(activity: Json) -> str | None:
    if (upload := activity.get("Upload")) is None:
        return None
    share = upload["StoredBytes"] / upload["TotalBytes"] if upload["TotalBytes"] else 0.0
    slowest = f"{size(upload['SlowestStoredBytes'])} of {size(upload['SlowestTotalBytes'])}"
    return f"uploading the checkpoint of step {upload['Step']}: {share:.0%} (rank {upload['SlowestRank']}: {slowest})"


def _last_upload(activity: Json) -> str | None:
    if "LastUploadSeconds" not in activity:
        return None
    cost = activity.get("LastUploadCostSeconds", 0.0)
    return f"{activity['LastUploadSeconds']:.1f} s, which cost {cost:.1f} s of training"


def _queue(job: Json) -> str:
    behind = ", ".join(job["QueuedBehind"])
    return f"place {job['QueuePosition']}{f', behind {behind}' if behind else ''}"


def _story(job: Json) -> list[str]:
    lines: list[str] = []
    for transition in job["SecondaryStatusTransitions"]:
        time = transition["StartTime"].astimezone(UTC).strftime("%H:%M:%S")
        lines.append(f"{time} {transition['Status']}: {transition['StatusMessage']}")
    return lines
