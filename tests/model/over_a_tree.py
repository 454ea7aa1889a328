"""The step protocol's model with reports and announcements that travel over a tree of agents, through nodes that remember what they passed on.

Everything but the rounds' messages is `tests.model.step_protocol`. A report of a rank goes from relay to relay, an announcement too; a node may
have a line to any node above it, to several one after the other, and what a relay says may be older than what another one has said since. Relays
keep what they know in the real `worker.core.tree.Reports`; an agent that restarts forgets it.

    python -m tests.model.over_a_tree NODES COPIES STEPS FAULTS [--walks N] [--seed S] [--arity K] [--bug NAME]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.rounds import NodeReport
from tests.model.explore import Explored, Found, walk
from tests.model.step_protocol import NONE, WEIGHTS, Event, Model, steady
from tests.model.world import Shape, World, put
from worker.core.tree import NO_TERM, Reports, RoundTree


class Announced(NamedTuple):
    """What a node announces: an `Announcement` as far as this model needs it."""

    term: int = NO_TERM
    sequence: int = 0
    committed: int = NONE
    proposed: int = NONE
    is_silent: bool = True


class Relay(NamedTuple):
    """A node's place in the tree: what it knows of the nodes below and of the coordinator."""

    known: Reports = Reports()
    announced: Announced = Announced()
    sequence: int = 0
    is_restarted: bool = False
    """It hears the coordinator itself first."""


class TreeWorld(NamedTuple):
    """A world and its relays, one per seat; the coordinator's own is what `RoundServer` has taken."""

    world: World
    relays: tuple[Relay, ...]
    term: int
    sequence: int = 0
    """Of the coordinator's announcements in this term."""


class AnyTerm(Reports):
    """Planted: what was reported to the coordinator's earlier life counts as if it had been said to this one."""

    def begin_term(self, term: int) -> Reports:
        kept = {node: NodeReport(node_id=node, term=term, sequence=each.sequence, ranks=each.ranks) for node, each in self.newest.items()}
        return AnyTerm(term, MappingProxyType(kept)) if term > self.term else self

    def take(self, *reports: NodeReport) -> Reports:
        """Stay planted."""
        known = super().take(*reports)
        return AnyTerm(known.term, known.newest)


OF_THE_TREE = {**dict.fromkeys(WEIGHTS, 0.05), "boundary": 0.5, "obstacle": 0.5, "restart": 0.4, "drop": 0.1}
"""How likely the kinds of events are: restarts and abandoned steps are what a tree may get wrong."""
BUGS = ("any-term", "hears-all")


@dataclass(frozen=True)
class TreeModel:
    """All moves of a world whose rounds travel over a tree."""

    model: Model
    tree: RoundTree
    reports: type[Reports] = Reports
    hears_all: bool = False
    """Planted: what was overtaken is heard, too."""

    @classmethod
    def of(cls, model: Model, *, arity: int = 1, bug: str | None = None) -> TreeModel:
        """Return the model over a tree of which seat 0 is the root; arity 1 is a chain, the deepest there is. `bug` is one of `BUGS`, planted."""
        tree = RoundTree.of(NodeId("0"), {NodeId(f"{seat}"): [Rank(seat)] for seat in model.seats}, arity=arity)
        return cls(model, tree, AnyTerm if bug == "any-term" else Reports, bug == "hears-all")

    def first(self) -> TreeWorld:
        """Return the first world of the model; over the tree nothing is known yet."""
        return self._anew(self.model.first(), term=1)

    def check(self, world: TreeWorld) -> None:
        """Check what the model checks."""
        self.model.check(world.world)

    def is_done(self, world: TreeWorld) -> bool:
        """Say whether the model is done."""
        return self.model.is_done(world.world)

    def moves(self, world: TreeWorld) -> Iterator[tuple[Event, TreeWorld]]:
        """Yield the model's moves but for its rounds, and those of the tree."""
        for event, after in self.model.moves(world.world):
            match event:
                case ("report", *_) | ("hear", *_):
                    continue
                case ("restart", int(seat)) | ("spoil", _, int(seat), _):
                    yield event, self._restarted(world._replace(world=after), seat)
                case ("start",):
                    yield event, self._anew(after, term=world.term + 1)
                case _:
                    yield event, world._replace(world=after)
        live = [seat for seat in self.model.seats if self.model.acts(world.world, seat)]
        if 0 in live:
            yield from self._at_the_root(world)
        for seat in live:
            for above in (int(node) for node in self.tree.ancestors(NodeId(f"{seat}"))):
                if above in live:
                    yield from self._over_a_line(world, seat, above)

    # -- relays ---------------------------------------------------------------------------------------------------------------------------

    def _anew(self, world: World, *, term: int) -> TreeWorld:
        """A new generation: nobody knows anything."""
        return self._at_root(TreeWorld(world, (Relay(self.reports()),) * self.model.shape.nodes, term))

    def _at_root(self, world: TreeWorld) -> TreeWorld:
        return world._replace(relays=put(world.relays, 0, world.relays[0]._replace(known=self.reports(world.term))))

    def _restarted(self, world: TreeWorld, seat: int) -> TreeWorld:
        forgotten = world._replace(relays=put(world.relays, seat, Relay(self.reports(), sequence=world.relays[seat].sequence + 1, is_restarted=True)))
        return forgotten if seat else self._at_root(forgotten._replace(term=world.term + 1, sequence=0))

    def _newest(self, world: TreeWorld, seat: int) -> Relay:
        """Return a relay with its own rank's state as it is now (`RoundMember._newest`)."""
        relay, node = world.relays[seat], NodeId(f"{seat}")
        ranks, own = (self.model.round(world.world, seat),), relay.known.newest.get(node)
        if relay.known.term == NO_TERM or (own is not None and own.ranks == ranks):
            return relay
        report = NodeReport(node_id=node, term=relay.known.term, sequence=relay.sequence + 1, ranks=ranks)
        return relay._replace(known=relay.known.take(report), sequence=relay.sequence + 1)

    def _announced(self, world: TreeWorld, seat: int) -> Announced:
        coordinator = world.world.coordinator
        if seat:
            return world.relays[seat].announced
        return Announced(world.term, world.sequence, coordinator.committed, coordinator.proposed, coordinator.is_recovering)

    # -- moves ----------------------------------------------------------------------------------------------------------------------------

    def _at_the_root(self, world: TreeWorld) -> Iterator[tuple[Event, TreeWorld]]:
        """The coordinator's own rank reports and hears."""
        relay = self._newest(world, 0)
        if relay != world.relays[0]:
            yield ("report", 0), self._taken(world, 0, tuple(relay.known.newest.values()), relay.sequence)
        announced, shard = self._announced(world, 0), world.world.shards[0]
        if not announced.is_silent and (announced.committed, announced.proposed) != (shard.committed, shard.proposed):
            yield ("hear", 0), self._told(world, 0, announced)

    def _over_a_line(self, world: TreeWorld, seat: int, above: int) -> Iterator[tuple[Event, TreeWorld]]:
        relay = self._newest(world, seat)
        sent = tuple(each for node, each in relay.known.newest.items() if world.relays[above].known.newest.get(node) != each)
        if sent and relay.known.term >= world.relays[above].known.term:
            risen = world._replace(relays=put(world.relays, seat, relay))
            after = self._taken(risen, above, sent, world.relays[above].sequence)
            if after != world:
                yield ("up", seat, above), after
        announced = self._announced(world, above)
        is_news = announced[:2] > relay.announced[:2] and announced.term >= relay.known.term
        if (is_news or (self.hears_all and announced != relay.announced)) and (not above or self.hears_all or not relay.is_restarted):
            after = self._told(world, seat, announced)
            if after != world:
                yield ("down", above, seat), after

    def _taken(self, world: TreeWorld, seat: int, reports: Sequence[NodeReport], sequence: int) -> TreeWorld:
        before = world.relays[seat].known
        known = before.take(*(each for each in reports if seat or each.term == world.term))
        after = world._replace(relays=put(world.relays, seat, world.relays[seat]._replace(known=known, sequence=sequence)))
        if seat:
            return after
        rounds = [rank for each in known.since(before) for rank in each.ranks]
        if not rounds:
            return after
        spoken, coordinator = world.world.coordinator, world.world.coordinator.report(*rounds)
        is_news = (spoken.committed, spoken.proposed, spoken.is_recovering) != (
            coordinator.committed,
            coordinator.proposed,
            coordinator.is_recovering,
        )
        return after._replace(world=self.model._coordinated(world.world, coordinator), sequence=after.sequence + is_news)

    def _told(self, world: TreeWorld, seat: int, announced: Announced) -> TreeWorld:
        """A node hears an announcement (`RoundMember._listened`)."""
        relay = world.relays[seat]
        relay = relay._replace(known=relay.known.begin_term(announced.term), announced=announced, is_restarted=False)
        after = world._replace(relays=put(world.relays, seat, relay))
        if announced.is_silent:
            return after
        shard = world.world.shards[seat].hear(announced.committed, announced.proposed)  # type: ignore[arg-type]
        return after._replace(world=self.model._apply(world.world, seat, shard))


def follow(shape: Shape, seeds: range, *, arity: int = 1, length: int = 400, bug: str | None = None) -> Explored:
    """Walk at random from the middle of a training.

    Args:
        shape: steps count from there.
        seeds: one walk each.
        arity: of the tree.
        length: events of a walk.
        bug: planted, or none.

    Returns:
        What was seen.

    Raises:
        Found: something that must never be.
    """
    seen = Explored()
    for seed in seeds:
        start = steady(shape.nodes, shape.copies, seed=seed % 7)
        steps = shape.steps + max(process.boundary for process in start.processes)
        model = Model(replace(shape, steps=steps), is_fine=True, start=start)
        over = TreeModel.of(model, arity=arity, bug=bug)
        seen.update(walk(over, random.Random(seed), length, weights=OF_THE_TREE)[1])
    return seen


def main(arguments: Sequence[str]) -> int:
    """Walk as the command line says; print what was seen or the story of a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.over_a_tree")
    for name in ("nodes", "copies", "steps", "faults"):
        parser.add_argument(name, type=int)
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--arity", type=int, default=1)
    parser.add_argument("--bug", choices=BUGS)
    chosen = parser.parse_args(arguments)
    shape = Shape(chosen.nodes, chosen.copies, chosen.steps, chosen.faults)
    try:
        seen = follow(shape, range(chosen.seed, chosen.seed + chosen.walks), arity=chosen.arity, bug=chosen.bug)
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"the invariants hold; {dict(seen.most_common())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
