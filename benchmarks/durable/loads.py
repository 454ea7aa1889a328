"""Measures loads of one step from the nodes' memory, by as many ranks as saved the step, by fewer and by more ranks.

    4 ranks train and commit a step ─▶ 4, 3 and 6 ranks restore it, in turn

A load lasts from when every rank waits until the last rank's `restore` returns. `members` runs the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.data_plane.launches import Talk, tmpfs_folder
from benchmarks.durable import members
from benchmarks.durable.members import Inventories, Members, node_id
from benchmarks.durable.rank.sizes import ModelSize
from benchmarks.errors import BenchmarkFailed
from control_plane.core import placement
from everstep.protocol.ids import Rank
from everstep.protocol.plan import SlotRecord

EARLIER, NODES = 4, 6
"""Ranks that saved the step, and nodes."""
SIZE = ModelSize(layers=5, width=512)
NODE_MIB = 768
PROGRAM = ("benchmarks.durable.rank.loading",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks that load the state."""

    world_size: int
    has_own: bool = True
    """False: each rank's shard comes from another node."""


SAME, MOVED = Layout(world_size=EARLIER), Layout(world_size=EARLIER, has_own=False)
LAYOUTS = (SAME, MOVED, Layout(world_size=3), Layout(world_size=6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load, in which all ranks of a generation restore a step."""

    layout: Layout
    seconds: float
    """Seconds until the last rank had its state."""
    state_bytes: int
    """Bytes of all ranks."""
    fetched_bytes: int
    """Shards that nodes fetched from other nodes."""
    is_equal: bool
    """Whether all tensors have the bytes that the first generation saved."""


def absent_share(world_size: int, rank: int, held: Collection[int], earlier: int = EARLIER) -> float:
    """Return the fraction of the state that one rank needs and its node does not hold.

    `held` are the ranks whose shards the node holds. Before and after, the state is divided evenly among the ranks.
    """
    begin, end = rank / world_size, (rank + 1) / world_size
    return sum(
        max(0.0, min(end, (each + 1) / earlier) - max(begin, each / earlier))
        for each in range(earlier)
        if each not in held
    )


def needed_bytes(layout: Layout, state_bytes: int) -> float:
    """Return the bytes that all ranks must receive from other nodes."""
    holders = placement.plan([node_id(number) for number in range(EARLIER)], members.COPIES).holders
    total = 0.0
    for rank in range(layout.world_size):
        held = {
            owner
            for owner in range(EARLIER)
            if node_id(rank) in holders[node_id(owner)] and (layout.has_own or owner != rank)
        }
        total += absent_share(layout.world_size, rank, held) * state_bytes
    return total


def measure(home: Path, *, rounds: int, size: ModelSize = SIZE) -> Iterator[Load]:
    """Commit a step with four ranks, then load it with 4, 3 and 6 ranks in turn.

    Raises BenchmarkFailed if a process ended, or a rank restored no step.
    """
    environments: list[Mapping[str, str]] = [{} for _ in range(NODES)]
    with (
        tmpfs_folder() as memory,
        members.started(NODES, memory, home, mebibytes=NODE_MIB) as nodes,
        members.ranks(PROGRAM, environments, home) as talks,
    ):
        for talk in talks:
            talk.answer()
        generation, expected = 1, _launch(nodes, talks, size, 1, EARLIER, None).digest
        found = nodes.inventories(EARLIER)
        nodes.close()
        for number in range(rounds):
            for layout in LAYOUTS[number % len(LAYOUTS) :] + LAYOUTS[: number % len(LAYOUTS)]:
                generation += 1
                given = found if layout.has_own else _without_own(nodes, found)
                restored = _launch(nodes, talks, size, generation, layout.world_size, given)
                after = nodes.inventories(EARLIER)
                yield Load(
                    layout=layout,
                    seconds=restored.seconds,
                    state_bytes=restored.state_bytes,
                    fetched_bytes=_added_bytes(given, after),
                    is_equal=restored.digest == expected,
                )
                nodes.close()
                for node, record in _added(found, after):
                    nodes.drop(node, record.owner_rank)


@dataclass(frozen=True, slots=True)
class _Restored:
    seconds: float
    digest: str
    state_bytes: int


def _launch(
    nodes: Members, talks: Sequence[Talk], size: ModelSize, generation: int, world_size: int, found: Inventories | None
) -> _Restored:
    """Start the ranks of a generation, which the caller ends, and wait until each has its state."""
    with members.meeting_port() as port:
        nodes.open(generation, world_size, found=found)
        for rank, talk in enumerate(talks[:world_size]):
            environment = nodes.environment(rank, world_size, generation, port)
            talk.say({"environment": environment, "size": asdict(size)})
        begun = nodes.load()
        answers = [talk.answer() for talk in talks[:world_size]]
    digests = {answer["digest"] for answer in answers}
    if len(digests) > 1 or (found is not None and not all(answer["base"] for answer in answers)):
        raise BenchmarkFailed(f"generation {generation} of {world_size} ranks restored different states: {answers}")
    return _Restored(
        max(answer["restored_at"] for answer in answers) - begun,
        digests.pop(),
        sum(answer["state_bytes"] for answer in answers),
    )


def _without_own(nodes: Members, found: Inventories) -> Inventories:
    """Empty the slots of each node's own shard. Return the remaining slots."""
    left = dict(found.slots)
    for number in range(found.world_size):
        nodes.drop(number, number)
        left[node_id(number)] = tuple(each for each in left[node_id(number)] if each.owner_rank != Rank(number))
    return replace(found, slots=left)


def _added_bytes(before: Inventories, after: Inventories) -> int:
    return sum(record.payload_bytes for _, record in _added(before, after))


def _added(before: Inventories, after: Inventories) -> list[tuple[int, SlotRecord]]:
    return [
        (number, record)
        for number in range(NODES)
        for record in after.slots.get(node_id(number), ())
        if record not in before.slots.get(node_id(number), ())
    ]
