"""No text of a job can send control sequences to the reader's terminal.

Only the command line's own colors are allowed.
"""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.model import ServiceModel
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.cli.terminal import safe, safe_cell, safe_line

pytestmark = pytest.mark.security

CLIPBOARD = "\x1b]52;c;Y3VybCBldmlsfHNo\x07"
HOSTILE = f"a{CLIPBOARD}b\x9d52;c;eA==\x9cc\x1bPq#0\x1b\\d\x1b_x\x1b\\e\x1b[2J\x1b[1A\rf\x9b31mg\u202eh\x1b[5ni"
UNSAFE = re.compile(
    r"\x1b(?!\[[0-9;:]*m)"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
FLAGS = Path(__file__).parents[2] / "tidy" / "flags.txt"
OTHERS = {"configure", "doctor", "local", "server", "agent", "wait"}
"""Commands that print no text that a job could control."""
ENDLESS = {"jobs wait"}
"""Commands that return only when the job ends, which never happens in these tests.

The tests of `jobs top` cover `jobs wait` too, because both print their lines with `line_of`.
"""
VALUES = {"STEP": "1", "LIMIT": "1"}
OPTIONS = {
    "jobs exec": ["--rank", "0", "--", "ls"],
    "jobs logs": ["--rank", "0"],
    "events list": ["--job", "gpt"],
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nnext", "plain\ttext\nnext"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m\x1b[0m"),
        (f"a{CLIPBOARD}b", "ab"),
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\x1b]52;c;never ended", "a�]52;c;never ended"),
        ("a\x1b\x1b[2J[2Jb", "a�[2Jb"),
        ("a\x1b]0;\x1b[2Jb", "a�]0;b"),
        ("\x9b2Ja\x90q\x9cb", "ab"),
        ("10%\r20%", "10%�20%"),
        ("dos\r\nline", "dos\nline"),
        ("user\u202egpj.exe", "user�gpj.exe"),
        ("a\x1bcb\x08\x00", "ab��"),
        ("\ud800", "�"),
    ],
)
def test_only_colors_pass(text: str, shown: str) -> None:
    assert safe(text) == shown


PIECES = st.sampled_from(
    [
        "\x1b",
        "\x9b",
        "\x9d",
        "[",
        "]",
        "52;c;",
        "m",
        "J",
        "\x07",
        "\x1b\\",
        "\x9c",
        "P",
        "_",
        "3",
        ";",
        "a",
        "\n",
        "\r",
        "\u202e",
    ]
)


@given(st.lists(PIECES | st.characters(), max_size=30).map("".join))
def test_nothing_that_is_left_can_be_obeyed(text: str) -> None:
    assert not UNSAFE.search(safe(text))
    assert not UNSAFE.search(safe_line(text))
    assert "\n" not in safe_line(text)
    assert "\x1b" not in safe_cell(text)


def sample(shape: Any, depth: int = 0) -> Any:
    """Return an answer with this shape, in which every text has control sequences."""
    match shape.type_name:
        case "structure":
            return {name: sample(member, depth + 1) for name, member in shape.members.items() if name != "NextToken"}
        case "list":
            return [] if depth > 5 else [sample(shape.member, depth + 1)]
        case "map":
            return {HOSTILE: sample(shape.value, depth + 1)}
        case "timestamp":
            return datetime(2026, 3, 1, tzinfo=UTC)
        case "boolean":
            return False
        case "integer" | "long":
            return 1
        case "float" | "double":
            return 0.5
        case "blob":
            return b"x"
        case _:
            return HOSTILE


def operations() -> dict[str, Any]:
    (file,) = (Path(everstep.__file__).parent / "data" / "everstep").glob("*/service-2.json")
    model = ServiceModel(json.loads(file.read_text()), "everstep")
    shapes = {xform_name(name): model.operation_model(name).output_shape for name in model.operation_names}
    answers = {name: {} if shape is None else sample(shape) for name, shape in shapes.items()}
    page = answers["get_log_events"]
    return {
        **answers,
        "get_log_events": lambda NextToken=None, **_: {**page, "Events": [] if NextToken else page["Events"]},
    }


def commands() -> list[str]:
    lines = [line for line in FLAGS.read_text().splitlines() if "--endpoint-url" in line]
    return [line for line in lines if line.split()[1] not in OTHERS and " ".join(line.split()[1:3]) not in ENDLESS]


def words(line: str) -> list[str]:
    """Return a command with a value for each of its arguments."""
    name = [word for word in line.split()[1:] if word.islower() and not word.startswith("-")]
    arguments = [VALUES.get(word, "gpt") for word in line.split()[1:] if word.isupper()]
    yes = ["--yes"] if "--yes" in line else []
    return [*name, *arguments, *yes, *OPTIONS.get(" ".join(name), [])]


@pytest.mark.parametrize("output", [[], ["--output", "text"]], ids=["table", "text"])
def test_no_command_prints_what_a_terminal_would_obey(run: Any, output: list[str]) -> None:
    answers, told = operations(), set()
    for line in commands():
        if output and line.split()[2] not in ("describe", "list", "logs"):
            continue
        name, *more = words(line)
        _, out, err, _ = run(name, more[0], *output, *more[1:], **answers) if more else run(name, *output, **answers)
        found = UNSAFE.search(out + err)
        assert not found, f"{shlex.join(words(line))} printed {found[0]!r}"
        if "abcde" in out + err:
            told.add(line)
    assert len(told) > (10 if output else 30), "hardly any command has printed anything of a job"
