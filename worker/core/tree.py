"""The tree of agents that the rounds of a generation travel over, and what is known of the nodes below one of them.

Pure.

    position 0 ─┬─ 1 ─┬─ 17 …            0 is the coordinator; the parent of i is (i - 1) // ARITY
                │     └─ … 32
                ├─ 2 ─── 33 … 48
                └─ … 16

A node's report carries the coordinator's term that it answers and a number of its own. Of each node the newest report
of the newest term is kept, wherever it comes in and by whatever way it came: nothing that was overtaken can come back,
and nothing is counted twice.

Invariant: what the coordinator learns over the tree is what it would learn over lines of its own to every node, only
later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import NodeReport, RankRound

ARITY = 16
"""Children of a node: up to 17 nodes dial the coordinator itself, and 10,000 are four lines from it.

At 512 agents 8, 16 and 32 come to about the
same (measured by `benchmarks.scale`): more children cost the node, fewer cost levels, and each level may hold what does
not press for 20 ms."""
RANKS_PER_MESSAGE = 1024
"""Of one `RoundReport`: a rank takes some 100 bytes and a sentence at worst, far below `MAX_PEER_MESSAGE_BYTES` for all of them."""
NO_TERM = 0


@dataclass(frozen=True, slots=True)
class RoundTree:
    """Who is above and below whom in one generation, and whose ranks are whose."""

    order: tuple[NodeId, ...]
    """By position: the coordinator first."""
    ranks: Mapping[NodeId, frozenset[Rank]]
    arity: int = ARITY

    @classmethod
    def of(cls, coordinator: NodeId, ranks: Mapping[NodeId, Iterable[Rank]], *, arity: int = ARITY) -> RoundTree:
        """Return the tree of a generation.

        Args:
            coordinator: the root.
            ranks: of every node, the nodes in an order that all of them know: the plan's.
            arity: children of a node.

        Returns:
            The same tree on every node.
        """
        order = (coordinator, *(node for node in ranks if node != coordinator))
        return cls(order, MappingProxyType({node: frozenset(named) for node, named in ranks.items()}), arity)

    def ancestors(self, node: NodeId) -> tuple[NodeId, ...]:
        """Return whom a node may dial: its parent first, the coordinator last; none for the coordinator itself."""
        above, position = [], self.order.index(node)
        while position:
            position = (position - 1) // self.arity
            above.append(self.order[position])
        return tuple(above)

    def below(self, node: NodeId) -> frozenset[NodeId]:
        """Return the nodes that a node speaks for: itself and all below it; nobody for one that is not a member."""
        if node not in self.ranks:
            return frozenset()
        found: list[NodeId] = []
        first = last = self.order.index(node)
        while first < len(self.order):  # the descendants of a position that are on one level are neighbours
            found += self.order[first : last + 1]
            first, last = self.arity * first + 1, self.arity * (last + 1)
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Reports:
    """The newest state of some nodes, as reports have brought it."""

    term: int = NO_TERM
    """The newest term of the coordinator that is known of; reports that answer an older one say nothing any more."""
    newest: Mapping[NodeId, NodeReport] = field(default_factory=lambda: MappingProxyType({}))

    def begin_term(self, term: int) -> Reports:
        """A coordinator's agent has (re)started: what was reported before is to be said again, to it."""
        return Reports(term) if term > self.term else self

    def take(self, *reports: NodeReport) -> Reports:
        """Return what is known with these reports; of an older term or overtaken ones are dropped."""
        known = self.begin_term(max((each.term for each in reports), default=NO_TERM))
        newest = dict(known.newest)
        for each in reports:
            if each.term == known.term and (
                each.node_id not in newest or each.sequence > newest[each.node_id].sequence
            ):
                newest[each.node_id] = each
        return Reports(known.term, MappingProxyType(newest))

    def since(self, told: Reports) -> tuple[NodeReport, ...]:
        """Return the reports that are not in `told`, which is an earlier one of these."""
        return tuple(each for node, each in self.newest.items() if told.newest.get(node) is not each)

    def is_pressing(self, told: Reports, members: frozenset[NodeId]) -> bool:
        """Say whether the coordinator should hear at once of what it was not told.

        Steps that were made can wait for company, and so can single votes: before all have voted they move nothing.
        What presses is the last vote of a subtree, an abandoned step, and all that is rare.

        Args:
            told: what the coordinator was told.
            members: the nodes that speak through this one, itself included.

        Returns:
            Whether to send at once.
        """
        for each in self.since(told):
            before = told.newest.get(each.node_id)
            if before is None or len(before.ranks) != len(each.ranks) or any(map(_presses, each.ranks, before.ranks)):
                return True
        return self._voted(members) not in (None, told._voted(members))

    def is_progress(self, told: Reports) -> bool:
        """Say whether all that is new are steps that were made and what the coordinator itself has said, while a step is proposed: nothing that it
        does depends on that before all have voted, and the votes say it again.
        """
        return all(
            before is not None
            and len(before.ranks) == len(each.ranks)
            and all(map(_is_progress, each.ranks, before.ranks))
            for each in self.since(told)
            for before in (told.newest.get(each.node_id),)
        )

    def _voted(self, members: frozenset[NodeId]) -> Step | None:
        """Return the step that all ranks of `members` have voted on."""
        if len(self.newest) < len(members):
            return None
        steps = {
            rank.proposed if rank.vote is not Vote.NONE else None
            for each in self.newest.values()
            for rank in each.ranks
        }
        return steps.pop() if len(steps) == 1 else None


def messages(reports: Sequence[NodeReport]) -> Iterator[tuple[NodeReport, ...]]:
    """Yield the reports in groups of at most `RANKS_PER_MESSAGE` ranks; a node that has more is a group of its own."""
    group: list[NodeReport] = []
    count = 0
    for each in reports:
        if group and count + len(each.ranks) > RANKS_PER_MESSAGE:
            yield tuple(group)
            group, count = [], 0
        group.append(each)
        count += len(each.ranks)
    if group:
        yield tuple(group)


def _presses(now: RankRound, before: RankRound) -> bool:
    abandoned = now.vote is Vote.ABANDON and (before.vote, before.proposed) != (now.vote, now.proposed)
    return abandoned or _rare(now) != _rare(before)


def _is_progress(now: RankRound, before: RankRound) -> bool:
    is_voted = now.vote is not Vote.NONE and (before.vote, before.proposed) != (now.vote, now.proposed)
    return not is_voted and now.proposed >= 0 and now.out_of_view == before.out_of_view and _rare(now) == _rare(before)


def _rare(rank: RankRound) -> tuple[object, ...]:
    """Return what changes seldom and moves the coordinator by itself."""
    return rank.standing, rank.echo_step, rank.echo, rank.pinned_step
