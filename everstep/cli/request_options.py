"""Makes a command's options from the fields of an operation of the service's model.

    fields: Annotated[Request, FieldsOf("CreateTrainingJob", names={"FleetName": "--fleet"})]

A command that declares this parameter has one option per field, and receives the part of the request that the options
set. The field's type, its values and the first paragraph of its documentation are those of the model:

    CheckpointConfig.ThirdSlot, a boolean    --checkpoint-third-slot/--no-checkpoint-third-slot
    IntervalInSeconds, an integer            --interval-seconds N
    Tags, a map                              --tags NAME=VALUE, may be repeated
    Keep, a list                             --keep A, may be repeated
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

import typer

from everstep.aws_models import DATA, SERVICE
from everstep.cli.output import pairs
from everstep.cli.submission import Request, joined

_GROUPS: Final = {
    **dict.fromkeys(("Environment", "Secrets", "RoleArn", "OutputDataConfig"), "Options for what the ranks get"),
    **dict.fromkeys(("Priority", "Preemptible", "Project", "Tags"), "Options for the queue"),
    "ElasticConfig": "Options for fewer or more nodes",
    "Protection": "Options for copies in memory",
    "CheckpointConfig": "Options for checkpoints in S3",
    "InitialCheckpoint": "Options for checkpoints in S3",
    "RetryStrategy": "Options for failures",
    "StoppingCondition": "Options for failures",
    "Rehearsal": "Options for rehearsals of a restart",
}
"""Groups of options in a command's help, by the first name of the field. All other fields come first."""
_PREFIXES: Final = {
    "CheckpointConfig": "checkpoint-",
    "InitialCheckpoint": "initial-checkpoint-",
    "Rehearsal": "rehearsal-",
    "SparePolicy": "spare-",
}
_TYPES: Final = {
    "string": str,
    "integer": int,
    "long": int,
    "double": float,
    "boolean": bool,
    "timestamp": datetime,
}
_FORMATS: Final = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
"""Forms of a time, which is in UTC."""


class _Field(NamedTuple):
    path: str
    """Such as `CheckpointConfig.EverySteps`."""
    shape: Mapping[str, Any]
    help: str


@dataclass(frozen=True, slots=True)
class FieldsOf:
    """The options of a command that set fields of the request of an operation."""

    operation: str
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that do not follow from the field's name, by path. An empty name: the field has no option."""

    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters of a typer command for the options."""
        return [self._parameter(each) for each in _fields(self.operation) if self._option(each)]

    def request(self, given: Mapping[str, Any]) -> Request:
        """Return the fields that the values of the options set, as a part of a request."""
        request: Request = {}
        for each in _fields(self.operation):
            value: Any = given.get(_parameter_name(each))
            if value is None:
                continue
            if isinstance(value, StrEnum):
                value = value.value
            if isinstance(value, datetime):
                value = value.replace(tzinfo=UTC)
            if _is_map(each.shape):
                value = pairs(self._option(each), value)
            for part in reversed(each.path.split(".")):
                value = {part: value}
            request = joined(request, value)
        return request

    def _option(self, of: _Field) -> str:
        container, _, name = of.path.rpartition(".")
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name.replace("InSeconds", "Seconds")).lower()
        option = f"--{_PREFIXES.get(container, '')}{words}"
        is_flag = of.shape["type"] == "boolean"
        return self.names.get(of.path, f"{option}/--no-{option[2:]}" if is_flag else option)

    def _parameter(self, of: _Field) -> inspect.Parameter:
        kind: Any = _TYPES.get(of.shape["type"], list[str])
        if values := of.shape.get("enum"):
            kind = StrEnum("Values", {value: value for value in values})  # type: ignore[misc, no-redef]
        form = "name=value; may be repeated." if _is_map(of.shape) else "May be repeated." if kind == list[str] else ""
        option = typer.Option(
            self._option(of),
            help=f"{of.help} {form}".strip(),
            rich_help_panel=_GROUPS.get(of.path.partition(".")[0]),
            case_sensitive=False,
            formats=_FORMATS,
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(_parameter_name(of), keyword, default=None, annotation=Annotated[kind | None, option])


def _parameter_name(of: _Field) -> str:
    return of.path.replace(".", "_")


def _is_map(shape: Mapping[str, Any]) -> bool:
    """Return whether the option has the form `name=value`: also that of a list of structures, such as inputs."""
    member = shape.get("member", {"shape": ""})["shape"]
    return shape["type"] == "map" or bool(_model()["shapes"].get(member, {}).get("type") == "structure")


@cache
def _model() -> Mapping[str, Any]:
    model: Mapping[str, Any] = json.loads(next((DATA / SERVICE).glob("*/service-2.json")).read_text())
    return model


@cache
def _fields(operation: str) -> Sequence[_Field]:
    return tuple(_leaves(_model()["operations"][operation]["input"]["shape"], ""))


def _leaves(structure: str, prefix: str) -> Iterator[_Field]:
    shapes = _model()["shapes"]
    for name, member in shapes[structure]["members"].items():
        shape = shapes[member["shape"]]
        if name in ("MaxResults", "NextToken") or member.get("location") == "uri":
            continue  # Pages and arguments set these.
        if shape["type"] == "structure":
            yield from _leaves(member["shape"], f"{prefix}{name}.")
        else:
            paragraph = member.get("documentation", "").removeprefix("<p>").partition("</p>")[0]
            yield _Field(f"{prefix}{name}", shape, html.unescape(paragraph))
