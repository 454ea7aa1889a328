"""Observes the leases in the database from outside, and judges whether any server wrote under a lost lease."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from control_plane.db.models import FleetRow, JobRow
from control_plane.db.session import Database

LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """The lease of one fleet or job, as its database row shows it at one moment."""

    row: str
    owner: str | None
    counter: int


def violations(samples: list[Sample]) -> list[str]:
    """Return a sentence for each violation of the rules for leases. Samples of one row are in the order of time.

    A server that claims a lease increases the counter of the lease.

    - The counter of a lease never falls. A fail-over that loses a confirmed claim, or a stale write, would lower it.
    - A value of the counter belongs to one owner. The owner may release the lease, but no other server has the same
      value.
    """
    wrong: list[str] = []
    highest: dict[str, int] = {}
    owners: dict[tuple[str, int], str] = {}
    for sample in samples:
        if sample.counter < highest.get(sample.row, 0):
            wrong.append(f"the counter of {sample.row} fell from {highest[sample.row]} to {sample.counter}")
        highest[sample.row] = max(sample.counter, highest.get(sample.row, 0))
        if sample.owner is None:
            continue
        owner = owners.setdefault((sample.row, sample.counter), sample.owner)
        if owner != sample.owner:
            wrong.append(f"{owner} and {sample.owner} both hold {sample.row} with counter {sample.counter}")
    return wrong


class LeaseWatch(threading.Thread):
    """Thread that samples all leases until `end`. While the database is unreachable, the thread adds no samples."""

    def __init__(self, url: str) -> None:
        super().__init__(name="lease watch", daemon=True)
        self.samples: list[Sample] = []
        self._url = url
        self._over = threading.Event()

    def end(self) -> None:
        """Stop the thread and wait for it."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Sample all leases until `end`."""
        with closing(Database(self._url)) as database:
            while not self._over.wait(LOOK_SECONDS):
                with suppress(SQLAlchemyError), database.read() as session:
                    rows = [
                        *session.execute(select(FleetRow.name, FleetRow.lease_owner, FleetRow.lease_counter)),
                        *session.execute(select(JobRow.run_id, JobRow.lease_owner, JobRow.lease_counter)),
                    ]
                    self.samples += [Sample(*row) for row in rows]
