"""Decides which S3 objects of a run are orphans, that is, belong to no checkpoint and can never belong to one.

Agents upload shards to `…run=<run>/gen=<generation>/step=<step>/<upload id>/`, and the control plane writes a manifest
for the newest generation only. A shard of an earlier generation that no manifest names is therefore an orphan.

Frozen objects (`…run=<run>/frozen/`) hold parameters that never change. All generations of a run share them. A running
upload can rely on any of them, so they can become orphans only after the end of their run.

Invariant: pure. Two kinds of objects are never orphans: objects of the newest generation of a running job, whose upload
may still run, and objects that a kept checkpoint names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from everstep.protocol.ids import Generation

FROZEN = re.compile(r"frozen/[0-9a-f]{64}\.safetensors", re.ASCII)
PLACE = re.compile(r"gen=(?P<generation>\d+)/step=(?P<step>\d+)/", re.ASCII)
KEPT_SECONDS = 3_600.0
"""Age in seconds below which an object is never an orphan.

The control plane may write the manifest of an earlier generation after a new generation has started. Before this write,
no manifest names the objects of this checkpoint.
"""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One S3 object under the key prefix of a run's checkpoints."""

    key: str
    modified_at: float
    """Time of the object's last write, in Unix seconds."""


def orphans(
    objects: Iterable[ListedObject],
    folder: str,
    named: Mapping[tuple[int, int], Set[str] | None],
    *,
    frozen: Set[str] | None,
    ended_before: Generation,
    now: float,
) -> Iterator[str]:
    """Yield the keys of the objects that belong to no checkpoint and can never belong to one.

    Args:
        objects: objects of one run. The iterable may be lazy.
        folder: the run's key prefix. Objects with other keys are ignored.
        named: the keys of each checkpoint's objects, by generation and step. The value is None for a checkpoint that is
            being deleted: its objects are no orphans, because the deletion removes them.
        frozen: keys of the objects with parameters that never change, as far as checkpoints need them. None while the
            run has not ended.
        ended_before: a generation number. All generations with a lower number have ended.
        now: Unix seconds.

    Yields:
        Keys, in the order of `objects`.
    """
    for each in objects:
        if now - each.modified_at < KEPT_SECONDS:
            continue
        if frozen is not None and FROZEN.fullmatch(each.key.removeprefix(folder)) and each.key not in frozen:
            yield each.key
        place = PLACE.match(each.key.removeprefix(folder)) if each.key.startswith(folder) else None
        if place is None or int(place["generation"]) >= ended_before:
            continue
        keys = named.get((int(place["generation"]), int(place["step"])), frozenset())
        if keys is not None and each.key not in keys:
            yield each.key
