"""`everstep checkpoints …`: what of a job is in S3, made, read back, kept and let go."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli.output import Columns, Json, Output, OutputFormat, connect, say, show_json, show_rows, size, when, without_none

app = typer.Typer(help="Checkpoints of a training job in S3.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the training job.")]
Step = Annotated[int, typer.Argument(min=0, help="Step of the checkpoint.")]
OfGeneration = Annotated[int | None, typer.Option("--generation", min=1, help="Where the job made that step twice; by default the newest.")]


@app.command("list")
def list_checkpoints(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """List a job's checkpoints, newest step first."""
    with connect() as service:
        answer = service.list_checkpoints(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(answer)
        return
    columns: Columns = {
        "STEP": "Step",
        "GENERATION": "Generation",
        "STATUS": "Status",
        "SIZE": lambda checkpoint: size(checkpoint["Bytes"]),
        "COMPLETED (UTC)": lambda checkpoint: when(checkpoint.get("CompletionTime")),
        "PINNED": lambda checkpoint: "yes" if checkpoint["IsPinned"] else "",
        "VERIFIED": _verified,
        "WHERE": "S3Uri",
    }
    show_rows(answer["Checkpoints"], columns, empty=f"No checkpoints. Make one: everstep checkpoints create {name}")


@app.command()
def create(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Put the newest committed step of a running job, or the next one, into S3."""
    with connect() as service:
        answer = service.create_checkpoint(TrainingJobName=name)
    if output is OutputFormat.JSON:
        show_json(answer)
        return
    if answer["Status"] == "Complete":
        typer.echo(f"step {answer['Step']} is in S3 already")
        return
    typer.echo(f"a checkpoint of step {answer['Step']} or the next one is asked for")
    say(f"next: everstep checkpoints list {name}")


@app.command()
def verify(name: Name, step: Step, generation: OfGeneration = None, output: Output = OutputFormat.TABLE) -> None:
    """Have a checkpoint read back and hashed against its manifest; the list shows the verdict."""
    _do("verify_checkpoint", name, step, generation, output, "is being read back")
    if output is OutputFormat.TABLE:
        say(f"next: everstep checkpoints list {name}")


@app.command()
def pin(name: Name, step: Step, generation: OfGeneration = None, output: Output = OutputFormat.TABLE) -> None:
    """Keep a checkpoint: it is not deleted until it is unpinned."""
    _do("pin_checkpoint", name, step, generation, output, "is pinned")


@app.command()
def unpin(name: Name, step: Step, generation: OfGeneration = None, output: Output = OutputFormat.TABLE) -> None:
    """Let a pinned checkpoint be deleted again."""
    _do("unpin_checkpoint", name, step, generation, output, "is not pinned")


@app.command()
def delete(name: Name, step: Step, generation: OfGeneration = None, output: Output = OutputFormat.TABLE) -> None:
    """Delete a checkpoint from S3, for good; not a pinned one, nor the one that a job which has not ended would be restored from."""
    _do("delete_checkpoint", name, step, generation, output, "is deleted")


def _do(operation: str, name: str, step: int, generation: int | None, output: OutputFormat, words: str) -> None:
    with connect() as service:
        call: Any = getattr(service, operation)
        checkpoint: Json = call(**without_none(TrainingJobName=name, Step=step, Generation=generation))
    if output is OutputFormat.JSON:
        show_json(checkpoint)
        return
    typer.echo(f"the checkpoint of step {checkpoint['Step']}, generation {checkpoint['Generation']}, {words}")


def _verified(checkpoint: Json) -> str:
    state = checkpoint["Verification"]
    if state in ("Intact", "Damaged"):
        told = f": {checkpoint['VerificationMessage']}" if "VerificationMessage" in checkpoint else ""
        return f"{state.lower()} {when(checkpoint.get('VerificationTime'))}{told}"
    return "being read" if state == "Verifying" else ""
