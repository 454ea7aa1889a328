"""The tree of agents, which carries the messages about commits, and the newest reports of the nodes below an agent.

    position 0 ─┬─ 1 ─┬─ 17 …            0 is the coordinator; the parent of i is (i - 1) // ARITY
                │     └─ … 32
                ├─ 2 ─── 33 … 48
                └─ … 16

For each node, an agent stores only the report with the highest (term, sequence number), whatever its path. Invariant:
the coordinator receives the same facts over the tree as over direct connections, only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import NodeReport, RankRound

# With 512 agents, arities of 8, 16 and 32 perform about the same (measured by `benchmarks.scale`).
ARITY = 16
"""Maximum number of children of a node. A tree of 10,000 nodes then has four levels below the coordinator."""
# A rank's report takes about 100 bytes plus its reason, far below `MAX_PEER_MESSAGE_BYTES` in total.
RANKS_PER_MESSAGE = 1024
NO_TERM = 0


@dataclass(frozen=True, slots=True)
class RoundTree:
    """The position of every node in the tree of agents of one generation, and the ranks of every node."""

    order: tuple[NodeId, ...]
    """All nodes by position in the tree; the coordinator is first."""
    ranks: Mapping[NodeId, frozenset[Rank]]
    arity: int = ARITY

    @classmethod
    def of(cls, coordinator: NodeId, ranks: Mapping[NodeId, Iterable[Rank]], *, arity: int = ARITY) -> RoundTree:
        """Build the tree of a generation. `ranks` is in the order of the plan, so every node builds the same tree."""
        order = (coordinator, *(node for node in ranks if node != coordinator))
        return cls(order, MappingProxyType({node: frozenset(named) for node, named in ranks.items()}), arity)

    def ancestors(self, node: NodeId) -> tuple[NodeId, ...]:
        """Return the nodes to which `node` may connect, its parent first and the coordinator last."""
        above: list[NodeId] = []
        position = self.order.index(node)
        while position:
            position = (position - 1) // self.arity
            above.append(self.order[position])
        return tuple(above)

    def below(self, node: NodeId) -> frozenset[NodeId]:
        """Return the nodes whose reports `node` sends: itself and its descendants; empty if it is not in the tree."""
        if node not in self.ranks:
            return frozenset()
        found: list[NodeId] = []
        first = last = self.order.index(node)
        while level := self.order[first : last + 1]:  # The descendants on one level of the tree are consecutive.
            found += level
            first, last = self.arity * first + 1, self.arity * (last + 1)
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class TreeReports:
    """The newest report of each node below an agent, for the current term of the coordinator."""

    term: int = NO_TERM
    """The highest received term. Reports with a lower term are ignored."""
    newest: Mapping[NodeId, NodeReport] = field(default_factory=lambda: MappingProxyType({}))

    def begin_term(self, term: int) -> TreeReports:
        """Discard the reports of lower terms, after a restart of the coordinator. A lower term changes nothing."""
        return TreeReports(term) if term > self.term else self

    def take(self, *reports: NodeReport) -> TreeReports:
        """Return the newest reports after `reports` have arrived. A lower term or sequence number is ignored."""
        known = self.begin_term(max((each.term for each in reports), default=NO_TERM))
        newest = dict(known.newest)
        for each in reports:
            if each.term == known.term and (
                each.node_id not in newest or each.sequence > newest[each.node_id].sequence
            ):
                newest[each.node_id] = each
        return TreeReports(known.term, MappingProxyType(newest))

    def since(self, sent: TreeReports) -> tuple[NodeReport, ...]:
        """Return the reports that differ from those in `sent`, an earlier state of this object."""
        return tuple(each for node, each in self.newest.items() if sent.newest.get(node) is not each)

    def is_pressing(self, sent: TreeReports, members: frozenset[NodeId]) -> bool:
        """Return whether the reports since `sent` are urgent: an abandoned step, a `_rare` change, or the last vote."""
        # Other reports can wait, because the coordinator acts only after all votes.
        for each in self.since(sent):
            before = sent.newest.get(each.node_id)
            if before is None or len(before.ranks) != len(each.ranks) or any(map(_presses, each.ranks, before.ranks)):
                return True
        return self._voted(members) not in (None, sent._voted(members))

    def is_progress(self, sent: TreeReports) -> bool:
        """Return whether the reports since `sent` only say that ranks finished steps or received messages."""
        return all(
            before is not None
            and len(before.ranks) == len(each.ranks)
            and all(map(_is_progress, each.ranks, before.ranks))
            for each in self.since(sent)
            for before in (sent.newest.get(each.node_id),)
        )

    def _voted(self, members: frozenset[NodeId]) -> Step | None:
        if len(self.newest) < len(members):
            return None
        steps = {
            rank.proposed if rank.vote is not Vote.NONE else None
            for each in self.newest.values()
            for rank in each.ranks
        }
        return steps.pop() if len(steps) == 1 else None


def messages(reports: Sequence[NodeReport]) -> Iterator[tuple[NodeReport, ...]]:
    """Group the reports into messages of at most `RANKS_PER_MESSAGE` ranks. A node with more has its own message."""
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
    """Return the fields whose changes are rare and must reach the coordinator immediately."""
    return (
        rank.standing,
        rank.echo_step,
        rank.echo,
        rank.rehearsal_step,
        rank.rehearsal_echo,
        rank.boundary == rank.heard_rehearsal,
        rank.pinned_steps,
        rank.held_step,
        rank.stored_step,
    )
