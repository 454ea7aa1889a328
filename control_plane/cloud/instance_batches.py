"""Describes many EC2 instances by id, in parallel batches, and skips ids that EC2 does not list.

The error `InvalidInstanceID.NotFound` names the unknown ids, and the call is repeated without them. The filter
`instance-id` would need no repetition, but EC2 fails calls without `InstanceIds` while any Availability Zone is
disrupted. Source: API reference of DescribeInstances; Amazon EC2 Developer Guide, eventual consistency.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from control_plane.cloud.errors import NotFound
from everstep.protocol.ids import NodeId

BATCHES_AT_ONCE: Final = 4
UNKNOWN_ID: Final = "InvalidInstanceID.NotFound"
_INSTANCE_ID: Final = re.compile(r"i-[0-9a-f]+")

T = TypeVar("T")
Ask = Callable[[list[NodeId]], list[T]]


def described(ask: Ask[T], ids: Collection[NodeId], *, size: int) -> list[T]:
    """Return the descriptions of all instances that EC2 lists.

    `ask` calls EC2 for some ids, in several threads, and raises NotFound with the code `UNKNOWN_ID` for an unlisted id.
    `size` is the limit of ids per call. Raises CloudError if a call failed for another reason.
    """
    batches = list(_batches(sorted(set(ids)), size))
    if len(batches) < 2:
        return [item for batch in batches for item in _of_known(ask, batch)]
    with ThreadPoolExecutor(min(BATCHES_AT_ONCE, len(batches)), thread_name_prefix="describe") as threads:
        return [item for answer in threads.map(partial(_of_known, ask), batches) for item in answer]


def _of_known(ask: Ask[T], ids: Sequence[NodeId]) -> list[T]:
    """Return the descriptions of the ids that EC2 lists."""
    # If the error names no unknown id, halve the batch until the unknown ids are isolated.
    left = list(ids)
    while left:
        try:
            return ask(left)
        except NotFound as error:
            if error.code != UNKNOWN_ID:
                raise
            unknown = set(_INSTANCE_ID.findall(error.message))
            known = [id for id in left if id not in unknown]
        if len(known) == len(left):
            half = len(left) // 2
            return [*_of_known(ask, left[:half]), *_of_known(ask, left[half:])] if half else []
        left = known
    return []


def _batches(ids: Sequence[NodeId], size: int) -> Iterator[Sequence[NodeId]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
