"""Tests which exception and which line of the job's own code a traceback names."""

from __future__ import annotations

import pytest

from control_plane.core.tracebacks import exception, exception_class, place

HEAD = "Traceback (most recent call last):"
LIBRARY = "/venv/lib/python3.11/site-packages/torch/nn/linear.py"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("Traceback\n[rank0]: KeyError: 'labels'", "KeyError: 'labels'"),
        ("Traceback\ntorch.OutOfMemoryError: full\n", "torch.OutOfMemoryError: full"),
        ("KeyError: 'labels'\nthe last line of a log", None),
        (
            "  File \"train.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was never closed",
            "SyntaxError: '(' was never closed",
        ),
        (f"{HEAD}\n  File x\npkg.Refused: one\n  two\n\tthree\n", "pkg.Refused: one"),
        (f"{HEAD}\n  File x\nModuleNotFoundError: No module named 'flash_attn'\nstep 1\nconnection lost", None),
        (f"{HEAD}\n  File x\nKeyError: 1\n\nDuring handling\n\n{HEAD}\n  File y\nAssertionError", "AssertionError"),
        (f"[rank1]: {HEAD}\n[rank1]:   File x\n[rank1]: RuntimeError: a\n[rank1]: b\n", "RuntimeError: a"),
        (f"[rank1]: {HEAD}\n[rank1]: KeyError: 1\n[rank1]:[W101] Warning: the group was not destroyed", "KeyError: 1"),
        ("", None),
    ],
)
def test_the_exception_is_the_first_line_after_the_frames_of_the_last_traceback(lines: str, error: str | None) -> None:
    assert exception(lines) == error


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (("/nodes/i-1/sources/ab/train.py", "/nodes/i-1/sources/ab/data.py"), "data.py:2"),
        (("/nodes/i-1/sources/ab/train.py", LIBRARY), "train.py:1"),
        ((LIBRARY, "<frozen runpy>"), None),
    ],
)
def test_the_place_is_the_innermost_line_of_the_jobs_own_code(paths: tuple[str, ...], found: str | None) -> None:
    lines = "\n".join(f'[rank3]:   File "{path}", line {line}, in main' for line, path in enumerate(paths, 1))
    assert place(lines) == found


@pytest.mark.parametrize(
    ("error", "name"),
    [("a.b.KeyError: x.y: z", "KeyError"), ("AssertionError", "AssertionError"), (None, "")],
)
def test_the_class_is_named_without_its_module(error: str | None, name: str) -> None:
    assert exception_class(error) == name
