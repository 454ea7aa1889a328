"""Leases: each gives one control-plane server the exclusive right to work on a job, a fleet or an export.

    owner       claims each time before its background loops work; each claim increments the counter
    contender   takes over when owner and counter have not changed for `ttl_seconds` of the contender's monotonic clock
    successor   takes over immediately from a dead server with the same state directory (`control_plane.replica`)

No server compares the clocks of two machines, and a lease never expires without a contender. A server may only write
its results for a row in a transaction in which `guard` finds the owner and the counter of its lease unchanged.

Invariant: if two servers believe that they hold the lease of one row, at most one of them can commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, cast

from sqlalchemy import Select, Table, Update, bindparam, select, update
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.models import Base, ExportRow, FleetRow, JobRow
from control_plane.db.session import changed_rows
from control_plane.replica import is_predecessor

LeaseKind = Literal["job", "fleet", "export"]
_TABLES: Final[Mapping[LeaseKind, tuple[type[Base], str]]] = {
    "job": (JobRow, "run_id"),
    "fleet": (FleetRow, "name"),
    "export": (ExportRow, "name"),
}
"""Table by kind, with the name of the key's column."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one row, until another server claims the row."""

    kind: LeaseKind
    key: str
    """Run id of a job, or name of a fleet or export."""
    owner: str
    counter: int
    taken_at: float = field(default=float("-inf"), compare=False)
    """Claim or last renewal, in seconds of this process's monotonic clock."""


def owner_of(session: Session, kind: LeaseKind, key: str) -> str | None:
    """Return the server that holds the lease of a row, or None."""
    found = session.execute(_statements(kind).find, {"of_key": key}).one_or_none()
    return None if found is None else found.lease_owner


class Leaser:
    """Claims leases for one server. Threads may share it, for different rows.

    `owner` is `ServerReplica.owner`. A lease must be unchanged for `ttl_seconds` before a takeover.
    """

    def __init__(self, owner: str, ttl_seconds: float, monotonic: Callable[[], float]) -> None:
        self.owner = owner
        self._ttl_seconds = ttl_seconds
        self._monotonic = monotonic
        self._watched: dict[tuple[LeaseKind, str], tuple[str, int, float]] = {}
        self._moved_at: dict[tuple[LeaseKind, str], float] = {}

    def claim(self, session: Session, kind: LeaseKind, key: str, *, at_once: bool = False) -> Lease | None:
        """Claim a free lease, renew this server's own, or take over an expired one.

        Return None while another server holds it. `at_once` takes the lease over immediately, because its owner can no
        longer use it. Raises NotFound if the row does not exist.
        """
        found = session.execute(_statements(kind).find, {"of_key": key}).one_or_none()
        if found is None:
            raise NotFound(kind, key)
        owner, counter = found
        is_ours = owner is None or owner == self.owner or is_predecessor(self.owner, owner)
        if owner is not None and not is_ours and not at_once and not self._stood_still(kind, key, owner, counter):
            return None
        self._watched.pop((kind, key), None)
        self._moved_at.pop((kind, key), None)
        return self._take(session, kind, key, owner, counter)

    def sees_another(self, kind: LeaseKind, key: str) -> bool:
        """Return whether another server holds and renews this lease, as this server's attempts to claim it show."""
        moved_at = self._moved_at.get((kind, key))
        return moved_at is not None and self._monotonic() - moved_at < self._ttl_seconds

    def renew(self, session: Session, lease: Lease) -> Lease:
        """Return the lease with a new counter, which the caller must use from now on. Raises StaleLease."""
        renewed = self._take(session, lease.kind, lease.key, lease.owner, lease.counter)
        if renewed is None:
            raise StaleLease(f"the lease of {lease.kind} {lease.key} was taken over")
        return renewed

    def is_due(self, lease: Lease) -> bool:
        """Return whether a third of `ttl_seconds` has passed since the last renewal of this server's lease."""
        return self._monotonic() - lease.taken_at >= self._ttl_seconds / 3

    def release(self, session: Session, lease: Lease) -> None:
        """Release a lease, so that another server can claim it immediately. No effect on a lost lease."""
        held = {"of_key": lease.key, "owner": lease.owner, "counter": lease.counter}
        session.execute(_statements(lease.kind).take, {**held, "new_owner": None, "new_counter": lease.counter})

    def _take(self, session: Session, kind: LeaseKind, key: str, owner: str | None, counter: int) -> Lease | None:
        taken_at = self._monotonic()
        held = {"of_key": key, "owner": owner, "counter": counter}
        taken = session.execute(_statements(kind).take, {**held, "new_owner": self.owner, "new_counter": counter + 1})
        return Lease(kind, key, self.owner, counter + 1, taken_at) if changed_rows(taken) else None

    def _stood_still(self, kind: LeaseKind, key: str, owner: str, counter: int) -> bool:
        now = self._monotonic()
        watched = self._watched.get((kind, key))
        if watched is None or watched[:2] != (owner, counter):
            if watched is not None:
                self._moved_at[kind, key] = now
            self._watched[kind, key] = (owner, counter, now)
            return False
        return now - watched[2] >= self._ttl_seconds


def guard(session: Session, lease: Lease) -> None:
    """Check a lease, and lock its row until the end of the write transaction, so that a concurrent claim waits.

    Raises StaleLease if the row has another owner or counter, or does not exist.
    """
    held = {"of_key": lease.key, "owner": lease.owner, "counter": lease.counter}
    same = {"new_owner": lease.owner, "new_counter": lease.counter}
    if not changed_rows(session.execute(_statements(lease.kind).take, {**held, **same})):
        raise StaleLease(f"the lease of {lease.kind} {lease.key} was taken over")


@dataclass(frozen=True, slots=True)
class _Statements:
    """The SQL statements about the leases of one table."""

    find: Select[*tuple[Any, ...]]
    """Owner and counter of the row `of_key`."""
    take: Update
    """Sets `new_owner` and `new_counter`, if the row `of_key` has `owner` and `counter`."""


@cache
def _statements(kind: LeaseKind) -> _Statements:
    # Cached, because the background loops execute the statements often, and their construction takes time.
    model, key = _TABLES[kind]
    table = cast(Table, model.__table__)
    is_row, columns = table.c[key] == bindparam("of_key"), table.c
    is_held = columns.lease_owner.is_not_distinct_from(bindparam("owner")) & (
        columns.lease_counter == bindparam("counter")
    )
    return _Statements(
        find=select(columns.lease_owner, columns.lease_counter).where(is_row),
        take=update(table)
        .where(is_row, is_held)
        .values(lease_owner=bindparam("new_owner"), lease_counter=bindparam("new_counter")),
    )
