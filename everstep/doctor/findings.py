"""The results of `everstep doctor`: one finding per check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding.

    - OK: the checked part of the machine, the service or AWS works.
    - WARNING: the checked part works, but a person should act on the advice.
    - WRONG: the checked part does not work, so Everstep or a feature of it fails.
    """

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of `everstep doctor`."""

    check: str
    level: Level
    message: str
    advice: str = ""
    """The remedy. Empty if none is needed."""
