"""Models of the two protocols between coordinator and agents, whose reports and announcements travel over a tree of
agents.

The models reuse `tests.model.step_protocol` and `tests.model.stop_agreement`, and replace only the transport of their
messages. Each agent is a node of the tree and has a *relay*, the part that forwards reports and announcements and
remembers what it forwarded. A node may connect to any node above it, and to several of them in turn. A relay may
therefore deliver an older message than another relay did. Relays store their state in the real
`worker.core.tree.TreeReports`. A restarted agent loses this state.

    python -m tests.model.over_a_tree NODES COPIES STEPS FAULTS [--stop] [--walks N] [--seed S] [--arity K] [--bug NAME]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.rounds import NodeReport, RankRound
from tests.model import step_protocol, stop_agreement
from tests.model.explore import Event, Explored, Found, Searchable, W, walk
from tests.model.stop_agreement import RARELY, Options
from tests.model.world import Shape, World, put
from worker.core.tree import NO_TERM, RoundTree, TreeReports

Word = tuple[Any, ...]
"""The content of the coordinator's announcement."""


class Rounds(Searchable[W], Protocol[W]):
    """The methods of a protocol model that `TreeModel` calls to send reports and announcements over the tree."""

    @property
    def seats(self) -> range: ...
    def acts(self, world: W, seat: int, /) -> bool: ...
    def round(self, world: W, seat: int, /) -> RankRound: ...
    def word(self, world: W) -> Word | None: ...  # None while the coordinator recovers after a restart
    def heard(self, world: W, seat: int) -> Word: ...
    def taken(self, world: W, rounds: Sequence[RankRound]) -> W: ...
    def told(self, world: W, seat: int, word: Word) -> W: ...
    def restarted(self, event: Event) -> int | None: ...  # the node position whose agent restarts in this event
    def is_start(self, event: Event) -> bool: ...  # True at the start of a new generation


class StepRounds(step_protocol.Model):
    """The model of the step protocol with the methods of `Rounds`. `TreeModel` transports its messages."""

    def word(self, world: World) -> Word | None:
        core = world.coordinator
        return None if core.is_recovering else (core.committed, core.proposed)

    def heard(self, world: World, seat: int) -> Word:
        return world.shards[seat].committed, world.shards[seat].proposed

    def taken(self, world: World, rounds: Sequence[RankRound]) -> World:
        return self._coordinated(world, world.coordinator.report(*rounds))

    def told(self, world: World, seat: int, word: Word) -> World:
        return self._apply(world, seat, world.shards[seat].apply_announcement(*word))

    def restarted(self, event: Event) -> int | None:
        match event:
            case ("restart", int(seat)) | ("spoil", _, int(seat), _):
                return seat
        return None

    def is_start(self, event: Event) -> bool:
        return event == ("start",)

    def _line(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        yield from ()


class StopRounds(stop_agreement.Model):
    """The model of the agreed stop with the methods of `Rounds`. `TreeModel` transports its messages.

    Messages are sent and received in separate events (`is_fine`), and only the coordinator's agent restarts. At a
    restart, `_restarted` discards a stop that no agent has received. Such a stop cannot return through the tree,
    because a node forwards an announcement only after the node's agent has received it.
    """

    @property
    def seats(self) -> range:
        return self.ranks

    def acts(self, world: stop_agreement.World, seat: int) -> bool:
        return True

    def word(self, world: stop_agreement.World) -> Word | None:
        return None if world.coordinator.is_recovering else stop_agreement.word_of(world.coordinator)

    def heard(self, world: stop_agreement.World, seat: int) -> Word:
        return world.agents[seat].word

    def taken(self, world: stop_agreement.World, rounds: Sequence[RankRound]) -> stop_agreement.World:
        return self._coordinated(world, world.coordinator.report(*rounds))

    def told(self, world: stop_agreement.World, seat: int, word: Word) -> stop_agreement.World:
        return self._heard(world, seat, stop_agreement.Word(*word))

    def restarted(self, event: Event) -> int | None:
        return 0 if event == ("restart",) else None

    def is_start(self, event: Event) -> bool:
        return False

    def _line(self, world: stop_agreement.World, rank: int) -> Iterator[tuple[Event, stop_agreement.World]]:
        yield from ()


class Announced(NamedTuple):
    """The newest announcement of the coordinator that a node has received: the fields that this model uses."""

    term: int = NO_TERM
    sequence: int = 0
    word: Word | None = None


class Relay(NamedTuple):
    """A node in the tree. It stores the newest reports of the nodes below it, and the coordinator's newest
    announcement.
    """

    known: TreeReports = TreeReports()
    announced: Announced = Announced()
    sequence: int = 0
    is_restarted: bool = False
    """True from a restart of the node until it accepts an announcement directly from the coordinator."""


class TreeWorld(NamedTuple, Generic[W]):
    """One state of the model: the protocol's state, and per node the relay that forwards messages in the tree.

    The coordinator's relay holds the reports that the real `RoundServer` would have received.
    """

    world: W
    relays: tuple[Relay, ...]
    term: int
    sequence: int = 0
    """Number of the newest announcement since the coordinator's last restart."""


class AnyTerm(TreeReports):
    """A planted bug: a restarted coordinator still counts reports that nodes sent before its restart."""

    def begin_term(self, term: int) -> TreeReports:
        kept = {
            node: NodeReport(node_id=node, term=term, sequence=each.sequence, ranks=each.ranks)
            for node, each in self.newest.items()
        }
        return AnyTerm(term, MappingProxyType(kept)) if term > self.term else self

    def take(self, *reports: NodeReport) -> TreeReports:
        """Add reports as the real class does, and return an object that has the planted bug too."""
        known = super().take(*reports)
        return AnyTerm(known.term, known.newest)


OF_THE_TREE = {
    **dict.fromkeys(step_protocol.WEIGHTS, 0.05),
    "boundary": 0.5,
    "obstacle": 0.5,
    "restart": 0.4,
    "drop": 0.1,
}
"""Weights of the kinds of events in a random walk. Restarts and abandoned steps are frequent, to stress the tree."""
BUGS = ("any-term", "hears-all")


@dataclass(frozen=True)
class TreeModel(Generic[W]):
    """Combines a model of a protocol with the tree of agents that transports the protocol's messages."""

    model: Rounds[W]
    tree: RoundTree
    reports: type[TreeReports] = TreeReports
    hears_all: bool = False
    """A planted bug: if True, nodes accept announcements that are older than the newest one that they received."""

    @classmethod
    def of(cls, model: Rounds[W], *, arity: int = 1, bug: str | None = None) -> TreeModel[W]:
        """Return a model in which a tree of agents transports the messages of `model`. Node 0 is the root.

        `arity` is the maximum number of children per node; 1 gives a chain, the deepest tree. `bug` names the entry of
        `BUGS` that is planted in the model.
        """
        tree = RoundTree.of(NodeId("0"), {NodeId(f"{seat}"): [Rank(seat)] for seat in model.seats}, arity=arity)
        return cls(model, tree, AnyTerm if bug == "any-term" else TreeReports, bug == "hears-all")

    def first(self) -> TreeWorld[W]:
        """Return the model's first state, in which no node has received a message from another node."""
        return self._anew(self.model.first(), term=1)

    def check(self, world: TreeWorld[W]) -> None:
        """Check the invariants of the underlying model."""
        self.model.check(world.world)

    def is_done(self, world: TreeWorld[W]) -> bool:
        """Return whether the underlying model has reached its end."""
        return self.model.is_done(world.world)

    def moves(self, world: TreeWorld[W]) -> Iterator[tuple[Event, TreeWorld[W]]]:
        """Yield every possible event of the protocol and of the tree, with the state after it."""
        for event, after in self.model.moves(world.world):
            seat = self.model.restarted(event)
            if seat is not None:
                yield event, self._restarted(world._replace(world=after), seat)
            elif self.model.is_start(event):
                yield event, self._anew(after, term=world.term + 1)
            else:
                yield event, self._with(world, after)
        live = [seat for seat in self.model.seats if self.model.acts(world.world, seat)]
        if 0 in live:
            yield from self._at_the_root(world)
        for seat in live:
            for above in (int(node) for node in self.tree.ancestors(NodeId(f"{seat}"))):
                if above in live:
                    yield from self._over_a_line(world, seat, above)

    # -- state of the relays, which forward messages in the tree

    def _with(self, world: TreeWorld[W], after: W) -> TreeWorld[W]:
        """Return the tree's state after an event of the underlying model.

        The coordinator numbers each new announcement, as `RoundServer._apply` does.
        """
        return world._replace(
            world=after, sequence=world.sequence + (self.model.word(after) != self.model.word(world.world))
        )

    def _anew(self, world: W, *, term: int) -> TreeWorld[W]:
        """Return the state at the start of a generation: no node of the tree remembers a message."""
        return self._at_root(TreeWorld(world, (Relay(self.reports()),) * len(self.model.seats), term))

    def _at_root(self, world: TreeWorld[W]) -> TreeWorld[W]:
        return world._replace(relays=put(world.relays, 0, world.relays[0]._replace(known=self.reports(world.term))))

    def _restarted(self, world: TreeWorld[W], seat: int) -> TreeWorld[W]:
        forgotten = world._replace(
            relays=put(
                world.relays, seat, Relay(self.reports(), sequence=world.relays[seat].sequence + 1, is_restarted=True)
            )
        )
        return forgotten if seat else self._at_root(forgotten._replace(term=world.term + 1, sequence=0))

    def _newest(self, world: TreeWorld[W], seat: int) -> Relay:
        """Return the messages that a node remembers (its relay), with a new report if its own rank's state has changed.

        `RoundMember._newest` is the code that this models.
        """
        relay, node = world.relays[seat], NodeId(f"{seat}")
        ranks, own = (self.model.round(world.world, seat),), relay.known.newest.get(node)
        if relay.known.term == NO_TERM or (own is not None and own.ranks == ranks):
            return relay
        report = NodeReport(node_id=node, term=relay.known.term, sequence=relay.sequence + 1, ranks=ranks)
        return relay._replace(known=relay.known.take(report), sequence=relay.sequence + 1)

    def _announced(self, world: TreeWorld[W], seat: int) -> Announced:
        return (
            world.relays[seat].announced
            if seat
            else Announced(world.term, world.sequence, self.model.word(world.world))
        )

    # -- events in which messages travel over the tree

    def _at_the_root(self, world: TreeWorld[W]) -> Iterator[tuple[Event, TreeWorld[W]]]:
        """Yield the moves in which the coordinator's own rank reports to it and receives its announcements."""
        relay = self._newest(world, 0)
        if relay != world.relays[0]:
            yield ("report", 0), self._taken(world, 0, tuple(relay.known.newest.values()), relay.sequence)
        announced = self._announced(world, 0)
        if announced.word not in (None, self.model.heard(world.world, 0)):
            yield ("hear", 0), self._told(world, 0, announced)

    def _over_a_line(self, world: TreeWorld[W], seat: int, above: int) -> Iterator[tuple[Event, TreeWorld[W]]]:
        relay = self._newest(world, seat)
        sent = tuple(
            each for node, each in relay.known.newest.items() if world.relays[above].known.newest.get(node) != each
        )
        if sent and relay.known.term >= world.relays[above].known.term:
            risen = world._replace(relays=put(world.relays, seat, relay))
            after = self._taken(risen, above, sent, world.relays[above].sequence)
            if after != world:
                yield ("up", seat, above), after
        announced = self._announced(world, above)
        is_news = announced[:2] > relay.announced[:2] and announced.term >= relay.known.term
        if (is_news or (self.hears_all and announced != relay.announced)) and (
            not above or self.hears_all or not relay.is_restarted
        ):
            after = self._told(world, seat, announced)
            if after != world:
                yield ("down", above, seat), after

    def _taken(self, world: TreeWorld[W], seat: int, reports: Sequence[NodeReport], sequence: int) -> TreeWorld[W]:
        before = world.relays[seat].known
        known = before.take(*(each for each in reports if seat or each.term == world.term))
        after = world._replace(
            relays=put(world.relays, seat, world.relays[seat]._replace(known=known, sequence=sequence))
        )
        if seat:
            return after
        rounds = [rank for each in known.since(before) for rank in each.ranks]
        return self._with(after, self.model.taken(world.world, rounds)) if rounds else after

    def _told(self, world: TreeWorld[W], seat: int, announced: Announced) -> TreeWorld[W]:
        """Return the state after a node received an announcement, as in `RoundMember._listened`."""
        relay = world.relays[seat]
        relay = relay._replace(known=relay.known.begin_term(announced.term), announced=announced, is_restarted=False)
        after = world._replace(relays=put(world.relays, seat, relay))
        return (
            after
            if announced.word is None
            else after._replace(world=self.model.told(world.world, seat, announced.word))
        )


def follow(shape: Shape, seeds: range, *, arity: int = 1, length: int = 400, bug: str | None = None) -> Explored:
    """Follow one random walk per seed, from a state in the middle of training.

    Args:
        shape: sizes of the model; steps count from the start of the walk.
        seeds: seeds, one walk for each.
        arity: children per node of the tree.
        length: events per walk.
        bug: planted bug of `BUGS`, or an empty value for none.

    Returns:
        The counts of states and events.

    Raises:
        Found: an invariant is violated.
    """
    seen = Explored()
    for seed in seeds:
        start = step_protocol.steady(shape.nodes, shape.copies, seed=seed % 7)
        steps = shape.steps + max(process.boundary for process in start.processes)
        over = TreeModel.of(StepRounds(replace(shape, steps=steps), is_fine=True, start=start), arity=arity, bug=bug)
        seen.update(walk(over, random.Random(seed), length, weights=OF_THE_TREE)[1])
    return seen


def follow_stop(
    options: Options, seeds: range, *, arity: int = 1, length: int = 4000, bug: str | None = None
) -> Explored:
    """Follow one random walk per seed, from the start of a job until every rank has closed.

    Args:
        options: options of the stop model. `is_fine` is set to True.
        seeds: seeds, one walk for each.
        arity: children per node of the tree.
        length: most events per walk.
        bug: planted bug of `BUGS`, or an empty value for none.

    Returns:
        The counts of states and events.

    Raises:
        Found: an invariant is violated, or the walk does not end.
    """
    seen = Explored()
    for seed in seeds:
        over = TreeModel.of(StopRounds(replace(options, is_fine=True)), arity=arity, bug=bug)
        world, walked = walk(over, random.Random(seed), length, weights=RARELY)
        if not over.is_done(world):
            raise Found(f"seed {seed}: after {walked.states} events somebody is still there", (), world)
        seen.update(walked)
    return seen


def main(arguments: Sequence[str]) -> int:
    """Run the walks of the command line and print the counts, or the events of a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.over_a_tree")
    for name in ("nodes", "copies", "steps", "faults"):
        parser.add_argument(name, type=int)
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--arity", type=int, default=1)
    parser.add_argument("--bug", choices=BUGS)
    parser.add_argument(
        "--stop",
        action="store_true",
        help="the agreed stop; FAULTS are restarts of the coordinator, COPIES says nothing",
    )
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.seed, chosen.seed + chosen.walks)
    try:
        if chosen.stop:
            options = Options(chosen.nodes, chosen.steps, chosen.faults, may_hurry=True, has_uploads=True)
            seen = follow_stop(options, seeds, arity=chosen.arity, bug=chosen.bug)
        else:
            seen = follow(
                Shape(chosen.nodes, chosen.copies, chosen.steps, chosen.faults),
                seeds,
                arity=chosen.arity,
                bug=chosen.bug,
            )
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"the invariants hold; {dict(seen.most_common())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
