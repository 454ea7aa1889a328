"""Leases: which replica of the control plane works on a job, a fleet or an export.

    owner       claims before every pass, which bumps the counter
    contender   watches owner and counter; when both stood still for `ttl_seconds` on its own monotonic clock, it takes the row over
    successor   takes the row over at once from an earlier process in its own place, which is known to be dead (`control_plane.replica`)

Clocks of two machines are never compared, and nothing expires by itself: what was worked out under a lease counts only
if `guard` still finds owner and counter as they were, in the transaction that writes it.

Invariant: of two writers guarded by leases of one row, at most one commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.models import Export, Fleet, Job
from control_plane.db.session import changed_rows
from control_plane.replica import is_predecessor

LeaseKind = Literal["job", "fleet", "export"]
_Table = type[Job] | type[Fleet] | type[Export]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to one row, as long as nobody else has claimed it."""

    kind: LeaseKind
    key: str
    """Run id of a job, name of a fleet or an export."""
    owner: str
    counter: int
    taken_at: float = field(default=float("-inf"), compare=False)
    """When it was claimed or renewed, by the monotonic clock of who has it: it means nothing to anybody else."""


class Leaser:
    """Claims leases for one replica of the control plane. Used by one thread at a time.

    Args:
        owner: as `Replica.owner`, fresh at every start of the server.
        ttl_seconds: how long a lease must stand still before it may be taken over.
        monotonic: seconds of a clock that never jumps.
    """

    def __init__(self, owner: str, ttl_seconds: float, monotonic: Callable[[], float]) -> None:
        self.owner = owner
        self._ttl_seconds = ttl_seconds
        self._monotonic = monotonic
        self._watched: dict[tuple[LeaseKind, str], tuple[str, int, float]] = {}
        self._moved_at: dict[tuple[LeaseKind, str], float] = {}

    def claim(self, session: Session, kind: LeaseKind, key: str, *, at_once: bool = False) -> Lease | None:
        """Take, keep or take over the lease of a row.

        Args:
            session: a writing one.
            kind: the table.
            key: the row.
            at_once: whoever has it has lost the right to it; it need not stand still first.

        Returns:
            The lease, or None while another replica holds it.

        Raises:
            NotFound: there is no such row.
        """
        table, row = _row(kind, key)
        found = session.execute(select(table.lease_owner, table.lease_counter).where(row)).one_or_none()
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
        """Say whether another replica was seen to bump this lease, by claims of ours, within the time to live."""
        moved_at = self._moved_at.get((kind, key))
        return moved_at is not None and self._monotonic() - moved_at < self._ttl_seconds

    def renew(self, session: Session, lease: Lease) -> Lease:
        """Show that the owner is alive in the middle of a long pass, and return the lease to go on with.

        Args:
            session: a writing one.
            lease: as last claimed or renewed.

        Returns:
            The lease with its counter bumped.

        Raises:
            StaleLease: another replica has taken over.
        """
        renewed = self._take(session, lease.kind, lease.key, lease.owner, lease.counter)
        if renewed is None:
            raise StaleLease(f"the lease of {lease.kind} {lease.key} was taken over")
        return renewed

    def is_due(self, lease: Lease) -> bool:
        """Say whether a third of a lease's time is over since it was claimed or renewed: who is still at work renews it."""
        return self._monotonic() - lease.taken_at >= self._ttl_seconds / 3

    def release(self, session: Session, lease: Lease) -> None:
        """Let another replica claim the row at once. A lease that is lost already is fine."""
        table, row = _row(lease.kind, lease.key)
        session.execute(update(table).where(row, _held(table, lease.owner, lease.counter)).values(lease_owner=None))

    def _take(self, session: Session, kind: LeaseKind, key: str, owner: str | None, counter: int) -> Lease | None:
        table, row, taken_at = *_row(kind, key), self._monotonic()
        taken = (
            update(table)
            .where(row, _held(table, owner, counter))
            .values(lease_owner=self.owner, lease_counter=counter + 1)
        )
        return Lease(kind, key, self.owner, counter + 1, taken_at) if changed_rows(session.execute(taken)) else None

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
    """Make everything that this transaction writes depend on the lease: nothing of it is committed once the lease is lost.

    The row is written, not only read, so that a claim that comes at the same time waits for this transaction on any
    database.

    Args:
        session: the one that writes.
        lease: that what is written was worked out under.

    Raises:
        StaleLease: the row's owner or counter is another one, or the row is gone.
    """
    table, row = _row(lease.kind, lease.key)
    if not changed_rows(
        session.execute(
            update(table).where(row, _held(table, lease.owner, lease.counter)).values(lease_counter=lease.counter)
        )
    ):
        raise StaleLease(f"the lease of {lease.kind} {lease.key} was taken over")


def _row(kind: LeaseKind, key: str) -> tuple[_Table, ColumnElement[bool]]:
    match kind:
        case "job":
            return Job, Job.run_id == key
        case "fleet":
            return Fleet, Fleet.name == key
        case "export":
            return Export, Export.name == key


def _held(table: _Table, owner: str | None, counter: int) -> ColumnElement[bool]:
    return table.lease_owner.is_not_distinct_from(owner) & (table.lease_counter == counter)
