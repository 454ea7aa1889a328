"""Bugs that the simulation must find, each in one function of the product.

Each entry of `BUGS` is a context manager under which the product has the bug. `STORIES` in `stories/planted.jsonl` has
a short story that finds it. A bug without such a story is a hole in the simulation (docs/known-limits.md).

    python -m tests.sim.planted          finds each bug with fresh seeds, and prints how long that took
    python -m tests.sim.planted NAME     finds one bug, and prints a shortened story
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any, Final
from unittest.mock import patch

import msgspec

from control_plane.core import accounting, elastic, fleets, placement, recovery, witnesses
from control_plane.core.job import ending, view
from control_plane.core.observed.jobs import Exclusion
from control_plane.core.observed.nodes import InstanceCondition, Remedy
from control_plane.core.states import NodeState
from control_plane.loop import fleet_loop, job_loop, observer
from tests.sim.__main__ import failure
from tests.sim.simulation import shrunk, story_of
from tests.sim.story import Story

TABLE: Final = vars(fleets)["_Table"]
Bug = Callable[[], AbstractContextManager[Any]]
BUGS: Final[dict[str, Bug]] = {}
MOST_STORIES: Final = 40
"""Number of stories in which a bug must be found."""


def bug(target: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a bug: a function that gets the real function and its arguments, and replaces it."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(target, name)

        @wraps(real)
        def planted(*args: Any, **kwargs: Any) -> Any:
            return wrong(real, *args, **kwargs)

        BUGS[wrong.__name__] = lambda: patch.object(target, name, planted)
        return wrong

    return register


@bug(TABLE, "replace_within_limit")
def disabled_limit(real: Any, table: Any, *, is_frozen: bool) -> None:
    """The hourly limit of replacements has no effect."""
    for row in table.waiting():
        table.rows[row.node_id] = replace(row, replaced_at=table.now)


@bug(recovery, "is_on_path")
def other_branch(real: Any, *values: Any) -> bool:
    """A restore takes slots of a branch that the job has left."""
    return True


@bug(recovery, "_usable_slots")
def older_step(real: Any, survey: Any) -> Any:
    """A restore ignores the newest step that the nodes have."""
    slots = real(survey)
    newest = max((slot.step for _, slot in slots), default=0)
    return [(node, slot) for node, slot in slots if slot.step < newest]


@bug(placement, "plan")
def one_domain(real: Any, nodes: Any, copies: Any, domains: Any = None, before: Any = ()) -> Any:
    """The placement ignores failure domains."""
    return real(nodes, copies, None, before)


@bug(placement, "plan")
def moving_groups(real: Any, nodes: Any, copies: Any, domains: Any = None, before: Any = ()) -> Any:
    """Each generation has new groups, so surviving nodes lose the shards that they hold."""
    return real(nodes[1:] + nodes[:1] if before else nodes, copies, domains, ())


@bug(view, "judge")
def silence_by_wall_clock(real: Any, node: Any, *, silence: Any, now: float, **others: Any) -> Any:
    """The age of a silence is a difference of Unix times, which a step of the clock changes."""
    node = replace(node, silent_seconds=now - silence.since) if silence is not None else node
    return real(node, silence=silence, now=now, **others)


# A job that gives up a node on the evidence of silence alone has it terminated.
BUGS["silence_is_proof"] = lambda: patch.object(Exclusion, "is_to", Remedy.REPLACE)


@bug(observer, "resolve_absence")
def aws_alone(real: Any, condition: Any, **others: Any) -> Any:
    """An instance that AWS omits or reports as ended has ended, even if its agent answers."""
    is_there = condition in (InstanceCondition.PRESENT, InstanceCondition.UNKNOWN)
    return real(condition, **others) if is_there else InstanceCondition.ENDED


@bug(fleet_loop, "decide")
def fleet_acts_in_a_pause(real: Any, now: float, spec: Any, observed: Any, policy: Any) -> Any:
    """A pause of all automatic actions does not stop the fleet."""
    return real(now, spec, observed, replace(policy, pause=""))


@bug(job_loop, "decide")
def job_acts_in_a_pause(real: Any, now: float, spec: Any, observed: Any, policy: Any) -> Any:
    """A pause of all automatic actions does not stop the jobs."""
    return real(now, spec, observed, replace(policy, pause=""))


@bug(accounting, "settle")
def lost_span(real: Any, record: Any) -> Any:
    """A settled span of the ledger is not stored."""
    after, spans = real(record)
    return after, spans[1:]


@bug(accounting, "charge")
def double_charge(real: Any, record: Any, now: float, *args: Any, **kwargs: Any) -> Any:
    """Each charge starts a tenth of a second before the end of the one before."""
    after = real(record, now, *args, **kwargs)
    spent = dict(after.microseconds)
    for name in list(spent)[:1]:
        spent[name] += 1
    return replace(after, microseconds=spent)


@bug(fleets, "_releases")
def no_release(real: Any, *args: Any) -> list[Any]:
    """No node is released from its job."""
    return []


@bug(witnesses, "refused")
def one_witness(real: Any, reads: Any, checkpoints: Any) -> Any:
    """One reader is enough to refuse a state."""
    return tuple(dict.fromkeys(read.source for read in reads))


@bug(elastic, "is_settled")
def no_growth(real: Any, record: Any) -> bool:
    """A job that has become smaller never counts as settled."""
    return False


@bug(ending, "_awaits_manifest")
def early_end(real: Any, *args: Any, **kwargs: Any) -> bool:
    """A job ends, pauses or leaves before its last checkpoint is complete."""
    return False


@bug(TABLE, "waiting")
def never_replaced(real: Any, table: Any) -> list[Any]:
    """A lost node is not replaced."""
    return []


@bug(TABLE, "follow_jobs")
def node_ends_under_a_job(real: Any, table: Any, policy: Any) -> None:
    """The fleet forgets that a job has a node."""
    real(table, policy)
    for row in list(table.rows.values())[:1]:
        if row.state is NodeState.ASSIGNED and table.now % 60 < 1:
            table.rows[row.node_id] = replace(row, state=NodeState.SPARE, run=None)


@bug(recovery, "_keep")
def overwritten_base(real: Any, survey: Any, node: Any, base: Any, **others: Any) -> Any:
    """Nodes may overwrite the slots from which the others load."""
    return ()


@bug(observer, "merged")
def forgotten_notices(real: Any, notices: Any) -> tuple[Any, ...]:
    """Announcements of AWS are ignored until the instance ends."""
    return ()


@bug(fleets, "_needed")
def no_spares(real: Any, spec: Any, seen: Any, table: Any) -> int:
    """The fleet asks for fewer nodes than its jobs need."""
    return int(real(spec, seen, table)) - 1


def found(name: str, first: int) -> tuple[int, Story] | None:
    """Return the number of stories from seed `first` on until a bug is found, and the story that finds it."""
    with BUGS[name]():
        for count in range(MOST_STORIES):
            story = story_of(first + count)
            if failure(story):
                return count + 1, story
    return None


def main() -> int:
    """Find the bugs that the arguments name, or all. Return 1 if one was not found."""
    logging.lastResort = None
    first = random.SystemRandom().randrange(1 << 30)
    print(f"from seed {first}")
    missing = 0
    for name in sys.argv[1:] or BUGS:
        begun = time.monotonic()
        result = found(name, first)
        seconds = time.monotonic() - begun
        if result is None:
            missing += 1
            print(f"{name}: not found in {MOST_STORIES} stories, {seconds:.0f} s", flush=True)
            continue
        with BUGS[name]():
            rule = failure(result[1])
            short = shrunk(result[1], lambda other: bool(failure(other)), limit=60)
        print(f"{name}: story {result[0]}, {seconds:.0f} s: {rule[:120]}", flush=True)
        line = msgspec.json.encode({"bug": name, "story": short}).decode()
        print(f"  {line}", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
