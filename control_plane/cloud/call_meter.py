"""Counts the calls to AWS, and keeps describe calls within a budget per API.

Invariant: a call within its budget is not delayed. A call beyond the budget waits in its thread for at most
`LONGEST_WAIT_SECONDS`, or raises Throttled without a request to AWS.
Source: Amazon EC2 Developer Guide, Request throttling for the Amazon EC2 API. Non-mutating actions without filter and
page size have a bucket of 50 calls, which refills by 10 calls per second. DescribeInstanceTopology has a bucket of 1
call, which refills by 1 call per second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter
from prometheus_client.registry import Collector

from control_plane.cloud.errors import Throttled

LONGEST_WAIT_SECONDS: Final = 10.0
THROTTLED_CODES: Final = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "TooManyRequestsException",
        "SlowDown",
    }
)


@dataclass(frozen=True, slots=True)
class CallBudget:
    """The rate limit of one API: the number of calls in a burst, and the number of sustained calls per second."""

    burst_count: float
    per_second: float


_UNFILTERED: Final = CallBudget(25, 5)
ALL_DESCRIBE: Final = "Describe*"
"""Key in `BUDGETS` of the shared budget of a service's describe operations without their own budget."""
BUDGETS: Final[Mapping[tuple[str, str], CallBudget]] = {
    ("ec2", "DescribeInstances"): _UNFILTERED,
    ("ec2", "DescribeInstanceStatus"): _UNFILTERED,
    ("ec2", "DescribeInstanceTopology"): CallBudget(1, 0.5),
    ("ec2", "DescribeLaunchTemplateVersions"): _UNFILTERED,
    ("autoscaling", ALL_DESCRIBE): CallBudget(25, 2.5),
}
"""Limits of describe calls, by boto3's name of the service and AWS's name of the operation, or `ALL_DESCRIBE`."""


class TokenBucket:
    """The number of calls to one AWS API that the rate limit still permits now. Thread-safe."""

    def __init__(self, budget: CallBudget, monotonic: Callable[[], float]) -> None:
        self._budget = budget
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tokens = budget.burst_count
        self._filled_at = monotonic()

    def take(self, longest_seconds: float = LONGEST_WAIT_SECONDS) -> float | None:
        """Reserve one call, and return the seconds that the caller must wait before it.

        None, and no reservation, if the wait would exceed `longest_seconds`.
        """
        with self._lock:
            now = self._monotonic()
            refilled = self._tokens + (now - self._filled_at) * self._budget.per_second
            self._tokens, self._filled_at = min(self._budget.burst_count, refilled), now
            wait = max(0.0, (1.0 - self._tokens) / self._budget.per_second)
            if wait > longest_seconds:
                return None
            self._tokens -= 1.0
            return wait


class CallMeter:
    """Counts and limits the calls that one control-plane server sends to AWS. Thread-safe.

    `wait` blocks the calling thread for the given seconds; None means sleep.
    """

    def __init__(
        self,
        budgets: Mapping[tuple[str, str], CallBudget],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.budgets = budgets
        self._buckets = {key: TokenBucket(budget, monotonic) for key, budget in budgets.items()}
        self._wait = wait or threading.Event().wait
        labels = ["service", "operation"]
        self._calls = Counter(
            "everstep_aws_calls", "Requests to AWS, including retries by the client.", labels, registry=None
        )
        self._throttled = Counter("everstep_aws_throttled", "Requests that AWS throttled.", labels, registry=None)
        self._delayed = Counter(
            "everstep_aws_delayed",
            "Calls that waited for this server's own budget, or that the server refused for it.",
            labels,
            registry=None,
        )

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """The Prometheus collectors of the counted calls, which the caller registers with a registry."""
        return self._calls, self._throttled, self._delayed

    def watch(self, client: Any, service: str) -> None:
        """Register hooks on a new boto3 client that count and limit the client's calls."""

        def before_call(model: Any, **_: object) -> None:
            self._hold(service, model.name)

        def sent(event_name: str, **_: object) -> None:
            operation = event_name.rpartition(".")[2]
            self._calls.labels(service, operation).inc()
            # Create the counter with the value 0, so that Prometheus sees its first increase.
            self._throttled.labels(service, operation)

        def received(event_name: str, parsed_response: Any = None, **_: object) -> None:
            error = (parsed_response or {}).get("Error") or {}
            if error.get("Code") in THROTTLED_CODES:
                self._throttled.labels(service, event_name.rpartition(".")[2]).inc()

        events = client.meta.events
        events.register("before-call.*.*", before_call)
        events.register("before-send.*.*", sent)
        events.register("response-received.*.*", received)

    def _hold(self, service: str, operation: str) -> None:
        """Delay a call to AWS until its budget permits the call. Raises Throttled beyond `LONGEST_WAIT_SECONDS`."""
        bucket = self._buckets.get((service, operation))
        if bucket is None and operation.startswith("Describe"):
            bucket = self._buckets.get((service, ALL_DESCRIBE))
        if bucket is None:
            return
        seconds = bucket.take()
        if seconds != 0.0:
            self._delayed.labels(service, operation).inc()
        if seconds is None:
            raise Throttled(
                f"{operation}: this server's own budget for the call is used up for more than "
                f"{LONGEST_WAIT_SECONDS:g} s; it sent no request to AWS"
            )
        if seconds:
            self._wait(seconds)
