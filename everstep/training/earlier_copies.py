"""Checks, before a relayout, that earlier ranks which hold the same piece of a tensor hold the same value.

A relayout reads a piece from any earlier rank that holds it. If a script keeps different parameters on each rank, the
relayout would lose some. The ranks therefore compare digests of all earlier shards first.

    each rank    digests of the earlier shards that it has mapped ──▶ all ranks
                 digests of one of the other earlier shards       ──▶ all ranks, which compare all digests

Positions in the data are compared. Buffers are not, because each rank may keep its own, such as running means.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank
from everstep.protocol.parts import LOGICAL_PREFIXES
from everstep.protocol.slot import digest
from everstep.training.earlier import EarlierShard
from everstep.training.errors import CannotRelayout, RestoreMismatch
from everstep.training.restore import VALUE_PREFIX
from everstep.training.state_tree import decode, tensor_bytes

Piece: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a logical tensor, and offsets and sizes of a box; name of a loader, and two empty tuples."""
Digests: TypeAlias = dict[Piece, bytes]
"""Digests of the pieces of one earlier rank."""
Gather: TypeAlias = Callable[[Any], Sequence[Any]]
"""Returns the values of all ranks. Collective."""


def alone(value: Any) -> Sequence[Any]:
    """Return the value of this rank, which compares all earlier shards itself."""
    return [value]


def digests(shard: EarlierShard, parameters: Collection[str]) -> Digests:
    """Return the digests of parameters, optimizer state and positions. Raises RestoreMismatch if unreadable."""
    result: Digests = {}
    for entry in shard.index.tensors:
        for part in entry.logical_parts:
            name = part.name
            if name.startswith(LOGICAL_PREFIXES) and (name in parameters or not name.startswith("model/")):
                data = tensor_bytes(shard.box(entry, part)).numpy().data
                result[name, part.offsets, part.sizes] = digest(data)
    try:
        others = cast("dict[str, Any]", decode(shard.values.others, lambda path: shard.tensor(VALUE_PREFIX + path)))
    except (ProtocolError, KeyError) as error:
        raise RestoreMismatch(f"the values of earlier rank {shard.rank} cannot be read: {error}") from error
    for name, state in others["data"].items():
        if state["source"].get("order") is not None:
            position = (state["epoch"], state["source"]["begin"], state["consumed"] - len(state["ahead"]))
            result[name, (), ()] = repr(position).encode()
    return result


def check_copies(
    rank: Rank,
    own: Mapping[Rank, Digests] | None,
    earlier_size: int,
    here: Sequence[Rank],
    read: Callable[[Rank], Digests],
    gather: Gather,
) -> None:
    """Compare the digests of all earlier ranks. Collective, also for a rank that cannot load the step (`own` is None).
    `own` has the digests of mapped shards, and `read` maps another one. Raises CannotRelayout if two earlier ranks
    differ, and RestoreMismatch if a shard cannot be loaded or read.
    """
    views: Sequence[Any] = gather(None if own is None else (rank, own, tuple(here)))
    if own is None or None in views:
        return
    found: dict[Rank, Digests] = {other: each for _, of_rank, _ in views for other, each in of_rank.items()}
    read_here: dict[Rank, Digests] | None = {}
    problem: RestoreMismatch | None = None
    # Each further shard is read by one rank, on a node that has it if possible.
    reads = dict.fromkeys((other for other, _, _ in views), 0)
    for missing in (Rank(number) for number in range(earlier_size) if number not in found):
        reader = min(views, key=lambda view: (missing not in view[2], reads[view[0]], view[0]))[0]
        reads[reader] += 1
        if reader == rank and read_here is not None:
            try:
                read_here[missing] = read(missing)
            except RestoreMismatch as error:
                problem, read_here = error, None
    answers: Sequence[Any] = gather(read_here)
    if problem is not None:
        raise problem
    if None not in answers:
        _compare(found | {other: each for answer in answers for other, each in answer.items()})


def _compare(found: Mapping[Rank, Digests]) -> None:
    first: dict[Piece, Rank] = {}
    for rank in sorted(found):
        for piece, value in found[rank].items():
            other = first.setdefault(piece, rank)
            if found[other][piece] == value:
                continue
            if piece[1:] == ((), ()) and not piece[0].startswith(LOGICAL_PREFIXES):
                raise CannotRelayout(
                    piece[0],
                    f"earlier ranks {other} and {rank} were at different positions in the data. Continue with the "
                    "earlier number of ranks, or let all ranks read equally many batches",
                )
            raise CannotRelayout(
                piece[0],
                f"earlier ranks {other} and {rank} hold different values of it, so no new rank can tell which value "
                "it needs. Continue with the earlier number of ranks, make the value equal on all ranks, or divide "
                "it with DTensor",
            )
