"""`everstep checkpoints …`: list, describe, create, verify, pin, delete, undelete and export a job's checkpoints."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.names import JobName
from everstep.cli.output import Facts, Json, Rows, counted, moment, size, stderr, when, without_none
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)

Step = Annotated[int, typer.Argument(min=0, help="Step of the checkpoint.")]
OfGeneration = Annotated[
    int | None, typer.Option("--generation", min=1, help="Generation that saved the step; by default the newest.")
]


MANY_FILES = 10
"""Minimum number of written files for which the command prints their number instead of their names."""


class CheckpointFormat(StrEnum):
    """File formats to which a checkpoint can be exported."""

    HF = "hf"
    DCP = "dcp"
    UNIVERSAL = "deepspeed-universal"


class Dtype(StrEnum):
    """Floating point types of an export."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ExportSource(StrEnum):
    """Places that an export reads from."""

    S3 = "s3"
    MEMORY = "memory"


@command(app, "list")
def list_checkpoints(
    service: Service,
    pages: Pages,
    name: JobName,
    min_step: Annotated[int | None, typer.Option(min=0, help="Only this step and later steps.")] = None,
    trash: Annotated[
        bool, typer.Option("--trash", help="Only checkpoints in the trash, which can be undeleted.")
    ] = False,
) -> Shown:
    """List the checkpoints of a training job, newest step first."""
    answer = pages.of(service, "list_checkpoints", TrainingJobName=name, MinStep=min_step, Trashed=trash or None)
    in_trash = answer.get("TrashBytes", 0)
    columns: Columns = {
        "STEP": "Step",
        "GENERATION": Detail("Generation"),
        "STATUS": _status,
        "SIZE": lambda checkpoint: size(checkpoint["Bytes"]),
        "COMPLETED (UTC)": lambda checkpoint: when(checkpoint.get("CompletionTime")),
        "PINNED": lambda checkpoint: "yes" if checkpoint["IsPinned"] else "",
        "VERIFIED": Prose(_verified),
        "WHERE": Detail("S3Uri"),
    }
    return Shown(
        answer,
        Rows(
            answer["Checkpoints"],
            columns,
            empty="No checkpoints in the trash."
            if trash
            else f"No checkpoints. Make one: everstep checkpoints create {name}",
        ),
        f"{size(in_trash)} {'in the trash' if trash else 'more in the trash: add --trash'}" if in_trash else "",
    )


@command(app)
def describe(service: Service, name: JobName, step: Step, generation: OfGeneration = None) -> Shown:
    """Show one checkpoint of a training job."""
    checkpoint = service.describe_checkpoint(
        **without_none(TrainingJobName=name, Step=step, Generation=generation),
    )
    facts = [
        ("step", str(checkpoint["Step"])),
        ("generation", str(checkpoint["Generation"])),
        ("status", _status(checkpoint)),
        ("size", size(checkpoint["Bytes"])),
        ("pinned", "yes" if checkpoint["IsPinned"] else "no"),
        ("verified", _verified(checkpoint) or "not yet"),
        ("manifest", checkpoint["S3Uri"]),
        ("created", moment(checkpoint["CreationTime"])),
        ("completed", moment(checkpoint.get("CompletionTime"))),
    ]
    is_complete = checkpoint["Status"] == "Complete"
    return Shown(
        checkpoint,
        Facts(facts),
        f"next: everstep checkpoints export {name} {step} --generation {checkpoint['Generation']} --to FOLDER"
        if is_complete
        else "",
    )


@command(app)
def create(service: Service, name: JobName) -> Shown:
    """Request a checkpoint in S3 of the next step that a running job commits.

    If the newest committed step is already in S3, the command requests nothing.
    """
    answer = service.create_checkpoint(TrainingJobName=name)
    if answer["Status"] == "Complete":
        return Shown(answer, f"step {answer['Step']} is already in S3")
    return Shown(
        answer,
        f"requested a checkpoint of step {answer['Step']} or the next step",
        f"next: everstep checkpoints list {name}",
    )


@command(app)
def export(
    service: Service,
    name: JobName,
    to: Annotated[str, typer.Option(help="Folder, or s3://bucket/prefix, that receives the files.")],
    step: Annotated[int | None, typer.Argument(min=0, help="Step of the checkpoint. Not with --from memory.")] = None,
    source: Annotated[
        ExportSource,
        typer.Option(
            "--from",
            help="s3: a checkpoint. memory: the newest committed step of a running job, through the control plane.",
        ),
    ] = ExportSource.S3,
    generation: OfGeneration = None,
    form: Annotated[
        CheckpointFormat,
        typer.Option(
            "--format",
            help="hf: the model, or its adapters of PEFT, as files that Hugging Face libraries open. dcp: model and "
            "optimizer states for torch.distributed.checkpoint. deepspeed-universal: the same for DeepSpeed's "
            "load_universal.",
        ),
    ] = CheckpointFormat.HF,
    strip: Annotated[
        str | None,
        typer.Option(
            help="Prefix to remove from names; tensors without it are skipped. By default the path of the transformers "
            "model, if the checkpoint has one."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert floating point tensors to this type.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the whole model, with its adapters merged into the weights.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="config.json to write, if the script's model did not come from transformers.")
    ] = None,
) -> Shown:
    """Export a checkpoint, or a running job's state, to Hugging Face, torch.distributed.checkpoint or DeepSpeed.

    Reads and writes S3 with your own AWS credentials. Parameters that ZeRO trains are exported as fp32 master weights.
    """
    # Import here, because these imports would slow down all other commands.
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    from everstep.checkpoints.checkpoint import open_checkpoint
    from everstep.checkpoints.export import export_safetensors, has_adapters
    from everstep.checkpoints.memory import held

    if form is not CheckpointFormat.HF and not (strip is None and dtype is None and config is None and not merge):
        raise typer.BadParameter("--strip, --dtype, --config and --merge need --format hf")
    is_memory = source is ExportSource.MEMORY
    if is_memory and not (step is None and generation is None):
        raise typer.BadParameter("--from memory exports the newest committed step; leave out STEP and --generation")
    if not is_memory and step is None:
        raise typer.BadParameter(f"STEP is missing; list the steps: everstep checkpoints list {name}")
    uri = "" if is_memory or step is None else _manifest_of(service, name, step, generation)
    columns = (*Progress.get_default_columns()[:-1], DownloadColumn(), TimeRemainingColumn())
    with (
        held(service, name) if is_memory else open_checkpoint(uri) as checkpoint,
        Progress(*columns, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as progress,
    ):
        found = int(checkpoint.manifest.step)
        bar = progress.add_task(f"step {found}", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        if merge or (form is CheckpointFormat.HF and strip is None and has_adapters(checkpoint)):
            kind = None if dtype is None else dtype.value
            exported = _export_for_torch(form)(checkpoint, to, merge=merge, dtype=kind, progress=show)
        elif form is CheckpointFormat.HF:
            exported = export_safetensors(
                checkpoint,
                to,
                strip=strip,
                dtype=None if dtype is None else dtype.value,
                config=None if config is None else _text_of(config),
                progress=show,
            )
        else:
            exported = _export_for_torch(form)(checkpoint, to, progress=show)
    body = {
        **({} if is_memory else {"S3Uri": uri}),
        "Step": found,
        "Files": list(exported.files),
        "Tensors": exported.tensors,
        "Bytes": exported.bytes,
        "LeftOut": list(exported.left_out),
    }
    what = f"{counted(exported.tensors, 'tensor')} of {size(exported.bytes)}"
    files = ", ".join(exported.files) if len(exported.files) < MANY_FILES else counted(len(exported.files), "file")
    done = f"exported {what}{f' at step {found}' if is_memory else ''} to {to}: {files}"
    left = counted(len(exported.left_out), "tensor")
    note = f"left out: {left} outside of the model, such as {exported.left_out[0]}" if exported.left_out else ""
    return Shown(body, done, note)


def _export_for_torch(form: CheckpointFormat) -> Any:
    from everstep.checkpoints.errors import CheckpointError

    try:
        if form is CheckpointFormat.HF:
            from everstep.checkpoints.adapters import export_adapters

            return export_adapters
        if form is CheckpointFormat.DCP:
            from everstep.checkpoints.dcp_export import export_dcp

            return export_dcp
        from everstep.checkpoints.universal import export_universal
    except ImportError as error:
        raise CheckpointError(
            f"--format {form} of this checkpoint needs another package: {error}",
            hint="next: pip install 'everstep[training]'"
            + (" transformers peft" if form is CheckpointFormat.HF else ""),
        ) from error
    return export_universal


def _text_of(path: Path) -> str:
    from everstep.checkpoints.errors import CheckpointError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _manifest_of(service: Any, name: str, step: int, generation: int | None) -> str:
    """Return the URI of the manifest of a job's complete checkpoint.

    Args:
        service: client whose `list_checkpoints` is called, with paging.
        name: name of the job that saved the step.
        step: number of finished optimizer steps.
        generation: generation that saved the step. None: the newest one.

    Returns:
        The manifest's URI, for example `s3://bucket/…/manifest.json`.

    Raises:
        CheckpointError: the job has no complete checkpoint of this step.
    """
    from everstep.checkpoints.errors import CheckpointError

    listed = service.get_paginator("list_checkpoints").paginate(TrainingJobName=name, MinStep=step)
    found = [
        each
        for each in listed.search("Checkpoints")
        if each["Step"] == step and each["Status"] == "Complete" and generation in (None, each["Generation"])
    ]
    if not found:
        raise CheckpointError(
            f"{name} has no complete checkpoint of step {step}", hint=f"next: everstep checkpoints list {name}"
        )
    return str(max(found, key=lambda each: int(each["Generation"]))["S3Uri"])


@command(
    app,
    "delete",
    asks=lambda given: (
        f"Delete the checkpoint of step {given['step']} of {given['name']} "
        f"{'from S3, for good' if given['skip_trash'] else 'after its time in the trash'}?"
    ),
)
def delete(
    service: Service,
    name: JobName,
    step: Step,
    generation: OfGeneration = None,
    skip_trash: Annotated[
        bool, typer.Option("--skip-trash", help="Delete it from S3 at once, for good, also if it is in the trash.")
    ] = False,
) -> Shown:
    """Move a checkpoint to the trash, from which it is deleted after CheckpointConfig.TrashHours.

    Refused for a pinned checkpoint and for the checkpoint that an unfinished job would restore from.
    """
    given = without_none(TrainingJobName=name, Step=step, Generation=generation, SkipTrash=skip_trash or None)
    checkpoint = cast(Json, service.delete_checkpoint(**given))
    what = f"the checkpoint of step {checkpoint['Step']}, generation {checkpoint['Generation']}, is"
    if checkpoint["Status"] != "Trashed":
        return Shown(checkpoint, f"{what} deleted")
    undo = f"to undo: everstep checkpoints undelete {name} {step} --generation {checkpoint['Generation']}"
    return Shown(checkpoint, f"{what} in the trash until {when(checkpoint['PurgeTime'])} UTC", undo)


def _add(verb: str, explanation: str, done: str, note: str = "") -> None:
    """Add a command that calls the operation `<verb>_checkpoint` for one checkpoint."""

    def do(service: Service, name: JobName, step: Step, generation: OfGeneration = None) -> Shown:
        operation: Any = getattr(service, f"{verb}_checkpoint")
        checkpoint: Json = operation(**without_none(TrainingJobName=name, Step=step, Generation=generation))
        sentence = f"the checkpoint of step {checkpoint['Step']}, generation {checkpoint['Generation']}, {done}"
        return Shown(checkpoint, sentence, note.format(name=name, step=step, generation=checkpoint["Generation"]))

    do.__doc__ = explanation
    command(app, verb)(do)


_add(
    "verify",
    "Read a checkpoint back and compare its hashes with its manifest. `describe` shows the result.",
    "verification started",
    "next: everstep checkpoints describe {name} {step} --generation {generation}",
)
_add("pin", "Protect a checkpoint from deletion until it is unpinned.", "is pinned")
_add("unpin", "Allow the deletion of a pinned checkpoint again.", "is not pinned")
_add("undelete", "Take a checkpoint out of the trash, and pin it.", "is out of the trash and pinned")


def _status(checkpoint: Json) -> str:
    until = f" until {when(checkpoint['PurgeTime'])}" if checkpoint["Status"] == "Trashed" else ""
    return f"{checkpoint['Status']}{until}"


def _verified(checkpoint: Json) -> str:
    state = checkpoint["Verification"]
    if state in ("Intact", "Damaged"):
        message = f": {checkpoint['VerificationMessage']}" if "VerificationMessage" in checkpoint else ""
        return f"{state.lower()} {when(checkpoint.get('VerificationTime'))}{message}"
    if state == "Waiting":
        return f"waits since {when(checkpoint.get('VerificationWaitingSince'))}: {checkpoint['VerificationMessage']}"
    return "being read" if state == "Verifying" else ""
