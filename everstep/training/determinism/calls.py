"""Records a script's calls to functions whose results differ between runs: the clock, OS entropy, directory listings.

Calls through a name that the script imported before `install`, and calls of installed packages, are not recorded.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OBSERVED: tuple[tuple[Any, str, str], ...] = (
    (os, "urandom", "os.urandom"),
    # `SystemRandom`, `secrets` and numpy's unseeded generators call `os.urandom` under this name.
    (random, "_urandom", "os.urandom"),
    (os, "listdir", "os.listdir"),
    (os, "scandir", "os.scandir"),
    (time, "time", "time.time"),
    (time, "time_ns", "time.time_ns"),
)
_PATHS = sysconfig.get_paths()
_STANDARD_LIBRARY = tuple({_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep})
_INSTALLED = (*{_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep}, str(Path(__file__).parents[2]) + os.sep)

_seen: dict[str, None] = {}
_is_installed = False


def install() -> None:
    """Start to record calls. Idempotent. Called when a process of a determinism check imports `everstep.training`."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for holder, name, label in _OBSERVED:
        setattr(holder, name, _observed(getattr(holder, name), label))
    random.Random.seed = _observed_seed(random.Random.seed)  # type: ignore[method-assign]


def drain() -> list[str]:
    """Return the calls since the last call of `drain`, each once, as `time.time at train.py:12`."""
    calls = list(_seen)
    _seen.clear()
    return calls


@functools.cache
def is_user_file(name: str) -> bool:
    """Return whether a source file belongs to the user, and not to Python, an installed package or Everstep."""
    return not (name.startswith("<") or name.startswith(_INSTALLED) or name.startswith(_STANDARD_LIBRARY))


def _observed(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _note(label)
        return function(*args, **kwargs)

    return call


def _observed_seed(seed: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(seed)
    def call(self: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
        if a is None:
            _note("random.Random without a seed")
        seed(self, a, *args, **kwargs)

    return call


def _note(label: str) -> None:
    """Record a call by the script, or through the standard library, with the script's file and line."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_passed(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # Ignore this call: Python's import system made it, because the script imports a module.
        frame = frame.f_back
    if is_user_file(frame.f_code.co_filename):
        _seen[f"{label} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"] = None


@functools.cache
def _is_passed(name: str) -> bool:
    return name.startswith("<") or (name.startswith(_STANDARD_LIBRARY) and not name.startswith(_INSTALLED))
