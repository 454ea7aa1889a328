"""`everstep local fault …`: one command per kind of fault, and commands to list, clear, script and play faults.

The options of a fault's command are generated from its class in `fault_kinds`. Sentences go to stderr. With `--output
json`, the effect goes to stdout, so that a program can check it.
"""

from __future__ import annotations

import inspect
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from infra.local_cloud import fault_script
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import FAULT_IN_WORDS, Effect, kinds
from infra.local_cloud.fault_script import Moment

app = typer.Typer(help="Inject failures into the local cloud for tests and experiments.", no_args_is_help=True)
console = Console(stderr=True, highlight=False)
DEFAULT_STATE_DIR = Path(".everstep")
StateDir = Annotated[Path, typer.Option(envvar="EVERSTEP_STATE_DIR", help="State directory of the local cloud.")]
Output = Annotated[str, typer.Option("--output", "-o", help="text or json.")]


def open_cluster(state_dir: Path) -> Any:
    """Return the local cluster with this state directory. Tests replace this function."""
    from infra.local_cloud.up import LocalCluster

    return LocalCluster(state_dir)


@app.command("list")
def list_faults(output: Output = "text", state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """Show the effects of all injected faults, the current conditions, and the counters of the instances' links."""
    cluster = open_cluster(state_dir)
    effects, conditions, links = cluster.injected(), cluster.conditions(), cluster.links()
    if output == "json":
        print(
            msgspec.json.encode(
                {"Seed": cluster.seed, "Effects": effects, "Conditions": conditions, "Links": links}
            ).decode()
        )
        return
    for effect in effects:
        console.print(f"{effect.fault}: {escape(effect.did)}")
    console.print(f"conditions: {escape(msgspec.json.encode(conditions).decode())}", soft_wrap=True)
    for instance_id, counters in links.items():
        console.print(f"{instance_id}: {', '.join(f'{name} {count}' for name, count in counters.items())}")
    console.print(f"seed {cluster.seed}")


@app.command()
def clear(
    name: Annotated[
        str, typer.Argument(help="Kind of fault to clear; by default all lasting faults.", show_default=False)
    ] = "",
    output: Output = "text",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Undo lasting faults: conditions, warnings, partitions, slow links, stopped ranks … Ended processes stay ended."""
    sentences = open_cluster(state_dir).clear_faults(name)
    if output == "json":
        print(msgspec.json.encode({"Cleared": sentences}).decode())
        return
    for line in sentences or ["there was nothing to clear"]:
        console.print(escape(line))


@app.command()
def script(
    seed: Annotated[int, typer.Option(min=0, help="Seed; equal seeds yield equal scripts.")],
    minutes: Annotated[float, typer.Option(min=0.2, max=1440, help="Duration of the script in minutes.")] = 10.0,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of running instances.")] = 7,
    network: Annotated[
        Literal["loopback", "namespaces"],
        typer.Option(help="Network of `up`; namespaces adds faults that cut and slow links."),
    ] = "loopback",
) -> None:
    """Print a fault script: a list of faults with their times, generated from a seed."""
    moments = fault_script.generate(seed=seed, minutes=minutes, nodes=nodes, has_namespaces=network == "namespaces")
    print(fault_script.encode(moments).decode(), end="")


@app.command()
def play(
    file: Annotated[Path, typer.Argument(help="Fault script as JSON, or as YAML if pyyaml is installed.")],
    output: Output = "text",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Play a fault script against the local cloud. The command reports and skips refused faults."""
    moments = fault_script.read(file)
    cluster = open_cluster(state_dir)
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed} done"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("playing", total=None)

        def tell(moment: Moment, outcome: Effect | FaultRefused | None) -> None:
            progress.advance(task)
            if output == "json":
                print(msgspec.json.encode(_line(moment, outcome)).decode(), flush=True)
            else:
                progress.console.print(
                    f"{moment.at_seconds:7.1f} s  {escape(_sentence(moment, outcome))}", soft_wrap=True
                )

        def wait_until(seconds: float) -> float:
            time_left = began + seconds - time.monotonic()
            if time_left > 0:
                pause(time_left)
            return time.monotonic() - began

        fault_script.play(
            moments,
            aim=cluster.aim(),
            inject=cluster.inject,
            clear=cluster.clear_faults,
            wait_until=wait_until,
            report=tell,
        )


def _line(moment: Moment, outcome: Effect | FaultRefused | None) -> dict[str, Any]:
    match outcome:
        case None:
            return {"AtSeconds": moment.at_seconds, "Cleared": moment.clears or "all"}
        case Effect():
            return {
                "AtSeconds": moment.at_seconds,
                **({"Role": str(role)} if (role := fault_script.role_of(moment)) else {}),
                "Effect": outcome,
            }
        case refused:
            return {"AtSeconds": moment.at_seconds, "Refused": str(refused)}


def _sentence(moment: Moment, outcome: Effect | FaultRefused | None) -> str:
    match outcome:
        case None:
            return f"clear {moment.clears}".rstrip()
        case Effect():
            role = fault_script.role_of(moment)
            return f"{outcome.fault}: {outcome.did}{f' ({role})' if role else ''}"
        case refused:
            return f"refused: {refused}"


def pause(seconds: float) -> None:
    """Wait until the next line of a fault script is due. Tests replace this function."""
    threading.Event().wait(seconds)


def _add(name: str, kind: type[msgspec.Struct]) -> None:
    def command(**given: Any) -> None:
        state_dir, output = given.pop("state_dir"), given.pop("output")
        fields = {field: _decoded(value) for field, value in given.items()}
        try:
            fault = FAULT_IN_WORDS.decode(msgspec.json.encode({"fault": name, **fields}))
        except msgspec.ValidationError as error:
            raise typer.BadParameter(str(error)) from error
        cluster = open_cluster(state_dir)
        for one in cluster.aim()(fault):
            effect = cluster.inject(one)
            if output == "json":
                print(msgspec.json.encode(effect).decode())
            else:
                console.print(escape(effect.did), soft_wrap=True)

    parameters = [*_parameters(kind)]
    for parameter, annotation, default in (("output", Output, "text"), ("state_dir", StateDir, DEFAULT_STATE_DIR)):
        parameters.append(
            inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=inspect.getdoc(kind))(command)


def _parameters(kind: type[msgspec.Struct]) -> Iterator[inspect.Parameter]:
    for field in msgspec.structs.fields(kind):
        plain, help_text = _unwrapped(field.type)
        shown: Callable[..., Any] = typer.Argument if field.name == "target" else typer.Option
        default = field.default if isinstance(field.default, plain) or field.default is None else str(field.default)
        annotation: Any = Annotated[
            plain | None if field.default is None else plain,
            shown(help=help_text, show_default=default not in ("", None)),
        ]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _unwrapped(declared: Any) -> tuple[Any, str]:
    """Return the type with which typer parses a field, and the option's help."""
    help_text = ""
    while get_origin(declared) is Annotated:
        declared, *notes = get_args(declared)
        help_text = next(
            (note.description for note in notes if isinstance(note, msgspec.Meta) and note.description), help_text
        )
    if get_origin(declared) in (Union, types.UnionType):
        choices = [choice for choice in get_args(declared) if choice is not types.NoneType]
        plain, inner = _unwrapped(choices[0]) if len(choices) == 1 else (str, "")
        return plain, help_text or inner
    return (str, help_text) if get_origin(declared) is Literal else (declared, help_text)


def _decoded(value: Any) -> Any:
    """Return an option's value as the field expects it. A delay may be a number or a JSON object."""
    if not isinstance(value, str):
        return value
    try:
        decoded = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    return decoded if isinstance(decoded, dict) else value


for _name, _kind in kinds().items():
    _add(_name, _kind)
