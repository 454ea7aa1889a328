"""Decides which uploaded shards no checkpoint can contain any more.

Agents upload shards to `…run=<run>/gen=<generation>/step=<step>/<upload id>/`, and the control plane writes a manifest
for the newest generation only. A shard of an earlier generation that no manifest names is therefore an orphan.

Invariant: pure. An object of the newest generation of a running job is never an orphan, because its upload may still
run, and neither is an object that a kept checkpoint names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from everstep.protocol.ids import Generation

PLACE = re.compile(r"gen=(?P<generation>\d+)/step=(?P<step>\d+)/", re.ASCII)
KEPT_SECONDS = 3_600.0
"""Age in seconds below which an object is never an orphan.

The control plane may decide on a manifest before a new generation begins, and store the manifest afterwards.
"""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object below the prefix of a run's checkpoints."""

    key: str
    modified_at: float
    """Unix seconds."""


def orphans(
    objects: Iterable[StoredObject],
    folder: str,
    named: Mapping[tuple[int, int], Set[str] | None],
    *,
    ended_before: Generation,
    now: float,
) -> Iterator[str]:
    """Yield the keys of the objects that no checkpoint contains or will contain.

    Args:
        objects: objects of one run; evaluated lazily.
        folder: the run's key prefix. Objects outside of it are ignored.
        named: keys that each checkpoint consists of, by generation and step. None for a checkpoint that is being
            deleted, whose folder the deletion empties.
        ended_before: all generations below it have ended.
        now: Unix seconds.

    Yields:
        Keys, in the order of `objects`.
    """
    for each in objects:
        place = PLACE.match(each.key.removeprefix(folder)) if each.key.startswith(folder) else None
        if place is None or int(place["generation"]) >= ended_before or now - each.modified_at < KEPT_SECONDS:
            continue
        keys = named.get((int(place["generation"]), int(place["step"])), frozenset())
        if keys is not None and each.key not in keys:
            yield each.key
