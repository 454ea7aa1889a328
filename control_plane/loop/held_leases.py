"""The leases (time-limited ownership of jobs and fleets) that this control-plane server holds and renews.

Invariant: a lease that another server has taken over never becomes valid again. A write under such a lease raises
StaleLease.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from control_plane.core.timeouts import grace_seconds
from control_plane.db.errors import StaleLease
from control_plane.db.leases import Lease, Leaser, owner_of
from control_plane.loop.context import LoopContext
from control_plane.loop.figures import Loop


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    first_counter: int
    """The lease's counter in the database when this server claimed the lease. Each renewal increments the counter."""


class HeldLeases:
    """The leases of one kind (jobs or fleets) that this server holds.

    The server renews a lease after a third of its duration, not each time it uses the lease. Different threads may call
    `hold` for different leases at the same time, but only one thread at a time for one lease. Any thread may call the
    methods other than `release_all`. The server calls `release_all` once, after it has processed the last job or fleet.

    Args:
        context: gives access to the database, the clocks and the clients.
        kind: kind of the rows that the leases belong to.
    """

    def __init__(self, context: LoopContext, kind: Loop) -> None:
        self._database = context.database
        self._figures = context.figures
        self._monotonic = context.monotonic
        self._ttl_seconds = grace_seconds(context.timeouts)
        self._leaser = Leaser(context.owner, self._ttl_seconds, context.monotonic)
        self._kind: Loop = kind
        self._held: dict[str, _Held] = {}

    def hold(self, key: str, *, at_once: bool = False) -> Lease | None:
        """Return the lease of a job or fleet. Claim or renew the lease first if necessary.

        Return None while another server holds the lease. With `at_once`, the method takes the lease over before it
        expires. The caller must be sure that the previous owner can no longer write under this lease.
        """
        held = self._held.get(key)
        if held is not None and not self._leaser.is_due(held.lease):
            return held.lease
        with self._database.write() as session:
            lease = self._leaser.claim(session, self._kind, key, at_once=at_once)
        if lease is None:
            self.lose(key)
            return None
        is_unbroken = held is not None and lease.counter == held.lease.counter + 1
        self._held[key] = _Held(lease, held.first_counter if held is not None and is_unbroken else lease.counter)
        return lease

    def renewed(self, lease: Lease) -> Lease:
        """Return the lease as this server renewed it last.

        If this server has lost the lease, return `lease` itself. Writes under this lease then raise StaleLease
        (`db.leases.guard`).
        """
        held = self._held.get(lease.key)
        return held.lease if held is not None and held.first_counter <= lease.counter else lease

    def holds(self, key: str) -> bool:
        """Return whether this server holds the lease and the lease has not expired."""
        held = self._held.get(key)
        return held is not None and self._monotonic() - held.lease.taken_at < self._ttl_seconds

    def check(self, session: Session, key: str) -> None:
        """Raise StaleLease unless this server holds the lease, according to both its own clock and the database.

        Args:
            session: from `Database.write`. No other server can take the lease over until this transaction ends.
            key: run id of the job or name of the fleet.

        Raises:
            StaleLease: the lease has lapsed, or another server has taken it over.
        """
        if not self.holds(key) or owner_of(session, self._kind, key) != self._leaser.owner:
            raise StaleLease(f"the lease of {self._kind} {key} was lost during a pass")

    def has_lapsed(self, key: str) -> bool:
        """Return whether this server held the lease and the lease has expired.

        Another server may have taken over an expired lease.
        """
        return key in self._held and not self.holds(key)

    def sees_another(self, key: str) -> bool:
        """Return whether another server has claimed or renewed this lease so recently that it is still valid."""
        return key not in self._held and self._leaser.sees_another(self._kind, key)

    def lose(self, key: str) -> None:
        """Forget a lease that another server has taken over, and count the loss in the metrics."""
        if self._held.pop(key, None) is not None:
            self._figures.lost_lease(self._kind)

    def drop(self, key: str) -> None:
        """Forget a lease that this server no longer needs. The lease then expires."""
        self._held.pop(key, None)

    def release_all(self) -> None:
        """Release all leases, so that other servers can claim them immediately."""
        with self._database.write() as session:
            for held in self._held.values():
                self._leaser.release(session, held.lease)
        self._held.clear()
