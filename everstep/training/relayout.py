"""Loads a step that was captured with a different number of ranks or a different kind of training (a relayout).

    earlier shards ──▶ boxes of logical tensors ──▶ common elements ──▶ the tensors of this rank's layout
                  └──▶ values of one earlier rank (`values_rank`): options, schedulers, objects, data, generators

A rank maps whole shards of earlier ranks until they contain all elements of its own tensors.

Invariant: a load changes no element of a logical tensor. `read_earlier` makes all checks that can reject the step, and
writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank
from everstep.protocol.parts import TensorPart
from everstep.training import rng
from everstep.training.copier import Copies
from everstep.training.earlier import (
    EarlierShard,
    EarlierShards,
    EarlierState,
    EarlierTensors,
    LoadTarget,
    fetch_order,
    map_shard,
    values_rank,
)
from everstep.training.earlier_copies import Digests, Gather, alone, check_copies, digests
from everstep.training.errors import CannotRelayout, RestoreMismatch
from everstep.training.host_copy import copy_into_live
from everstep.training.restore import VALUE_PREFIX, Expected
from everstep.training.saved_tensors import GATHERED_BYTES, SavedTensors
from everstep.training.state import RankState
from everstep.training.state_tree import Tree, decode, dtype_name

ADVICE = "Build the model and the optimizer of the earlier job, with its dtypes"


def read_earlier(
    shards: EarlierShards,
    state: RankState,
    expected: Expected,
    world_size: int,
    ranks_per_node: int = 1,
    gather: Gather = alone,
) -> Relaid:
    """Map the earlier shards that this rank needs, and plan the load, without a change of the live state.

    The ranks first compare the copies of all earlier ranks (`earlier_copies`). With `alone`, this rank reads all
    earlier shards itself. Called once per rank, before the ranks agree to load.

    Raises:
        RestoreMismatch: a shard cannot be loaded or read.
        CannotRelayout: the state cannot be converted to this rank's layout, or earlier ranks differ in a tensor.
        AgentUnreachable: the connection to the agent was lost for too long.
    """

    def digests_of(rank: Rank) -> Digests:
        return digests(map_shard(shards.fetch(rank), expected.run, rank, expected.step), parameters)

    earlier, parameters = EarlierTensors(), state.parameters().keys()
    relaid: Relaid | None = None
    own: dict[Rank, Digests] | None = None
    refusal: RestoreMismatch | None = None
    try:
        relaid = _planned(shards, earlier, state, expected, world_size, ranks_per_node)
        own = {shard.rank: digests(shard, parameters) for shard in earlier.shards}
    except RestoreMismatch as error:
        refusal = error
    check_copies(expected.rank, own, shards.world_size, shards.here, digests_of, gather)
    if refusal is not None:
        raise refusal
    assert relaid is not None
    return relaid


def _planned(
    shards: EarlierShards,
    earlier: EarlierTensors,
    state: RankState,
    expected: Expected,
    world_size: int,
    ranks_per_node: int,
) -> Relaid:
    values: _Values | None = None
    cover = _Cover(earlier, shards.world_size)
    targets: Sequence[LoadTarget] = ()
    missing: Sequence[LoadTarget] = ()
    extent = None
    first = values_rank(shards.world_size, expected.rank, world_size, ranks_per_node)
    for rank in fetch_order(shards.world_size, shards.here, expected.rank, world_size, first):
        shard = map_shard(shards.fetch(rank), expected.run, rank, expected.step)
        earlier.add(shard, is_own=values is None)
        if values is None:
            values = _Values.of(shard, earlier, state, expected)
        if earlier.extent != extent:
            extent, targets = earlier.extent, values.targets(earlier)
        missing = cover.add_all(targets)
        if not missing:
            break
    assert values is not None, "an earlier launch has at least one rank"
    for target in missing:
        if not target.is_optional:
            raise CannotRelayout(*cover.explain(target))
    _check_names(earlier, state, values)
    others = _others(values, state, expected.rank, shards.world_size, world_size)
    return Relaid(RelaidTensors(cover, earlier), values.translated(), others)


@dataclass(frozen=True, slots=True)
class Relaid:
    """A saved step, converted to this rank's layout and checked, but not loaded yet (`restore.Restorable`)."""

    tensors: SavedTensors
    adapter_values: Tree
    other_values: Tree

    def adapters(self) -> Tree:
        """Return the converted values of models and optimizers: one per adapter, for `load`."""
        return self.adapter_values

    def others(self) -> Tree:
        """Return the values of registered objects, data positions, training modes and random generators, by name."""
        return self.other_values


@dataclass(frozen=True, slots=True)
class _Values:
    state: RankState
    pairs: Sequence[EarlierState]
    others: dict[str, Any]

    @classmethod
    def of(cls, shard: EarlierShard, earlier: EarlierTensors, state: RankState, expected: Expected) -> _Values:
        def tensor(path: str) -> torch.Tensor:
            return earlier.own_tensor(VALUE_PREFIX + path).clone()

        try:
            saved = cast("list[dict[str, Any]]", decode(shard.values.adapters, tensor))
            others = cast("dict[str, Any]", decode(shard.values.others, tensor))
        except (ProtocolError, KeyError) as error:
            raise RestoreMismatch(f"the values of earlier rank {shard.rank} cannot be read: {error}") from error
        _check_facts(shard.facts, state.facts)
        pairs = [EarlierState(expected.step, shard.facts, each, others) for each in saved]
        are_engines = [pair.is_of_engine for pair in pairs]
        is_same = are_engines == [adapter.kind == "deepspeed" for adapter in state.adapters]
        if not is_same and not len(pairs) == len(state.adapters) == 1:
            raise CannotRelayout(
                "model",
                f"the earlier launch registered {len(pairs)} engines and models, this one {len(state.adapters)} of "
                "another kind. Only a single model changes between DeepSpeed and torch",
            )
        return cls(state, pairs, others)

    def targets(self, earlier: EarlierTensors) -> list[LoadTarget]:
        pairs = zip(self.state.adapters, self.pairs, strict=True)
        return [target for adapter, values in pairs for target in adapter.targets(earlier, values)]

    def translated(self) -> Tree:
        pairs = zip(self.state.adapters, self.pairs, strict=True)
        return [adapter.translate(values) for adapter, values in pairs]


def _check_facts(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check the facts about optimizers, groups, buffers and loaders, which the number of ranks must not change."""
    has_engine = any(value.startswith("deepspeed") for facts in (was, now) for value in facts.values())

    def is_compared(key: str) -> bool:
        if key.startswith("optimizer "):
            # Skip the parameter groups of a DeepSpeed engine's optimizer. They contain master weights, so they differ
            # between layouts.
            return not (has_engine and " group " in key)
        return key in ("format", "data") or key.startswith(("buffer ", "extra state "))

    for key in sorted(was.keys() | now.keys()):
        if is_compared(key) and was.get(key) != now.get(key):
            raise CannotRelayout(
                key.strip(), f"was {was.get(key, 'absent')}, is {now.get(key, 'absent')}. {ADVICE}, and its loaders"
            )


def _check_names(earlier: EarlierTensors, state: RankState, values: _Values) -> None:
    names = set(state.parameters())
    names |= {key.partition(" ")[2] for key in state.facts if key.startswith(("buffer ", "tie "))}
    for pair in values.pairs:
        names |= {f"model/{path}{key}" for path, _, key, _ in pair.adapter["buffers"]["late"]}
    ties = {key.partition(" ")[2] for pair in values.pairs for key in pair.facts if key.startswith("tie ")}
    for name in earlier.names():
        if name.startswith("model/") and name not in names and name not in ties:
            held = earlier.get(name)
            assert held is not None
            raise CannotRelayout(
                name, f"was {held.dtype}{list(held.shape)}, and this model has no such tensor. {ADVICE}"
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """The elements that an earlier shard's box shares with a box of this rank's tensor."""

    source: torch.Tensor
    """A view of the earlier shard."""
    part: TensorPart
    """The box of this rank's tensor."""
    offsets: tuple[int, ...]
    """Position within `part`."""

    @classmethod
    def of(cls, offsets: tuple[int, ...], sizes: tuple[int, ...], box: torch.Tensor, part: TensorPart) -> _Piece | None:
        """Return the common elements of an earlier shard's box and this rank's `part`; None if there are none."""
        begin = tuple(map(max, offsets, part.offsets))
        lengths = [
            min(offset + size, other + extent) - first
            for offset, size, other, extent, first in zip(offsets, sizes, part.offsets, part.sizes, begin, strict=True)
        ]
        if any(length <= 0 for length in lengths):
            return None
        source = _narrowed(box, [first - offset for first, offset in zip(begin, offsets, strict=True)], lengths)
        return cls(source, part, tuple(first - offset for first, offset in zip(begin, part.offsets, strict=True)))


@dataclass(slots=True)
class _Reads:
    target: LoadTarget
    pieces: list[_Piece] = field(default_factory=list)


class _Cover:
    """Plans the copies from the mapped earlier shards, of which more may follow, into this rank's tensors."""

    def __init__(self, earlier: EarlierTensors, earlier_size: int) -> None:
        self.reads: dict[str, _Reads] = {}
        """The tensors that the mapped shards cover completely, by name."""
        self._earlier = earlier
        self._earlier_size = earlier_size

    def add_all(self, targets: Sequence[LoadTarget]) -> list[LoadTarget]:
        """Plan the copies that fill targets. Return the targets that need a further shard."""
        for name in self.reads.keys() - {target.name for target in targets}:
            del self.reads[name]
        return [target for target in targets if not self._is_covered(target)]

    def _is_covered(self, target: LoadTarget) -> bool:
        known = self.reads.get(target.name)
        if known is not None and known.target == target:
            return True
        target.check()
        reads = _Reads(target)
        for alternatives in _places(target):
            found = [pieces for part in alternatives if (pieces := self._pieces(target, part)) is not None]
            if not found:
                return False
            if not target.shape and len(found) > 1:
                self._check_equal(target, alternatives)
            reads.pieces += found[0]
        self.reads[target.name] = reads
        return True

    def _pieces(self, target: LoadTarget, part: TensorPart) -> list[_Piece] | None:
        """Return the copies that fill a part of `target`; None if the mapped shards lack some of it."""
        held = self._earlier.get(part.name)
        if held is None:
            return None
        if (held.dtype, held.shape) != (dtype_name(target.dtype), part.shape):
            raise CannotRelayout(
                part.name,
                f"was {held.dtype}{list(held.shape)} on {self._earlier_size} ranks, is {dtype_name(target.dtype)}"
                f"{list(part.shape)}. {ADVICE}",
            )
        boxes = held.boxes.items()
        found = [piece for place, box in boxes if (piece := _Piece.of(*place, box, part)) is not None]
        return found if sum(piece.source.numel() for piece in found) == part.elements else None

    def _check_equal(self, target: LoadTarget, alternatives: Sequence[TensorPart]) -> None:
        values: dict[float, str] = {}
        for part in alternatives:
            if (held := self._earlier.get(part.name)) is not None:
                values.setdefault(next(iter(held.boxes.values())).item(), part.name)
        if len(values) > 1:
            (one, first), (other, second), *_ = values.items()
            raise CannotRelayout(
                target.name,
                f"{first} is {one} and {second} is {other}, and ZeRO keeps one value for both. Load the step with the "
                "earlier kind of training",
            )

    def explain(self, target: LoadTarget) -> tuple[str, str]:
        """Return the name of a tensor that all shards together cannot fill, and the reason."""
        for alternatives in _places(target):
            part = alternatives[0]
            held = self._earlier.get(part.name)
            now = f"{dtype_name(target.dtype)}{list(part.shape)}"
            if held is None:
                return part.name, f"is {now}, and none of the {self._earlier_size} earlier shards holds it. {ADVICE}"
            if sum(math.prod(sizes) for _, sizes in held.boxes) != math.prod(part.shape):
                return part.name, (
                    f"the {self._earlier_size} earlier shards hold boxes of {held.dtype}{list(held.shape)} that do not "
                    f"fit together, for {now}. Their layout divides it in a way that has no names; use even sizes"
                )
        return target.name, f"the {self._earlier_size} earlier shards do not cover it"


def _places(target: LoadTarget) -> list[list[TensorPart]]:
    """Return the boxes that fill a target. Boxes in one inner list have equal content for the same elements."""
    places: dict[tuple[int, int], list[TensorPart]] = {}
    for part in target.parts:
        if part.elements:
            places.setdefault((part.start, part.elements), []).append(part)
    return list(places.values())


class RelaidTensors(SavedTensors):
    """The tensors that this rank loads from earlier shards, from which `bring` copies as `cover` has planned."""

    def __init__(self, cover: _Cover, earlier: EarlierTensors) -> None:
        super().__init__()
        self._reads = cover.reads
        self._earlier = earlier
        self._waiting: list[tuple[_Reads, torch.Tensor]] = []
        self._waiting_bytes = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        reads = self._reads[name]
        if reads.target.is_own:
            return self._earlier.own_tensor(name)
        tensor = torch.zeros(reads.target.shape, dtype=reads.target.dtype)
        self._copy([(reads, tensor)])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    def described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        target = self._reads[name].target
        return torch.Size(target.shape), target.dtype

    def bring(self, name: str, live: torch.Tensor) -> torch.Tensor:
        reads = self._reads[name]
        if reads.target.is_own:
            return super().bring(name, live)
        self._waiting.append((reads, live))
        self._waiting_bytes += reads.target.nbytes
        if self._waiting_bytes >= GATHERED_BYTES:
            self.finish()
        return live

    def finish(self) -> None:
        super().finish()
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._copy(waiting)

    def _copy(self, filled: Sequence[tuple[_Reads, torch.Tensor]]) -> None:
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for reads, live in filled:
            tensor = live.detach()
            if reads.target.is_padded:
                _zero(tensor)
            for piece in reads.pieces:
                sources.append(piece.source)
                targets.append(_narrowed(_box(tensor, piece.part), piece.offsets, piece.source.shape))
        if sources:
            copy_into_live(Copies(sources, targets))


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


def _box(tensor: torch.Tensor, part: TensorPart) -> torch.Tensor:
    if part.start == 0 and part.sizes == tuple(tensor.shape):
        return tensor  # A whole tensor may be non-contiguous. `view(-1)` would then fail.
    return tensor.view(-1)[part.start : part.start + part.elements].view(part.sizes)


def _zero(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.zero_()


def _others(values: _Values, state: RankState, rank: Rank, earlier_size: int, world_size: int) -> Tree:
    saved = dict(values.others)
    objects = dict(saved["objects"])
    if len(values.pairs) == 1:
        (pair,) = values.pairs
        is_of_engine = state.adapters[0].kind == "deepspeed"
        if pair.is_of_engine and not is_of_engine and pair.scheduler() is not None:
            objects["scheduler"] = pair.scheduler()
        elif is_of_engine and "scheduler" not in state.objects:
            # Remove the scheduler from the objects, because the engine owns the scheduler and its adapter restores it.
            objects.pop("scheduler", None)
    if objects.keys() != state.objects.keys():
        was, now = sorted(objects), sorted(state.objects)
        name = sorted(objects.keys() ^ state.objects.keys())[0]
        raise CannotRelayout(name, f"the earlier launch registered {was}, this one {now}. Register the same objects")
    saved["objects"] = objects
    if len(saved["modes"]) != len(state.modules()):
        raise CannotRelayout(
            "model", f"the earlier launch registered {len(saved['modes'])} models, this one {len(state.modules())}"
        )
    saved["data"] = {
        name: stream.relaid(saved["data"][name], is_same_rank=world_size == earlier_size)
        for name, stream in state.streams.items()
    }
    if (before := len(saved["generators"])) != (count := len(state.generators)):
        raise CannotRelayout("model", f"it held {before} random generators, and holds {count}. Build the same model")
    if rank >= earlier_size:
        saved["rng"] = rng.derived(saved["rng"], rank)
        saved["generators"] = rng.generator_states(state.generators)
    return saved
