"""Chooses the metric and the steps of the small loss curve that lists of jobs show for each job.

Invariant: a curve contains only values that the script logged, in the order of steps, and no averages of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from everstep.protocol.rank_messages import OWN_METRICS

_PREFERRED = ("loss", "train/loss", "train_loss", "training_loss")


def loss_name(names: Iterable[str]) -> str | None:
    """Return the name that is most likely a job's training loss, or None. Everstep's own metrics do not count."""
    found = [name for name in names if "loss" in name.lower() and not name.startswith(OWN_METRICS)]
    return min(found, key=_preference, default=None)


def _preference(name: str) -> tuple[int, int, str]:
    lowered = name.lower()
    return _PREFERRED.index(lowered) if lowered in _PREFERRED else len(_PREFERRED), len(name), name


def sampled_steps(first: int, last: int, limit: int) -> tuple[int, ...]:
    """Return at most `limit` (at least 2) steps from `first` to `last`, both included, at equal distances."""
    count = min(limit, last - first + 1)
    if count == 1:
        return (first,)
    return tuple(first + index * (last - first) // (count - 1) for index in range(count))


def newest_at(steps: Sequence[int], step: int) -> int | None:
    """Return the index of the last of the sorted `steps` that is not after `step`, or None."""
    index = bisect_right(steps, step) - 1
    return index if index >= 0 else None
