"""The leases of jobs and fleets that this server holds and renews.

Invariant: a lease that another server has taken over never becomes valid again. Writes under it raise StaleLease.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from control_plane.core.timeouts import grace_seconds
from control_plane.db.errors import StaleLease
from control_plane.db.leases import Lease, Leaser, owner_of
from control_plane.loop.context import LoopContext
from control_plane.loop.loop_metrics import Loop


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    first_counter: int
    """The lease's counter when this server claimed it. Each renewal increments the counter."""


class HeldLeases:
    """The leases of one kind that this server holds. The server renews a lease after a third of its duration.

    Only one thread at a time may call `hold` for one lease. The server calls `release_all` once, after its last pass.
    """

    def __init__(self, context: LoopContext, kind: Loop) -> None:
        self._database = context.database
        self._figures = context.loop_metrics
        self._monotonic = context.monotonic
        self._ttl_seconds = grace_seconds(context.timeouts)
        self._leaser = Leaser(context.owner, self._ttl_seconds, context.monotonic)
        self._kind: Loop = kind
        self._held: dict[str, _Held] = {}

    def hold(self, key: str, *, at_once: bool = False) -> Lease | None:
        """Return the lease of a job or fleet, claimed or renewed if necessary. None while another server holds it.

        `at_once` takes the lease over before it expires. The previous owner must no longer be able to write under it.
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
        """Return the lease as this server renewed it last, or `lease` itself if this server has lost it."""
        held = self._held.get(lease.key)
        return held.lease if held is not None and held.first_counter <= lease.counter else lease

    def holds(self, key: str) -> bool:
        """Return whether this server holds the lease and the lease has not expired."""
        held = self._held.get(key)
        return held is not None and self._monotonic() - held.lease.taken_at < self._ttl_seconds

    def check(self, session: Session, key: str) -> None:
        """Raise StaleLease unless this server holds the lease, by its clock and the database. Needs a write session."""
        # No other server can take the lease over until the caller's write transaction ends.
        if not self.holds(key) or owner_of(session, self._kind, key) != self._leaser.owner:
            raise StaleLease(f"the lease of {self._kind} {key} was lost during a pass")

    def has_lapsed(self, key: str) -> bool:
        """Return whether this server held the lease and the lease has expired. Another server may hold it by now."""
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
