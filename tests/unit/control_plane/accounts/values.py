"""Values of sentences, as the migration of stored sentences makes them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import msgspec

from control_plane.core.observed.facts import Fact
from control_plane.core.observed.incidents import Response
from control_plane.core.observed.reasons import GaveUp

(_FILE,) = (Path(__file__).parents[4] / "alembic/versions").glob("*_facts_of_incidents.py")
MIGRATION = runpy.run_path(str(_FILE))
FAILURE = {"generation": 1, "step": 7, "exit_class": "error", "code": 1, "at": 90.0, "max_boundary": 1132}
OPENED_AT = 1_772_356_794.0


def facts(*sentences: str) -> tuple[Fact, ...]:
    return msgspec.convert(MIGRATION["facts"](sentences, OPENED_AT), tuple[Fact, ...])


def response(decision: str) -> Response:
    return msgspec.convert(MIGRATION["response"](decision), Response)  # type: ignore[arg-type]


def gave_up(reason: str, **failure: Any) -> GaveUp | str:
    """Return the value of the reason for which Everstep gave up a job, or the sentence of any other reason."""
    value = MIGRATION["gave_up"](reason, [{**FAILURE, **failure}])
    return reason if value is None else msgspec.convert(value, GaveUp)
