"""Rearranges a job's placement groups so that each shard has copies in two failure domains, with few changes.

A placement group is a set of nodes that hold each other's shards, not an EC2 placement group. If the last group has
more than `copies` nodes, it is a ring: each member holds its own shard and those of its `copies - 1` predecessors. A
shard is exposed if all its holders share one domain. The solver exchanges two nodes at a time. Every exchange lowers
the number of exposed shards, with the fewest changes.

Invariant: groups without exposed shards change only if they take part in such an exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeVar

Member = TypeVar("Member")
Group = tuple[int, ...]
"""GROUP_RANKs of a placement group's members. In a ring, each member and its successors hold its shard."""
Option = dict[int, tuple[int, ...]]
"""A possible exchange: the new members of each changed group, by the group's index."""
Rank = tuple[int, int]
"""Sort key of an exchange, lowest first: exposed shards afterwards, then shards with changed holders."""
PARTNERS = 16
"""Number of groups, most suitable first, with which the solver tries to exchange nodes of the ring."""


def holders_in(group: tuple[Member, ...], position: int, copies: int) -> tuple[Member, ...]:
    """Return the holders of the shards of the group's node at `position`; this node is the first."""
    return tuple(group[(position + j) % len(group)] for j in range(copies))


def separate(groups: Sequence[Group], copies: int, domains: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups, in the same order and sizes, with as few exposed shards and changes as possible.
    Deterministic.

    All groups have `copies` members, except that the last may have up to `2 * copies - 1`.
    """
    search = _Search(list(groups), copies, domains)
    if copies > 1:
        while search.is_improved():
            continue
    return tuple(search.groups)


@dataclass(slots=True)
class _Search:
    groups: list[Group]
    copies: int
    domains: Sequence[str]
    original: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    touched: set[int] = field(default_factory=set[int])

    def is_improved(self) -> bool:
        """Exchange nodes so that fewer shards are exposed. Return False if that is impossible."""
        before = self.exposed_count
        if before:
            self.original = self.original or {
                node: frozenset(holders_in(group, position, self.copies))
                for group in self.groups
                for position, node in enumerate(group)
            }
            self.mend_ring()
            self.mend_whole_groups()
        return self.exposed_count < before

    @property
    def exposed_count(self) -> int:
        return sum(self.exposed(group) for group in self.groups)

    def exposed(self, group: Group) -> int:
        if len(group) == self.copies:
            return len(group) if self.domain_of_all(group) is not None else 0
        shards = (holders_in(group, position, self.copies) for position in range(len(group)))
        return sum(self.domain_of_all(holders) is not None for holders in shards)

    def domain_of_all(self, nodes: Group) -> str | None:
        first = self.domains[nodes[0]]
        return first if all(self.domains[node] == first for node in nodes) else None

    def changed(self, group: Group) -> int:
        return sum(
            frozenset(holders_in(group, position, self.copies)) != self.original[node]
            for position, node in enumerate(group)
        )

    def outside(self, index: int, domain: str) -> int:
        return sum(self.domains[node] != domain for node in self.groups[index])

    @property
    def ring(self) -> int | None:
        """The index of the last group if this group is a ring, else None."""
        return len(self.groups) - 1 if len(self.groups[-1]) > self.copies else None

    def mend_ring(self) -> None:
        ring = self.ring
        while ring is not None and self.exposed(self.groups[ring]):
            options = [*self.orders(ring), *self.exchanges_of(ring)]
            if not self.apply_best(options):
                return

    def orders(self, ring: int) -> Iterator[Option]:
        group = self.groups[ring]
        for i in range(len(group)):
            for j in range(len(group)):
                if i != j:
                    rest = group[:i] + group[i + 1 :]
                    yield {ring: (*rest[:j], group[i], *rest[j:])}
                if i < j:
                    yield {ring: _with(_with(group, i, group[j]), j, group[i])}

    def exchanges_of(self, ring: int) -> Iterator[Option]:
        """Yield exchanges of nodes between the ring and `PARTNERS` other groups, exposed ones first."""
        common = Counter(self.domains[node] for node in self.groups[ring]).most_common(1)[0][0]

        def promise(index: int) -> tuple[bool, bool, int, int]:
            is_exposed = self.exposed(self.groups[index]) > 0
            return not is_exposed, index not in self.touched, -self.outside(index, common), index

        partners = sorted((index for index in range(ring) if self.outside(index, common)), key=promise)
        for index in partners[:PARTNERS]:
            yield from self.exchanges(ring, index)
            yield from self.recuts(ring, index)

    def recuts(self, ring: int, other: int) -> Iterator[Option]:
        """Yield the options that exchange the whole group `other` with `copies` successive nodes of the ring."""
        group, copies = self.groups[ring], self.copies
        for i in range(len(group)):
            turned = group[i:] + group[:i]
            for j in range(copies):
                guests = self.groups[other][j:] + self.groups[other][:j]
                yield {other: turned[:copies], ring: guests + turned[copies:]}

    def exchanges(self, one: int, other: int) -> Iterator[Option]:
        for i, mine in enumerate(self.groups[one]):
            for j, theirs in enumerate(self.groups[other]):
                if self.domains[mine] != self.domains[theirs]:
                    yield {one: _with(self.groups[one], i, theirs), other: _with(self.groups[other], j, mine)}

    def apply_best(self, options: Sequence[Option]) -> bool:
        """Apply the option that exposes the fewest shards, with the fewest changes. Return False if none helps."""

        def rank(option: Option) -> Rank:
            exposed = sum(self.exposed(group) - self.exposed(self.groups[index]) for index, group in option.items())
            return exposed, sum(
                self.changed(group) - self.changed(self.groups[index]) for index, group in option.items()
            )

        best = min(options, key=rank, default=None)
        if best is None or rank(best)[0] >= 0:
            return False
        self.apply(best)
        return True

    def apply(self, option: Option) -> None:
        for index, group in option.items():
            self.groups[index] = group
            self.touched.add(index)

    def mend_whole_groups(self) -> None:
        exposed = defaultdict[str, list[int]](list)
        for index, group in enumerate(self.groups):
            if len(group) == self.copies and (domain := self.domain_of_all(group)) is not None:
                exposed[domain].append(index)
        if not exposed:
            return
        largest = [(-len(indexes), domain) for domain, indexes in exposed.items()]
        heapify(largest)
        # Exposed groups of different domains exchange with each other first. The rest borrow.
        while len(largest) > 1:
            pair = [heappop(largest)[1] for _ in range(2)]
            self.apply(next(self.exchanges(*(exposed[domain].pop() for domain in pair))))
            for domain in pair:
                if exposed[domain]:
                    heappush(largest, (-len(exposed[domain]), domain))
        if largest:
            domain = largest[0][1]
            self.borrow(exposed[domain], domain)

    def borrow(self, exposed: Sequence[int], domain: str) -> None:
        """Exchange one node of each group in `exposed` for a node outside `domain`, which all of them share."""
        spare = {
            index: self.outside(index, domain) - 1
            for index, group in enumerate(self.groups)
            if len(group) == self.copies
        }
        lenders = [index for index, count in spare.items() if count > 0]
        lenders.sort(key=lambda index: (index not in self.touched, -spare[index], index), reverse=True)
        for index in exposed:
            # Every exchange with this lender gives the exposed group a node outside `domain`, and leaves such a node in
            # the lender. All are therefore equally good: try only the first.
            options = [next(self.exchanges(index, lenders[-1]))] if lenders else []
            if self.ring is not None and self.outside(self.ring, domain) > 1:
                options += [*self.exchanges(index, self.ring), *self.recuts(self.ring, index)]
            self.apply_best(options)
            while lenders and self.outside(lenders[-1], domain) < 2:
                lenders.pop()


def _with(group: Group, position: int, node: int) -> Group:
    return (*group[:position], node, *group[position + 1 :])
