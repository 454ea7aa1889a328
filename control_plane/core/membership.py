"""Which nodes worked for a job, and when: its launches in other words. Pure.

    launches     1: a b    2: a c             3: a c
    nodes back                     queued ──▶
    a            ├──────────────────┤         ├────▶
    b            ├────────┤
    c                     ├─────────┤         ├────▶

Invariant: a node's spans do not touch each other; one that goes from launch to launch has one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Launch:
    """One generation with a plan."""

    at: datetime
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A node works for the job."""

    node_id: str
    start: datetime
    end: datetime | None
    """None: it still does."""


def spans(launches: Sequence[Launch], given_back: Sequence[datetime], ended_at: datetime | None) -> tuple[Span, ...]:
    """Return when each node worked for a job.

    Args:
        launches: of the job, oldest first.
        given_back: when the job gave all of its nodes back, as when it is paused.
        ended_at: when the job ended; None while it has not.

    Returns:
        By start, then by node.
    """
    open_spans: dict[str, Span] = {}
    closed: list[Span] = []
    for index, launch in enumerate(launches):
        until = launches[index + 1].at if index + 1 < len(launches) else ended_at
        back = next((at for at in sorted(given_back) if launch.at < at and (until is None or at < until)), None)
        closed += [
            replace(span, end=launch.at) for node_id, span in open_spans.items() if node_id not in launch.node_ids
        ]
        open_spans = {node_id: open_spans.get(node_id, Span(node_id, launch.at, None)) for node_id in launch.node_ids}
        if back is not None:
            closed += [replace(span, end=back) for span in open_spans.values()]
            open_spans = {}
    closed += [replace(span, end=ended_at) for span in open_spans.values()]
    return tuple(sorted(closed, key=lambda span: (span.start, span.node_id)))
