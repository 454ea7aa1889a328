"""Options of a command that set fields of the request, declared once with the field's path and the option's help.

    class JobOptions:
        node_count: int | None = sets("NodeCount", "Number of nodes.")
        third_slot: bool = sets("CheckpointConfig.ThirdSlot", "Keep a third slot per shard.")

A command declares a parameter `fields: Annotated[Request, JobOptions]`, and receives the part of the request that the
options set. An option that the user does not pass sets no field. A `bool` is a flag, a list without a callback is a
map whose entries have the form `name=value`, and the value of an enumeration gets a capital letter, as in the API.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from everstep.cli.output import pairs
from everstep.cli.submission import Request, joined

_GROUPS: Final = {
    **dict.fromkeys(("Environment", "Secrets", "RoleArn", "OutputDataConfig"), "Options for what the ranks get"),
    **dict.fromkeys(("Priority", "Preemptible", "Project", "Tags"), "Options for the queue"),
    "ElasticConfig": "Options for fewer or more nodes",
    "Protection": "Options for copies in memory",
    "CheckpointConfig": "Options for checkpoints in S3",
    "RetryStrategy": "Options for failures",
    "StoppingCondition": "Options for failures",
}
"""Groups of options in a command's help, by the first name of the field. All other fields come first."""


@dataclass(frozen=True, slots=True)
class _Field:
    path: str
    help: str
    names: tuple[str, ...]
    limits: Mapping[str, Any]


def sets(path: str, help: str, *names: str, **limits: Any) -> Any:
    """Declare an option that sets the field of a request at `path`, such as `CheckpointConfig.EverySteps`.

    `names` replace the option's default name. `limits` are further arguments of `typer.Option`, such as `min`.
    """
    return _Field(path, help, names, limits)


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the parameters of a typer command for the options that a class declares."""
    found: list[inspect.Parameter] = []
    for name, annotation in get_type_hints(kind).items():
        is_flag, declared = annotation is bool, getattr(kind, name)
        names = [_option(name)] if is_flag else declared.names
        group = _GROUPS.get(declared.path.partition(".")[0])
        option = typer.Option(*names, help=declared.help, rich_help_panel=group, **declared.limits)
        default = False if is_flag else None
        kept = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, kept, default=default, annotation=Annotated[annotation, option]))
    return found


def request_of(kind: type, given: Mapping[str, Any]) -> Request:
    """Return the fields that the values of a class's options set, as a part of a request."""
    request: Request = {}
    for name, annotation in get_type_hints(kind).items():
        given_value = given[name]
        if given_value is None or (annotation is bool and not given_value):
            continue
        is_map = annotation == list[str] | None and "callback" not in getattr(kind, name).limits
        value: Any = pairs(_option(name), given_value) if is_map else given_value
        if isinstance(value, Path):
            value = str(value)
        if isinstance(value, StrEnum):
            value = value.capitalize()
        for part in reversed(getattr(kind, name).path.split(".")):
            value = {part: value}
        request = joined(request, value)
    return request


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
