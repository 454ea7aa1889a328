"""How a model is searched: every interleaving breadth first, long random walks, and a fair schedule that must reach its end."""

from __future__ import annotations

import argparse
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

W = TypeVar("W")
Event = tuple[object, ...]


class Searchable(Protocol[W]):
    """What the searches need of a model."""

    def first(self) -> W: ...
    def moves(self, world: W) -> Iterator[tuple[Event, W]]: ...
    def check(self, world: W) -> None: ...
    def is_done(self, world: W) -> bool: ...


class Found(AssertionError):
    """A violation, with the events that lead to it."""

    def __init__(self, what: str, story: Iterable[Event], world: object) -> None:
        lines = "\n  ".join(" ".join(map(str, event)) for event in story)
        super().__init__(f"{what}\n  {lines}\n{world}")
        self.what = what


class Explored(Counter[str]):
    """How often each kind of event was followed, and how many states there were."""

    states = 0


def every_interleaving(model: Searchable[W], *, limit: int = 2_000_000) -> Explored:
    """Visit every reachable state.

    Raises:
        Found: a state or a move violates an invariant, or nothing can happen before the end.
    """
    first = model.first()
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
    """Follow one random path of at most `length` events. The kind of event is drawn first, by its weight (1 unless given), then the event.

    Args:
        model: whose moves.
        rng: seeded by the caller, who prints the seed.
        length: events at most.
        weights: by kind; a kind of weight 0 is not followed.
        until: ends the walk.
        is_checked: the model's invariant is checked in every state.

    Raises:
        Found: on the way.
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
        event, world = rng.choices(moves, [weights.get(str(move[0]), 1.0) / kinds[str(move[0])] for move, _ in moves])[0]
        story.append(event)
        seen[str(event[0])] += 1
    seen.states = len(story)
    return world, seen


def main(arguments: list[str]) -> int:
    return 0
