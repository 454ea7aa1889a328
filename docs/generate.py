"""Writes the documents that are generated from the code.

    docs/states.md                     every state machine, drawn from its transition table
    docs/adr/README.md                 the list of decisions
    docs/modules.md                    every module, with the first paragraph of its docstring
    docs/reference/timeouts.md         between its markers: the timeouts and the fixed limits
    docs/security.md                   between its markers: the least role that each API operation needs
    docs/reference/field-coverage.md   every request field, and the tests that declare to cover it (`covers`)

It also wraps the long lines of prose in all Markdown documents.

    python docs/generate.py             writes the documents
    python docs/generate.py --check     names the stale documents, and exits with 1 if there are any
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from control_plane.api.surface import API_VERSION, least_roles
from control_plane.contract.markdown import wrap
from control_plane.core import states
from control_plane.core.timeouts import explained, ladder
from everstep.protocol.agent_messages import MemberPhase
from worker.core import generation

ROOT = Path(__file__).resolve().parents[1]
STATES = ROOT / "docs" / "states.md"
MODULES = ROOT / "docs" / "modules.md"
DECISIONS = ROOT / "docs" / "adr" / "README.md"
TIMEOUTS = ROOT / "docs" / "reference" / "timeouts.md"
PACKAGES = ("everstep", "control_plane", "worker", "infra")
DEFAULT_DETECTION_SECONDS = 3.0
S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
SECURITY = ROOT / "docs" / "security.md"
ROLES_BEGIN, ROLES_END = "<!-- roles: begin (python docs/generate.py) -->", "<!-- roles: end -->"
COVERAGE = ROOT / "docs" / "reference" / "field-coverage.md"
MODEL = ROOT / "everstep" / "data" / "everstep" / API_VERSION / "service-2.json"
LADDER_BEGIN, LADDER_END = "<!-- ladder: begin (python docs/generate.py) -->", "<!-- ladder: end -->"


@dataclass(frozen=True, slots=True)
class Machine:
    """One transition table, and the text that describes it in docs/states.md."""

    title: str
    table_name: str
    kinds: type[StrEnum]
    events: type[StrEnum]
    rows: tuple[tuple[str, str, str], ...]
    """One row per transition: state, event, next state."""
    where: str
    """The component that applies the table, and facts that the table does not show."""


def rows_of(table: Mapping[tuple[S, E], S]) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of a transition table as text."""
    return tuple((state.value, event.value, after.value) for (state, event), after in table.items())


MACHINES = (
    Machine(
        "Job",
        "control_plane.core.states.JOB_TRANSITIONS",
        states.JobState,
        states.JobEvent,
        rows_of(states.JOB_TRANSITIONS),
        "Moved by the job loop (`control_plane/core/job/`). Stored in `job.state`; what a user sees "
        "(`TrainingJobStatus`, `SecondaryStatus`) is "
        "derived from it.",
    ),
    Machine(
        "Node",
        "control_plane.core.states.NODE_TRANSITIONS",
        states.NodeState,
        states.NodeEvent,
        rows_of(states.NODE_TRANSITIONS),
        "Moved by the fleet loop (`control_plane/core/fleets.py`). Stored in `node.state`.",
    ),
    Machine(
        "Incident",
        "control_plane.core.states.INCIDENT_TRANSITIONS",
        states.IncidentState,
        states.IncidentEvent,
        rows_of(states.INCIDENT_TRANSITIONS),
        "Moved by the job loop (`control_plane/core/incidents.py`). Stored in `incident.phase`.",
    ),
    Machine(
        "Member",
        "worker.core.generation.TRANSITIONS",
        MemberPhase,
        generation.MemberEvent,
        rows_of(generation.TRANSITIONS),
        "A node's part in one generation, moved by its agent (`worker/agent/lifecycle.py`). Durable in the "
        "promise file, with the plan. Not in the table: "
        "every phase is also left by a Prepare of a higher generation or of another run (to `promised`), "
        "and by Release (nothing is left).",
    ),
)


def main(arguments: list[str]) -> int:
    """Write or check the documents.

    Args:
        arguments: command-line arguments without the program name.

    Returns:
        The exit code.
    """
    wanted = {
        COVERAGE: coverage_document(
            request_fields(json.loads(MODEL.read_text())), covered(sorted((ROOT / "tests").rglob("test_*.py")))
        ),
        STATES: states_document(),
        MODULES: modules_document(),
        DECISIONS: decisions_document(),
        TIMEOUTS: timeouts_document(TIMEOUTS.read_text()),
        SECURITY: security_document(SECURITY.read_text()),
    }
    others = {path: path.read_text() for path in documents() if path not in wanted}
    wanted = {path: wrap(text) for path, text in (others | wanted).items()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


def documents() -> list[Path]:
    """Return the repository's Markdown documents, both handwritten and generated."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


# -- docs/states.md


def states_document() -> str:
    """Return docs/states.md."""
    parts = [
        "# States\n",
        "Written by `python docs/generate.py` from the transition tables; change those, not this file. A "
        "pair that is not in a table raises "
        "`InvalidTransition`.\n",
    ]
    for machine in MACHINES:
        parts += [
            f"## {machine.title}\n",
            f"`{machine.table_name}`. {machine.where}\n",
            "```mermaid",
            *_diagram(machine),
            "```\n",
        ]
        parts += [*_meanings(machine.kinds), *_meanings(machine.events)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _diagram(machine: Machine) -> Iterator[str]:
    yield "stateDiagram-v2"
    kinds = [kind.value for kind in machine.kinds]
    yield f"    [*] --> {kinds[0]}"
    edges: dict[tuple[str, str], list[str]] = {}
    for state, event, after in machine.rows:
        edges.setdefault((state, after), []).append(event)
    for (state, after), events in edges.items():
        yield f"    {state} --> {after}: {', '.join(events)}"
    for end in kinds:
        if all(state != end for state, _, _ in machine.rows):
            yield f"    {end} --> [*]"


def _meanings(kinds: type[StrEnum]) -> Iterator[str]:
    """Yield the lines that describe an enumeration: a summary, a table of its members, and remarks.

    All three come from the enumeration's docstring.
    """
    summary, _, rest = (inspect.getdoc(kinds) or "").partition("\n\n")
    yield f"**{kinds.__name__}.** {' '.join(summary.split())}\n"
    members, _, remarks = rest.partition("\n\n")
    yield "| value | meaning |"
    yield "| --- | --- |"
    for entry in re.split(r"\n(?=\S)", members):
        name, _, meaning = entry.partition(": ")
        yield f"| {kinds[name].value} | {' '.join(meaning.split())} |"
    yield ""
    if remarks:
        yield f"{' '.join(remarks.split())}\n"


# -- docs/security.md


def security_document(text: str) -> str:
    """Return docs/security.md with a renewed table of roles.

    Args:
        text: the present document with its markers.

    Returns:
        The renewed document.

    Raises:
        ValueError: a marker is missing.
    """
    return _between(text, ROLES_BEGIN, ROLES_END, _roles())


def _roles() -> Iterator[str]:
    by_role: dict[str, list[str]] = {}
    for operation, role in sorted(least_roles().items()):
        by_role.setdefault(role, []).append(operation)
    yield "| least role | operations |"
    yield "| --- | --- |"
    for role in ("none", "viewer", "submitter", "admin"):
        yield f"| {role} | {', '.join(by_role.pop(role, []))} |"
    yield ""


# -- docs/reference/timeouts.md


def timeouts_document(text: str) -> str:
    """Return docs/reference/timeouts.md with renewed tables.

    Args:
        text: the present document with its markers.

    Returns:
        The renewed document.

    Raises:
        ValueError: a marker is missing.
    """
    return _between(text, LADDER_BEGIN, LADDER_END, _ladder())


def _ladder() -> Iterator[str]:
    lines = iter(explained(ladder(DEFAULT_DETECTION_SECONDS)))
    next(lines)  # Skip the note about `detection_seconds` itself.
    is_fixed = False
    yield "| timeout | × `detection_seconds` | default | meaning | reason |"
    yield "| --- | ---: | ---: | --- | --- |"
    for line, note in zip(lines, lines, strict=True):
        seconds, _, name, meaning = line.split(maxsplit=3)
        basis, _, reason = note.strip().partition(": ")
        if basis == "fixed" and not is_fixed:
            is_fixed = True
            yield ""
            yield "These limits do not follow `detection_seconds`:"
            yield ""
            yield "| limit | seconds | meaning | reason |"
            yield "| --- | ---: | --- | --- |"
        times = "" if is_fixed else f" {basis.split()[0]} |"
        yield f"| `{name}` |{times} {float(seconds):g}{'' if is_fixed else ' s'} | {meaning} | {reason} |"
    yield ""


# -- docs/reference/field-coverage.md


def request_fields(model: Mapping[str, Any]) -> list[str]:
    """Return every request field that has no inner fields.

    Args:
        model: content of service-2.json.

    Returns:
        Paths such as `Operation.Field.Inner`, or `Operation.Field[].Inner` for fields in lists.
    """
    shapes = model["shapes"]

    def below(name: str, path: str) -> Iterator[str]:
        shape = shapes[name]
        if shape["type"] == "structure" and shape["members"]:
            for member, reference in shape["members"].items():
                yield from below(reference["shape"], f"{path}.{member}")
        elif shape["type"] == "list" and shapes[shape["member"]["shape"]]["type"] == "structure":
            yield from below(shape["member"]["shape"], f"{path}[]")
        else:
            yield path

    return [
        path
        for name, operation in sorted(model["operations"].items())
        if "input" in operation
        for path in below(operation["input"]["shape"], name)
    ]


def covered(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the tests that cover a request field, as their mark `@pytest.mark.covers("Operation.Field", …)` declares.

    Args:
        paths: test files.

    Returns:
        `path::test` entries, by field.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        text = path.read_text()
        if "mark.covers(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
                    for field in mark.args:
                        found.setdefault(ast.literal_eval(field), []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def coverage_document(fields: Iterable[str], tests: Mapping[str, list[str]]) -> str:
    """Return docs/reference/field-coverage.md.

    Args:
        fields: fields of all requests.
        tests: covering tests, by field.

    Returns:
        The document. A field without a test has a dash.

    Raises:
        ValueError: a test covers an unknown field.
    """
    known = list(fields)
    if strange := sorted(tests.keys() - set(known)):
        raise ValueError(f"tests cover fields that no request has: {', '.join(strange)}")
    lines = [
        "# Fields and their tests\n",
        "Written by `python docs/generate.py`. Each field of each request, and the tests that show that it "
        "changes what happens: they say so with",
        "`@pytest.mark.covers`. A field without a test fails `tests/tidy`.\n",
        "| operation | field | tests |",
        "| --- | --- | --- |",
    ]
    for field in known:
        operation, _, name = field.partition(".")
        shown = "<br>".join(f"`{each}`" for each in sorted(tests.get(field, []))) or "–"
        lines.append(f"| {operation} | `{name}` | {shown} |")
    return "\n".join(lines) + "\n"


# -- docs/adr/README.md and docs/modules.md


def decisions_document() -> str:
    """Return docs/adr/README.md: a link to each decision."""
    intro = "Each page states one decision, its reasons and the alternatives. Written by `python docs/generate.py`.\n"
    return "\n".join(["# Decisions\n", intro, *_decisions()]) + "\n"


def _decisions() -> Iterator[str]:
    for path in sorted(DECISIONS.parent.glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({path.name})"


def modules_document() -> str:
    """Return docs/modules.md."""
    intro = "Written by `python docs/generate.py`: every module and the first sentence of its docstring.\n"
    return "\n".join(["# Modules\n", intro, *_modules()]).rstrip("\n") + "\n"


def _between(text: str, begin: str, end: str, lines: Iterable[str]) -> str:
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"a document needs the lines {begin} and {end}")
    return "\n".join([before + begin, "", *lines, end + after])


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        folders: dict[Path, list[Path]] = {}
        for path in sorted((ROOT / package).rglob("*.py")):
            folders.setdefault(path.parent, []).append(path)
        for folder, paths in folders.items():
            modules = [path for path in paths if path.name != "__init__.py"]
            if not modules:
                continue
            yield f"## `{folder.relative_to(ROOT)}/`"
            yield ""
            yield "| file | what it is |"
            yield "| --- | --- |"
            for path in modules:
                yield f"| `{path.name}` | {summary(path)} |"
            yield ""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line and escaped for a table.

    Args:
        path: file of the module.

    Returns:
        The summary.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|").rstrip(":")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
