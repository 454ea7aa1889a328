"""Collects logged values in a buffer of limited size (the ring), and sends them to the agent about once a second.

Invariant: `add` never blocks, and the ring drops and counts the records that exceed its limit. It has no lock, because
a signal handler that logs during `add` would deadlock. The adding and the removing thread call only atomic methods of a
deque.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import (
    MAX_LOGGED_BYTES,
    MAX_METRIC_NAME_LENGTH,
    MAX_RANK_MESSAGE_BYTES,
    OWN_METRICS,
    Logged,
    LogRecord,
)
from everstep.training.errors import SessionMisuse

RING_RECORDS = 4096
SEND_SECONDS = 1.0
MESSAGE_BYTES = MAX_RANK_MESSAGE_BYTES // 4
"""Bytes of records per message, so that another message of the rank need not wait long."""


def numbers(
    values: Mapping[str, float | torch.Tensor], *, is_later: Callable[[torch.Tensor], bool] = lambda _: False
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return numbers by name, and tensors of shape [1] by name for which `is_later` returns True. Raises SessionMisuse
    if a value is not one real number, or a name is too long or reserved.
    """
    known: dict[str, float] = {}
    later: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        _check(name, value)
        if isinstance(value, torch.Tensor) and is_later(value):
            later[name] = value.detach().reshape(1)
        else:
            known[name] = _number(name, value)
    return known, later


def check_values(values: Mapping[str, float | torch.Tensor]) -> None:
    """Check names and types without waiting for a GPU. Raises SessionMisuse as `numbers`."""
    numbers(values, is_later=lambda tensor: not tensor.is_cpu)


def _check(name: str, value: float | torch.Tensor) -> None:
    if not 0 < len(name) <= MAX_METRIC_NAME_LENGTH:
        raise SessionMisuse(
            f"log({name[:40]}…=…): a name has 1 to {MAX_METRIC_NAME_LENGTH} characters, not {len(name)}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SessionMisuse(f"log({name!a}=…): a name must be valid Unicode text") from error
    if name.startswith(OWN_METRICS):
        raise SessionMisuse(f"log({name}=…): names that begin with {OWN_METRICS} are reserved for Everstep")
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        raise SessionMisuse(
            f"log({name}=…): a {value.dtype} tensor of shape {list(value.shape)}; log takes one real number, "
            "reduce it first"
        )


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach().item())
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SessionMisuse(f"log({name}=…): {type(value).__name__} is not a real number: {error}") from error


def divide(records: Iterable[LogRecord]) -> tuple[list[tuple[LogRecord, ...]], list[LogRecord], int]:
    """Divide records into messages to the agent. Returns the records of each message, the remaining records from the
    first beyond `MAX_LOGGED_BYTES` on, and the number of records before these that are too large for any message.
    """
    pieces: list[list[LogRecord]] = []
    left: list[LogRecord] = []
    too_large_count = piece_bytes = total_bytes = 0
    rest = iter(records)
    for record in rest:
        size = encoded_bytes(record)
        if size > MESSAGE_BYTES:
            too_large_count += 1
        elif total_bytes + size > MAX_LOGGED_BYTES:
            left = [record, *rest]
        else:
            if not pieces or piece_bytes + size > MESSAGE_BYTES:
                pieces.append([])
                piece_bytes = 0
            pieces[-1].append(record)
            piece_bytes, total_bytes = piece_bytes + size, total_bytes + size
    return [tuple(piece) for piece in pieces], left, too_large_count


def encoded_bytes(record: LogRecord) -> int:
    """Return an upper bound of the encoded size of a record."""
    return 64 + 12 * len(record.values) + len("".join(record.values).encode())


class MetricRing:
    """Collects records, of one log call each, and sends them in the background. Above `capacity`, it drops them."""

    def __init__(
        self,
        generation: Generation,
        send: Callable[[Logged], None],
        capacity: int = RING_RECORDS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._generation = generation
        self._send = send
        self._capacity = capacity
        self._records: deque[LogRecord] = deque()
        self._dropped_count = 0
        self._reported_count = 0
        """Changed only by the sending thread."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-metrics", daemon=True)
        self._has_begun = False

    def add(self, step: Step, values: Mapping[str, float], at_seconds: float | None = None) -> None:
        """Add the values of one log call at Unix time `at_seconds`, by default now. Callable at any rate."""
        if len(self._records) >= self._capacity:
            self._dropped_count += 1
        else:
            self._records.append(
                LogRecord(step=step, values=dict(values), at_seconds=self._now() if at_seconds is None else at_seconds)
            )
        self._begin()

    def drop(self) -> None:
        """Count a record as dropped."""
        self._dropped_count += 1
        self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()

    def flush(self) -> None:
        """Send waiting records, oldest first, with at most `MAX_LOGGED_BYTES` bytes in total."""
        # Remove only the records that are waiting now, because the training thread may add further records meanwhile.
        pieces, left, too_large_count = divide([self._records.popleft() for _ in range(len(self._records))])
        self._records.extendleft(reversed(left))
        known_count, self._reported_count = self._reported_count, self._dropped_count
        dropped_count = self._reported_count - known_count + too_large_count
        for piece in pieces or ([()] if dropped_count else []):
            self._send(Logged(generation=self._generation, records=piece, dropped_count=dropped_count))
            dropped_count = 0

    def close(self) -> None:
        """Send at most `MAX_LOGGED_BYTES` of waiting records, count the others as dropped, and end the thread."""
        self._closing.set()
        # `join` would raise an error for a thread that has not started yet. Such a thread ends as soon as it sees
        # `_closing`.
        if self._thread.is_alive():
            self._thread.join()
        self.flush()
        if self._records:
            self._dropped_count += len(self._records)
            self._records.clear()
            self.flush()

    def _run(self) -> None:
        while not self._closing.wait(SEND_SECONDS):
            self.flush()
