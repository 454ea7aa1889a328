"""Prometheus metrics of this process's loops. They are not stored, and start at zero with the process.

Names, units and labels follow https://prometheus.io/docs/practices/naming. Invariant: the number of series is constant.
It does not depend on jobs, fleets or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.registry import Collector

from control_plane.core.incidents import PHASES
from control_plane.db.errors import StaleLease

# Without this call, the library adds a `_created` series to each series. It would contain only the process's start
# time, which another metric already contains.
disable_created_metrics()  # type: ignore[no-untyped-call]

Loop = Literal["job", "fleet"]
LOOPS: Final[tuple[Loop, ...]] = ("job", "fleet")
PASS_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PHASE_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class LoopMetrics:
    """Prometheus counters and histograms of one server. Safe for threads. `cloud` counts the calls to AWS."""

    def __init__(self, cloud: Sequence[Collector] = ()) -> None:
        self._cloud = tuple(cloud)
        self._view_age = Gauge(
            "everstep_aws_view_age_seconds",
            "Age of the oldest answer of AWS about a fleet that this server manages.",
            registry=None,
        )
        self._reconcile_seconds = Histogram(
            "everstep_reconcile_seconds",
            "How long passes over a job or a fleet took.",
            ["loop"],
            buckets=PASS_SECONDS,
            registry=None,
        )
        self._stale_applies = Counter(
            "everstep_reconcile_stale_applies",
            "Passes of which nothing was stored, because the lease was lost meanwhile.",
            ["loop"],
            registry=None,
        )
        self._leases_lost = Counter(
            "everstep_lease_lost", "Leases that this server held and another one took over.", ["kind"], registry=None
        )
        self._phase_seconds = Histogram(
            "everstep_recovery_phase_seconds",
            "How long recoveries from failures were in each phase; no drills, nothing that people asked for, "
            "and none without a recovery.",
            ["phase"],
            buckets=PHASE_SECONDS,
            registry=None,
        )
        # Create all metric series at the start, so that Prometheus's rate() includes their first increase.
        for loop in LOOPS:
            self._reconcile_seconds.labels(loop)
            self._stale_applies.labels(loop)
            self._leases_lost.labels(loop)
        for phase in PHASES:
            self._phase_seconds.labels(phase)

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """The collectors that the caller registers with a Prometheus registry."""
        own = self._reconcile_seconds, self._stale_applies, self._leases_lost, self._phase_seconds, self._view_age
        return (*own, *self._cloud)

    def watch_view_age(self, age_seconds: Callable[[], float]) -> None:
        """Report the age of AWS's answers, which `age_seconds` returns, whenever Prometheus scrapes the server."""
        self._view_age.set_function(age_seconds)

    @contextmanager
    def measured_pass(self, loop: Loop, monotonic: Callable[[], float]) -> Iterator[None]:
        """Record the duration of the `with` block, in which a loop makes a pass, and whether the pass was stale."""
        begun = monotonic()
        try:
            yield
        except StaleLease:
            self.was_stale(loop)
            raise
        finally:
            self.reconciled(loop, monotonic() - begun)

    def reconciled(self, loop: Loop, seconds: float) -> None:
        """Record for how many seconds a loop has processed one job or fleet, successfully or not."""
        self._reconcile_seconds.labels(loop).observe(seconds)

    def was_stale(self, loop: Loop) -> None:
        """Count a decision that was not stored, because another server holds the lease now."""
        self._stale_applies.labels(loop).inc()

    def lost_lease(self, kind: str) -> None:
        """Count a lease of this server that another server took over."""
        self._leases_lost.labels(kind).inc()

    def recovered(self, phase_seconds: Mapping[str, float]) -> None:
        """Record the lengths of a completed recovery's phases, with keys like `detect_seconds`."""
        for phase in PHASES:
            self._phase_seconds.labels(phase).observe(phase_seconds[f"{phase}_seconds"])
