"""The periods in which each node worked for a job, derived from the job's launches. Pure.

    launches     1: a b    2: a c             3: a c     (generation: its nodes)
    released                        all nodes
    periods a    ├──────────────────┤         ├────▶
            b    ├────────┤
            c             ├─────────┤         ├────▶

A node has one period for consecutive launches, unless the job released its nodes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of one generation of a job: its time, and the ids of its nodes."""

    at: datetime
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A period in which one node worked for the job."""

    node_id: str
    start: datetime
    end: datetime | None


def spans(launches: Sequence[Launch], given_back: Sequence[datetime], ended_at: datetime | None) -> tuple[Span, ...]:
    """Return the nodes' periods, sorted by start, then by node. `given_back`: when the job released all its nodes."""
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
