"""Searches the states of a model: all interleavings breadth first, random walks, and scenarios that run to an end."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

W = TypeVar("W")
Event = tuple[object, ...]


class Searchable(Protocol[W]):
    """The methods of a model that the searches of this module call."""

    def first(self) -> W: ...
    def moves(self, world: W) -> Iterator[tuple[Event, W]]: ...
    def check(self, world: W) -> None: ...
    def is_done(self, world: W) -> bool: ...


class Found(AssertionError):
    """A search found a violated invariant. The message lists the events that lead to the violation."""

    def __init__(self, what: str, story: Iterable[Event], world: object) -> None:
        lines = "\n  ".join(" ".join(map(str, event)) for event in story)
        super().__init__(f"{what}\n  {lines}\n{world}")
        self.what = what


class Explored(Counter[str]):
    """Number of visited states, and how often each kind of event occurred."""

    states = 0


def every_interleaving(model: Searchable[W], *, limit: int = 2_000_000, must_end: bool = False) -> Explored:
    """Visit every reachable state.

    Args:
        model: the model to explore.
        limit: most states to visit; a larger exploration fails, because it takes too long.
        must_end: True also requires that the end can be reached from every state, so that no process waits forever.

    Returns:
        The counts of states and events.

    Raises:
        Found: a state or a move violates an invariant, or no event is possible before the end.
    """
    first = model.first()
    before: defaultdict[W, list[W]] = defaultdict(list)
    parents: dict[W, tuple[W, Event] | None] = {first: None}
    queue, seen = deque([first]), Explored()

    def story(world: W, *last: Event) -> list[Event]:
        events = list(last)
        while (parent := parents[world]) is not None:
            world, event = parent
            events.append(event)
        return events[::-1]

    while queue:
        world = queue.popleft()
        move: Event = ()
        has_moves = False
        try:
            model.check(world)
            for move, after in model.moves(world):
                has_moves = True
                seen[str(move[0])] += 1
                if must_end:
                    before[after].append(world)
                if after not in parents:
                    parents[after] = (world, move)
                    queue.append(after)
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}", story(world), world) from error
        if not has_moves and not model.is_done(world):
            raise Found("nothing can happen any more", story(world), world)
        if len(parents) > limit:
            raise Found(f"more than {limit} states", (), "")
    seen.states = len(parents)
    if must_end:
        ending = {world for world in parents if model.is_done(world)}
        rest = deque(ending)
        while rest:
            for earlier in before[rest.popleft()]:
                if earlier not in ending:
                    ending.add(earlier)
                    rest.append(earlier)
        stuck = next((world for world in parents if world not in ending), None)
        if stuck is not None:
            raise Found("the end cannot be reached any more", story(stuck), stuck)
    return seen


def walk(
    model: Searchable[W],
    rng: random.Random,
    length: int,
    *,
    weights: Mapping[str, float],
    until: Callable[[W], bool] = lambda world: False,
    is_checked: bool = True,
) -> tuple[W, Explored]:
    """Follow one random path of at most `length` events.

    The walk first draws the kind of the next event by weight, then an event of this kind.

    Args:
        model: the model to explore.
        rng: seeded by the caller, which prints the seed.
        length: most events of the walk.
        weights: weight of each kind of event, 1 by default; kinds with weight 0 never occur.
        until: predicate that ends the walk.
        is_checked: True checks the model's invariant in every state.

    Raises:
        Found: an event or a state violates an invariant.
    """
    world, story, seen = model.first(), [], Explored()
    for _ in range(length):
        if until(world):
            break
        try:
            if is_checked:
                model.check(world)
            moves = [move for move in model.moves(world) if weights.get(str(move[0][0]), 1.0)]
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}", story, world) from error
        if not moves:
            if not model.is_done(world):
                raise Found("nothing can happen any more", story, world)
            break
        kinds = Counter(str(move[0]) for move, _ in moves)
        event, world = rng.choices(moves, [weights.get(str(move[0]), 1.0) / kinds[str(move[0])] for move, _ in moves])[
            0
        ]
        story.append(event)
        seen[str(event[0])] += 1
    seen.states = len(story)
    return world, seen


class Driver(Generic[W]):
    """Drives a model along a scenario.

    The scenario triggers its own events explicitly. All other events occur in a fair random order between them.
    """

    def __init__(self, model: Searchable[W], *, seed: int = 0, weights: Mapping[str, float]) -> None:
        """Start at the model's first state.

        Args:
            model: the model to drive; its budget of faults also limits the scenario.
            seed: seed of the random order between the scenario's events.
            weights: weight of each kind of event; kinds that the scenario triggers have weight 0.
        """
        self.model = model
        self.world = model.first()
        self.seen = Explored()
        self._story: list[Event] = []
        self._rng = random.Random(seed)
        self._weights = weights

    def until(
        self,
        reached: Callable[[W], bool],
        *,
        without: Callable[[Event], bool] = lambda event: False,
        limit: int = 20_000,
    ) -> None:
        """Run random events until `reached` returns True.

        Args:
            reached: predicate that ends the run.
            without: events that must not occur during the run.
            limit: most events; a longer run fails.

        Raises:
            Found: an invariant is violated, or `reached` stays False within the limit.
        """
        for _ in range(limit):
            if reached(self.world):
                return
            moves = [move for move in self._moves() if self._weights.get(str(move[0][0]), 1.0) and not without(move[0])]
            if not moves:
                break
            kinds = Counter(str(move[0]) for move, _ in moves)
            weights = [self._weights.get(str(move[0]), 1.0) / kinds[str(move[0])] for move, _ in moves]
            self._follow(*self._rng.choices(moves, weights)[0])
        raise Found("the end is not reached", self._story, self.world)

    def do(self, *event: object) -> None:
        """Execute the first possible event whose name starts with the given prefix.

        Raises `Found` if no such event is possible or if its result violates an invariant: the protocol has a defect.
        """
        for move, after in self._moves():
            if move[: len(event)] == event:
                self._follow(move, after)
                return
        raise Found(f"{event} cannot happen", self._story, self.world)

    def can(self, *event: object) -> bool:
        """Return whether an event with this prefix is possible now."""
        return any(move[: len(event)] == event for move, _ in self._moves())

    def _moves(self) -> list[tuple[Event, W]]:
        try:
            return list(self.model.moves(self.world))
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}", self._story, self.world) from error

    def _follow(self, event: Event, world: W) -> None:
        self.world = world
        self.seen[str(event[0])] += 1
        self._story.append(event)
        try:
            self.model.check(world)
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}", self._story, world) from error
