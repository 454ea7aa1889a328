"""What a person wants to submit, put together: a file, changes of it, and options.

`jobs submit` and `jobs diff` read it.

The file says what the API says, in its words, as YAML or as JSON; `-` is stdin:

    TrainingJobName: gpt            # made up where it is left out
    Source: {Directory: ../code}    # relative to the file; or {SourceId: …}, or --source-dir
    EntryPoint: train.py
    NodeCount: 4
    HyperParameters: {lr: 1e-3}     # taken as it is written: values are text

It is what the AWS CLI's `--cli-input-json` takes for CreateTrainingJob, and a directory besides; there is no second
option for it.

Invariant: what is wrong with a field is said by the client, in the service's words; here only what cannot be sent at
all is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from everstep.errors import ConfigurationError

Request = dict[str, Any]

STDIN: Final = Path("-")

TEXTS: Final = ("HyperParameters", "Environment", "Secrets", "Tags")
"""Fields whose values are text, whatever they look like in YAML."""
_ABOUT_THE_REQUEST: Final = ("TrainingJobName", "ClientRequestToken", "DryRun")
_LIMITS: Final = ("MaxRuntimeInSeconds", "MaxPendingTimeInSeconds", "MaxCostUsd")
"""0 lifts one; a job without it has no such field."""
_PLACES: Final = {"S3Uri": "{TrainingJobName}/", "S3OutputPath": "{TrainingJobName}/run={RunId}/"}
"""What the service adds to where a request sends its checkpoints and outputs: a place of the job's own."""


def from_file(path: Path) -> Request:
    """Read a job's file.

    Args:
        path: YAML or JSON; `-`: stdin.

    Returns:
        The request that it says, with `Source.Directory` relative to where the file is.

    Raises:
        ConfigurationError: it cannot be read, or is not a set of fields.
    """
    where = "stdin" if path == STDIN else str(path)
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where} cannot be read: {error}") from error
    request = _parsed(text, where)
    if not isinstance(request, dict) or not all(isinstance(name, str) for name in request):
        raise ConfigurationError(f"{where} is not a job: it must be fields with values, as TrainingJobName: my-job.")
    source = request.get("Source")
    if isinstance(source, dict) and isinstance(source.get("Directory"), str):
        request["Source"] = {**source, "Directory": str(path.parent / source["Directory"])}
    return request


def changed(request: Request, changes: Sequence[str]) -> Request:
    """Return a request with `--set` applied.

    Args:
        request: what there is.
        changes: each `Field.Inner=value`; the value is YAML, except where the field's values are text.

    Returns:
        A new request.

    Raises:
        ConfigurationError: one is not of that form, or leads through a value.
    """
    merged = request
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".", 1) if path.split(".", 1)[0] in TEXTS else path.split(".")
        if not equals or not all(names):
            raise ConfigurationError(
                f"--set {change!r} is not of the form Field=value, as --set NodeCount=8 or --set "
                "HyperParameters.lr=1e-3."
            )
        value: Any = text if names[0] in TEXTS and len(names) > 1 else _parsed(text, f"--set {path}")
        for name in reversed(names):
            value = {name: value}
        merged = joined(merged, value)
    return merged


def texts_of(job: Mapping[str, Any], changes: Sequence[str]) -> Request:
    """Return a job's fields of texts of which `--set` changes one each: the service takes such a field as a whole.

    Args:
        job: as the service describes it.
        changes: as `changed` takes them.

    Returns:
        A request to change.
    """
    return {
        name: job[name] for name in TEXTS if name in job and any(change.startswith(f"{name}.") for change in changes)
    }


def joined(below: Mapping[str, Any], above: Mapping[str, Any]) -> Request:
    """Return two requests as one, field by field; where both say something, the second counts."""
    request = dict(below)
    for name, value in above.items():
        inner = request.get(name)
        request[name] = joined(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return request


def channels(below: Any, given: Mapping[str, str]) -> list[Any]:
    """Return a job's inputs: those of a file, and those of options, which count where both have the name.

    Args:
        below: InputDataConfig as it was written, or None.
        given: an S3 URI, or the path of a directory, by the channel's name.

    Returns:
        InputDataConfig.
    """
    others = (
        [each for each in below if not (isinstance(each, dict) and each.get("ChannelName") in given)]
        if isinstance(below, list)
        else []
    )
    return others + [{"ChannelName": name, "DataSource": _data_source(where)} for name, where in given.items()]


def _data_source(where: str) -> Request:
    if where.startswith("/"):
        return {"FileSystemDataSource": {"DirectoryPath": where}}
    return {"S3DataSource": {"S3Uri": where}}


def named(request: Request, *, now: datetime | None = None, token: str | None = None) -> Request:
    """Return the request with a name.

    Args:
        request: with or without one.
        now: by default the present.
        token: what makes the name one of its own; by default random.

    Returns:
        The same request where it has a name; else one called after its script and the time.
    """
    if request.get("TrainingJobName"):
        return request
    stem = (
        re.sub(r"[^A-Za-z0-9]+", "-", Path(str(request.get("EntryPoint", "job"))).stem).strip("-")[:32].strip("-")
        or "job"
    )
    import secrets  # no --help needs them

    when = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return {
        "TrainingJobName": f"{stem}-{when}-{token or secrets.token_hex(2)}",
        **{key: value for key, value in request.items() if value is not None},
    }


def directory_of(request: Request) -> str | None:
    """Return the directory that is to be uploaded for a request, or None where its source is uploaded already."""
    source = request.get("Source")
    return source.get("Directory") if isinstance(source, dict) else None


def difference(job: Mapping[str, Any], wanted: Request) -> Request:
    """Return what of a request differs from a job.

    Args:
        job: as the service describes it.
        wanted: as a file and `--set` say it.

    Returns:
        The fields that differ, fixed ones included: who is asked to change them says that they cannot be.
    """
    different: Request = {}
    for name, value in wanted.items():
        if name in _ABOUT_THE_REQUEST or (name == "Source" and directory_of(wanted) is not None):
            continue
        there = job.get(name)
        if isinstance(value, dict) and isinstance(there, dict) and name not in TEXTS:
            inner = {key: each for key, each in value.items() if not _is_so(job, there, key, each)}
            if inner:
                different[name] = inner
        elif value != there:
            different[name] = value
    return different


def _is_so(job: Mapping[str, Any], there: Mapping[str, Any], key: str, asked: Any) -> bool:
    if key in _LIMITS and not asked:
        return key not in there
    placed = (
        f"{asked.rstrip('/')}/{_PLACES[key].format_map(job)}" if key in _PLACES and isinstance(asked, str) else asked
    )
    return there.get(key) in (asked, placed)


def lines(job: Mapping[str, Any], different: Request) -> list[dict[str, str]]:
    """Return what differs as rows: the field's path, and its value before and after.

    Args:
        job: as the service describes it.
        different: as `difference` found it.

    Returns:
        One row for each field.
    """
    rows = []
    for name, value in different.items():
        inner = isinstance(value, dict) and name not in TEXTS
        pairs = (
            [(f"{name}.{key}", job.get(name, {}).get(key), each) for key, each in value.items()]
            if inner
            else [(name, job.get(name), value)]
        )
        rows += [
            {"Field": path, "Before": "" if before is None else str(before), "After": str(after)}
            for path, before, after in pairs
        ]
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        value, written = _of_json(text)
    except ValueError:
        value, written = _of_yaml(text, where)
    if isinstance(value, dict) and isinstance(written, dict):
        value.update({name: written[name] for name in TEXTS if name in written})
    return value


def _of_json(text: str) -> tuple[Any, Any]:
    """Return what JSON says, and the same with each scalar as the text that it is written as.

    YAML as PyYAML reads it is no superset: 1e-3, tabs.
    """

    def refused(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refused)
    written = json.loads(text, parse_int=str, parse_float=str)
    return value, _as_text(written)


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_text(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value if isinstance(value, str) else json.dumps(value)


def _of_yaml(text: str, where: str) -> tuple[Any, Any]:
    import yaml  # no --help needs it

    try:
        return yaml.safe_load(text), yaml.load(text, Loader=yaml.BaseLoader)  # the second has scalars alone
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is neither JSON nor YAML: {' '.join(str(error).split())}") from error
