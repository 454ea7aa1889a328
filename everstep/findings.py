"""The results of `everstep doctor`: one finding per check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding.

    - OK: the checked thing works.
    - WARNING: the checked thing works, but needs attention.
    - WRONG: the checked thing does not work.
    """

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    message: str
    advice: str = ""
    """The remedy. Empty if none is needed."""
