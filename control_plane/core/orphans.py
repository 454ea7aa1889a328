"""Decides which S3 objects of a run are orphans, that is, belong to no checkpoint and can never belong to one. Pure.

Never an orphan is an object of the newest generation of a running job, of a generation or a manifest that the database
lacks (after a restore from a backup), or of a kept checkpoint. All generations of a run share frozen objects
(`…run=<run>/frozen/`), so these become orphans only after the end of their run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby

from everstep.protocol.ids import Generation

FROZEN = re.compile(r"frozen/[0-9a-f]{64}\.safetensors", re.ASCII)
PLACE = re.compile(r"gen=(?P<generation>\d+)/step=(?P<step>\d+)/", re.ASCII)
KEPT_SECONDS = 3_600.0
"""Age below which an object is no orphan. The manifest of an earlier generation may be written after a new launch."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One S3 object under the key prefix of a run's checkpoints."""

    key: str
    modified_at: float
    """Unix seconds."""
    size_bytes: int = 0


def orphans(
    objects: Iterable[ListedObject],
    folder: str,
    named: Mapping[tuple[int, int], Set[str] | None],
    *,
    generations: Set[int],
    frozen: Set[str] | None,
    ended_before: Generation,
    now: float,
) -> Iterator[ListedObject]:
    """Yield the objects that belong to no checkpoint and can never belong to one, frozen objects last.

    Args:
        objects: all objects of one run, sorted by key. The iterable may be lazy.
        named: each checkpoint's keys. None for a checkpoint whose deletion removes its objects.
        frozen: keys of frozen objects that checkpoints need. None while the run has not ended.
        ended_before: all generations with a lower number have ended.
    """
    unneeded: list[ListedObject] = []
    has_unknown = False
    for place, some in groupby(objects, lambda each: _place_of(each.key, folder)):
        if place is None:
            if frozen is not None:
                unneeded += [each for each in some if _is_frozen(each.key, folder) and each.key not in frozen]
            continue
        in_folder, keys = list(some), named.get(place, frozenset())
        manifest = f"{folder}gen={place[0]}/step={place[1]}/manifest.json"
        if place[0] not in generations or (place not in named and any(each.key == manifest for each in in_folder)):
            has_unknown = True
        elif place[0] < ended_before and keys is not None:
            yield from (each for each in in_folder if each.key not in keys and now - each.modified_at >= KEPT_SECONDS)
    if not has_unknown:  # An unknown checkpoint can need any frozen object.
        yield from (each for each in unneeded if now - each.modified_at >= KEPT_SECONDS)


def _place_of(key: str, folder: str) -> tuple[int, int] | None:
    found = PLACE.match(key.removeprefix(folder)) if key.startswith(folder) else None
    return None if found is None else (int(found["generation"]), int(found["step"]))


def _is_frozen(key: str, folder: str) -> bool:
    return FROZEN.fullmatch(key.removeprefix(folder)) is not None
