"""Describes many EC2 instances by id, in parallel batches, and skips ids that EC2 does not list.

EC2 answers a call with an unknown id by the error `InvalidInstanceID.NotFound`, which names the unknown ids. The module
repeats such a call without these ids. A call with the filter `instance-id` instead of the parameter `InstanceIds` would
return the known instances without an error. The module does not use the filter, because EC2 fails every call without
`InstanceIds` during the disruption of any Availability Zone.

Invariant: an unknown id never hides another instance.
Source: API reference of DescribeInstances; Amazon EC2 Developer Guide, eventual consistency.
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
"""Limit of parallel calls for the batches of one request."""
UNKNOWN_ID: Final = "InvalidInstanceID.NotFound"
_INSTANCE_ID: Final = re.compile(r"i-[0-9a-f]+")

T = TypeVar("T")
Ask = Callable[[list[NodeId]], list[T]]


def described(ask: Ask[T], ids: Collection[NodeId], *, size: int) -> list[T]:
    """Return the descriptions of all instances that EC2 lists.

    Args:
        ask: function that calls EC2 for some ids, and returns their descriptions. It raises NotFound with the code
            `UNKNOWN_ID` if EC2 does not list one of the ids. Several threads call the function.
        ids: ids of the instances to describe; duplicates are ignored.
        size: limit of ids per call.

    Returns:
        The descriptions, without those of unknown ids.

    Raises:
        CloudError: a call failed for another reason than an unknown id.
    """
    batches = list(_batches(sorted(set(ids)), size))
    if len(batches) < 2:
        return [item for batch in batches for item in _of_known(ask, batch)]
    with ThreadPoolExecutor(min(BATCHES_AT_ONCE, len(batches)), thread_name_prefix="describe") as threads:
        return [item for answer in threads.map(partial(_of_known, ask), batches) for item in answer]


def _of_known(ask: Ask[T], ids: Sequence[NodeId]) -> list[T]:
    """Return the descriptions of the ids that EC2 lists.

    If EC2's error message names the unknown ids, the function repeats the call without them. If the message names none,
    the function halves the batch until the unknown ids are isolated.
    """
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
