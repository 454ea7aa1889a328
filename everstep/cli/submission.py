"""Builds the request of `jobs submit`, `jobs update` and `jobs diff` from a file, `--set` and options.

The file contains the fields of CreateTrainingJob as YAML or JSON. `-` reads stdin:

    TrainingJobName: gpt            # generated if missing
    Source: {Directory: ../code}    # relative to the file; or {SourceId: …}, or --source-dir
    EntryPoint: train.py
    NodeCount: 4
    HyperParameters: {lr: 1e-3}     # values are text, kept as written
    Arguments: [--fp16, data/]      # the rest of the script's command line
    x-mine: &mine {lr: 1e-3}        # ignored, like all names that begin with `x-` or `.`; for aliases and `<<`

The AWS CLI's `--cli-input-json` accepts the same file, except for `Source.Directory`.

Invariant: this module rejects only input from which it cannot build a request. The client checks the request's fields
and reports faults with the service's messages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from everstep.errors import ConfigurationError
from everstep.json_values import is_array, is_object

Request = dict[str, Any]

STDIN: Final = Path("-")

TEXTS: Final = ("HyperParameters", "Environment", "Secrets", "Tags")
"""Fields whose values stay text, even if YAML would parse them as numbers or booleans."""
_MODE: Final = ["Rehearsal", "Mode"]
"""A field with the values `On` and `Off`, which YAML would parse as booleans."""
_ABOUT_THE_REQUEST: Final = ("TrainingJobName", "ClientRequestToken", "DryRun")
LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start ranks themselves."""
_LIMITS: Final = ("MaxRuntimeInSeconds", "MaxPendingTimeInSeconds", "MaxCostUsd")
"""Fields in which 0 removes the limit.

The service's description of a job omits a field without a limit.
"""
_PLACES: Final = {"S3Uri": "{TrainingJobName}/", "S3OutputPath": "{TrainingJobName}/run={RunId}/"}
"""Path that the service appends to an S3 location, by the field that contains the location.

With this path, each job has its own prefix.
"""


def from_file(path: Path) -> Request:
    """Read a job from a file.

    Args:
        path: a YAML or JSON file, or `-` for stdin.

    Returns:
        The request. A relative `Source.Directory` refers to the directory of the file.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain fields with values.
    """
    where = "stdin" if path == STDIN else str(path)
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if path == STDIN else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where} cannot be read: {error}") from error
    request = _parsed(text, where)
    if not is_object(request) or not all(isinstance(name, str) for name in cast("dict[object, Any]", request)):
        raise ConfigurationError(f"{where} is not a job. Write fields with values, such as TrainingJobName: my-job.")
    # As in other tools, such names hold values that only aliases use.
    request = {name: value for name, value in request.items() if not name.startswith((".", "x-"))}
    source = request.get("Source")
    if is_object(source) and isinstance(source.get("Directory"), str):
        request["Source"] = {**source, "Directory": str(path.parent / source["Directory"])}
    return request


def changed(request: Request, changes: Sequence[str]) -> Request:
    """Return a request with the values of `--set` applied.

    Args:
        request: the request before the changes. It is not modified.
        changes: texts of the form `Field.Inner=value`. The value is parsed as YAML, except in the fields of `TEXTS`.

    Returns:
        A new request.

    Raises:
        ConfigurationError: a change does not have this form, or its value cannot be parsed.
    """
    merged = request
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".", 1) if path.split(".", 1)[0] in TEXTS else path.split(".")
        if not equals or not all(names):
            raise ConfigurationError(
                f"--set {change!r} is not of the form Field=value, such as --set NodeCount=8 or --set "
                "HyperParameters.lr=1e-3."
            )
        is_text = (names[0] in TEXTS and len(names) > 1) or names == _MODE
        value: Any = text if is_text else _parsed(text, f"--set {path}")
        for name in reversed(names):
            value = {name: value}
        merged = joined(merged, value)
    return merged


def texts_of(job: Mapping[str, Any], changes: Sequence[str]) -> Request:
    """Return the fields of `TEXTS` in which `--set` changes single entries, such as `Tags.team` of `Tags`.

    The service replaces such a field as a whole, so an update has to contain the other entries, too.

    Args:
        job: the service's description of the job.
        changes: values of `--set`, as `changed` accepts them.

    Returns:
        The fields with the job's current values. The caller applies the changes with `changed`.
    """
    return {
        name: job[name] for name in TEXTS if name in job and any(change.startswith(f"{name}.") for change in changes)
    }


def joined(below: Mapping[str, Any], above: Mapping[str, Any]) -> Request:
    """Return two requests merged field by field. If both contain a field, the value of `above` replaces the other."""
    request = dict(below)
    for name, value in above.items():
        inner = request.get(name)
        request[name] = joined(inner, value) if is_object(value) and is_object(inner) else value
    return request


def channels(below: Any, given: Mapping[str, str]) -> list[Any]:
    """Return the input channels of a job's file, merged with those of the command's options. An option replaces the
    file's channel of the same name.

    Args:
        below: the file's InputDataConfig, or None.
        given: an S3 URI or the path of a directory by channel name.

    Returns:
        InputDataConfig.
    """
    others = (
        [each for each in below if not (is_object(each) and each.get("ChannelName") in given)]
        if is_array(below)
        else []
    )
    return others + [{"ChannelName": name, "DataSource": _data_source(where)} for name, where in given.items()]


def _data_source(where: str) -> Request:
    if where.startswith("/"):
        return {"FileSystemDataSource": {"DirectoryPath": where}}
    return {"S3DataSource": {"S3Uri": where}}


def of_command_line(words: Sequence[str]) -> Request:
    """Return the fields that run a script with the command line of a shell.

    Args:
        words: for example `python train.py --fp16 data/`. The interpreter may be missing.

    Returns:
        EntryPoint or Module, and Arguments. Empty without words.

    Raises:
        ConfigurationError: the words start a launcher or another program instead of a script or a module.
    """
    rest = list(words)
    if rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        rest = rest[2:] if rest[1:2] == ["-u"] else rest[1:]
    if not rest:
        return {}
    is_module = rest[0] == "-m"
    program, *arguments = rest[is_module:] or [""]
    is_ours = bool(program) and program not in LAUNCHERS if is_module else program.endswith(".py")
    if not is_ours:
        raise ConfigurationError(
            f"{program!r} is neither a Python file nor a module of yours. Write the command as one rank would run it "
            "alone: python train.py …. Everstep starts the ranks itself (--node-count, --ranks-per-node). Quote the "
            "patterns of --keep."
        )
    return {"Module" if is_module else "EntryPoint": program, "Arguments": arguments}


def named(request: Request) -> Request:
    """Return the request. If it lacks a job name, add one: the script's name, the time and a random suffix."""
    if request.get("TrainingJobName"):
        return request
    program = str(request.get("EntryPoint") or request.get("Module") or "job")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(program).stem).strip("-")[:32].strip("-") or "job"
    import secrets  # Import here to keep `--help` fast.

    when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return {
        "TrainingJobName": f"{stem}-{when}-{secrets.token_hex(2)}",
        **{key: value for key, value in request.items() if value is not None},
    }


def directory_of(request: Request) -> str | None:
    """Return the directory to upload for a request, or None if the request has no `Source.Directory`."""
    source = request.get("Source")
    return source.get("Directory") if is_object(source) else None


def difference(job: Mapping[str, Any], wanted: Request) -> Request:
    """Return the fields of a request that differ from a job.

    Args:
        job: the service's description of the job.
        wanted: the request built from a file and `--set`.

    Returns:
        The fields that differ. They include fields that cannot change, so that the service rejects these fields by
        name.
    """
    different: Request = {}
    for name, value in wanted.items():
        if name in _ABOUT_THE_REQUEST or (name == "Source" and directory_of(wanted) is not None):
            continue
        there = job.get(name)
        if is_object(value) and is_object(there) and name not in TEXTS:
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
    """Return the differences of a job and a request as table rows: a field's path, and its value before and after.

    Args:
        job: the service's description of the job.
        different: the result of `difference`.

    Returns:
        One row per field.
    """
    rows: list[dict[str, str]] = []
    for name, value in different.items():
        inner = is_object(value) and name not in TEXTS
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
    if is_object(value) and is_object(written):
        value.update({name: written[name] for name in TEXTS if name in written})
        field, inner = _MODE
        if is_object(value.get(field)) and inner in value[field]:
            value[field][inner] = written[field][inner]
    return value


def _of_json(text: str) -> tuple[Any, Any]:
    """Parse JSON twice: into values, and into the same structure with every scalar as the text in the file.

    PyYAML is not used for JSON because it rejects some JSON, such as tabs, and reads 1e-3 as text.
    """

    def refused(constant: str) -> Any:
        raise ValueError(constant)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("duplicate")  # the YAML parser names it, with its lines
        return dict(pairs)

    value = json.loads(text, parse_constant=refused, object_pairs_hook=once)
    written = json.loads(text, parse_int=str, parse_float=str)
    return value, _as_text(written)


def _as_text(value: Any) -> Any:
    if is_object(value):
        return {name: _as_text(each) for name, each in value.items()}
    if is_array(value):
        return [_as_text(each) for each in value]
    return value if isinstance(value, str) else json.dumps(value)


def _of_yaml(text: str, where: str) -> tuple[Any, Any]:
    """Parse YAML as `_of_json` parses JSON."""
    import yaml  # Import here to keep `--help` fast.

    loader: Any = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _refuse_duplicates(node, where, set())
        # The construction also replaces each merge key (`<<`) by the merged entries.
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is neither JSON nor YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()
    return value, _written(node, {})


def _refuse_duplicates(node: Any, where: str, seen: set[int]) -> None:
    """Raise ConfigurationError for a name that is set twice, with both lines. YAML would use the last value."""
    if node is None or id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))  # an alias may lead back to the node
    lines: dict[str, int] = {}
    for each in node.value:
        name, value = each if node.id == "mapping" else (None, each)
        if name is not None and isinstance(name.value, str):
            line = name.start_mark.line + 1
            if name.value in lines:
                raise ConfigurationError(
                    f"{where} sets {name.value} twice, in lines {lines[name.value]} and {line}. Remove one of them."
                )
            lines[name.value] = line
        _refuse_duplicates(value, where, seen)


def _written(node: Any, known: dict[int, Any]) -> Any:
    """Return the structure of a YAML node with each scalar as the text that the user wrote."""
    if node is None or isinstance(node.value, str):
        return None if node is None else node.value
    if id(node) not in known:
        known[id(node)] = None  # an alias within its own node has no text
        known[id(node)] = (
            {name.value: _written(value, known) for name, value in node.value if isinstance(name.value, str)}
            if node.id == "mapping"
            else [_written(each, known) for each in node.value]
        )
    return known[id(node)]
