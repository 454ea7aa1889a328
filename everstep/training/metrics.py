"""Values that the script logs: a bounded ring, emptied to the agent at most once a second.

Invariant: `add` never blocks and never grows without limit; what does not fit is counted. There is no lock: a signal
handler that logs or closes in the middle of `add` would wait for itself, or for the thread that waits for it. One
thread adds, one takes away, each by single calls of a deque.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import MAX_LOGGED_BYTES, MAX_RANK_MESSAGE_BYTES, OWN_METRICS, Logged, LogRecord
from everstep.training.errors import SessionMisuse

RING_RECORDS = 4096
SEND_SECONDS = 1.0
MAX_NAME_LENGTH = 255
MESSAGE_BYTES = MAX_RANK_MESSAGE_BYTES // 4
"""Of the records in one message: what else the rank says stands behind no more than one of them."""


def numbers(
    values: Mapping[str, float | torch.Tensor], *, is_later: Callable[[torch.Tensor], bool] = lambda _: False
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return what a script logs as plain numbers, and apart from them what is not worked out yet.

    A tensor's graph is left alone.

    Args:
        values: numbers, or tensors of one element. Infinities and NaN are what they are: whoever watches a run wants to
            see them.
        is_later: whether a tensor cannot be read without waiting for its device.

    Returns:
        Numbers by name; and by name, of what is later, tensors of one element in one dimension.

    Raises:
        SessionMisuse: something that is not one real number, or a name that is too long or Everstep's own; by name.
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
    """Refuse what `numbers` refuses, without waiting for a device.

    Args:
        values: what a script logs, by name.

    Raises:
        SessionMisuse: as for `numbers`.
    """
    numbers(values, is_later=lambda tensor: not tensor.is_cpu)


def _check(name: str, value: float | torch.Tensor) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise SessionMisuse(f"log({name[:40]}…=…): a name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SessionMisuse(f"log({name!a}=…): a name is text that UTF-8 can hold") from error
    if name.startswith(OWN_METRICS):
        raise SessionMisuse(f"log({name}=…): names that begin with {OWN_METRICS} are those that Everstep logs itself")
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
    """Divide records into messages.

    Args:
        records: in order.

    Returns:
        Those of each message, of `MESSAGE_BYTES` at most; those that are left, from the first on with which these would
        exceed `MAX_LOGGED_BYTES`; and how many of those before it had no place in any message.
    """
    pieces: list[list[LogRecord]] = []
    left: list[LogRecord] = []
    too_large_count = piece_bytes = total_bytes = 0
    rest = iter(records)
    for record in rest:
        size = _size(record)
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


def _size(record: LogRecord) -> int:
    """Return the bytes that a record takes in a message, at most."""
    return 64 + 12 * len(record.values) + len("".join(record.values).encode())


class MetricRing:
    """Collects records and sends them from a thread of its own.

    Args:
        generation: stamped on every message.
        send: takes a message without blocking.
        capacity: records that wait at most.
        now: Unix time.
    """

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
        """So far; counted where records are added."""
        self._told_count = 0
        """Of these, what the agent has been told of; counted where records are sent."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-metrics", daemon=True)
        self._has_begun = False

    def add(self, step: Step, values: Mapping[str, float], at_seconds: float | None = None) -> None:
        """Keep one record. Called by the training thread at any rate.

        Args:
            step: that it belongs to.
            values: by name.
            at_seconds: Unix time when it was logged; None: now.
        """
        if len(self._records) >= self._capacity:
            self._dropped_count += 1
        else:
            self._records.append(
                LogRecord(step=step, values=dict(values), at_seconds=self._now() if at_seconds is None else at_seconds)
            )
        self._begin()

    def drop(self) -> None:
        """Count a record that could not be kept."""
        self._dropped_count += 1
        self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()

    def flush(self) -> None:
        """Send what waits: as much as the agent takes in a second, the oldest first."""
        pieces, left, too_large_count = divide(
            [self._records.popleft() for _ in range(len(self._records))]
        )  # others may be added meanwhile
        self._records.extendleft(reversed(left))
        known_count, self._told_count = self._told_count, self._dropped_count
        dropped_count = self._told_count - known_count + too_large_count
        for piece in pieces or ([()] if dropped_count else []):
            self._send(Logged(generation=self._generation, records=piece, dropped_count=dropped_count))
            dropped_count = 0

    def close(self) -> None:
        """Send what waits, count what there is no room for, and end the thread."""
        self._closing.set()
        if self._thread.is_alive():  # one that is being started ends by itself
            self._thread.join()
        self.flush()
        if self._records:
            self._dropped_count += len(self._records)
            self._records.clear()
            self.flush()

    def _run(self) -> None:
        while not self._closing.wait(SEND_SECONDS):
            self.flush()
