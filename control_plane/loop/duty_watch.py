"""Records an event when a duty of a person begins or ends. The exporters send it like all events.

Invariant: the duty, its sentence and its urgency are those of every answer of the API (`loop.disposition`). One
transaction stores the event and the reported duty, so several servers report it only once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from control_plane.accounts.duties import sentence
from control_plane.db import duties, events
from control_plane.db.duties import ToldDuty
from control_plane.db.events import NewEvent
from control_plane.db.session import Database
from control_plane.loop import disposition
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.disposition import Disposition
from everstep.protocol.ids import FleetName

DUTY_CHECK_SECONDS: Final = 5.0
BEGAN: Final = "DutyBegan"
ENDED: Final = "DutyEnded"


class DutyWatch:
    """The background task that compares the present duties with those that events have reported."""

    def __init__(self, database: Database, registry: AgentRegistry, now: Callable[[], datetime]) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    def compare(self) -> int:
        """Store an event for each duty that has begun, changed or ended. Return their number. Blocks."""
        with self._database.read() as session:
            if not self._changes(session):
                return 0
        with self._database.write() as session:
            changes = self._changes(session)
            for key, each in changes:
                if each is None or not each.duty.urgency.needs_a_person:
                    duties.remove(session, key)
                else:
                    told = ToldDuty(subject=key, kind=each.duty.kind.value, urgency=each.duty.urgency.value)
                    duties.store(session, told)
                if each is not None:
                    events.append(session, self._event(each))
            return len(changes)

    def _changes(self, session: Session) -> list[tuple[str, Disposition | None]]:
        """Return the jobs and fleets whose duty is not the reported one. None: the subject no longer exists."""
        told = duties.every(session)
        agents = self._registry.connected()
        runs = [key.removeprefix("job/") for key in told if key.startswith("job/")]
        present = disposition.everything(session, agents, self._now().timestamp(), also=runs)
        elsewhere = self._registry.is_elsewhere
        mine = {key: each for key, each in present.items() if not elsewhere(FleetName(each.fleet_name))}
        changed = [
            (key, each)
            for key, each in mine.items()
            if (each.duty.kind.value, each.duty.urgency.value) != _of(told.get(key))
            and (each.duty.urgency.needs_a_person or key in told)
        ]
        return [*changed, *((key, None) for key in told.keys() - present.keys())]

    def _event(self, each: Disposition) -> NewEvent:
        words = sentence(each.duty)
        return NewEvent(
            at=self._now(),
            type=BEGAN if each.duty.urgency.needs_a_person else ENDED,
            message=f"{each.job_name or each.fleet_name}: {words}",
            project=each.project,
            fleet_name=each.fleet_name,
            job_name=each.job_name or None,
            detail={"kind": each.duty.kind.value, "urgency": each.duty.urgency.value, "sentence": words},
        )


def _of(told: ToldDuty | None) -> tuple[str, str]:
    return ("", "") if told is None else (told.kind, told.urgency)
