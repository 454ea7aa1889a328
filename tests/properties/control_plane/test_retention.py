"""Checkpoints that a job no longer needs are deleted, in random sequences of events.

Each deletion leaves a later verified checkpoint, and the newest one from which the job can be restored.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.checkpoints import CheckpointRetention, KeptCheckpoint, surplus, to_verify

LIMITS = st.builds(
    CheckpointRetention,
    max_count=st.one_of(st.none(), st.integers(1, 4)),
    keep_every_steps=st.one_of(st.none(), st.integers(1, 30)),
    max_age_seconds=st.one_of(st.none(), st.integers(1, 200)),
)
EVENTS = st.one_of(
    st.tuples(st.just("complete"), st.integers(1, 20)),
    st.tuples(st.sampled_from(["verify", "damage", "pin", "unpin"]), st.integers(0, 30)),
    st.tuples(st.just("restore"), st.integers(0, 30)),
    st.tuples(st.just("collect"), st.just(0)),
)


def newest_restorable(kept: list[KeptCheckpoint]) -> KeptCheckpoint | None:
    usable = [each for each in kept if each.is_restorable]
    return max(usable, key=lambda each: (each.step, each.generation), default=None)


@given(LIMITS, st.lists(EVENTS, max_size=60))
def test_a_deletion_always_leaves_what_is_needed(limits: CheckpointRetention, story: list[tuple[str, int]]) -> None:
    """The events complete, verify, damage and pin checkpoints, and restore from older ones, in any order."""
    kept: list[KeptCheckpoint] = []
    generation, step, now = 1, 0, 0.0
    for what, number in story:
        now += 10.0
        match what:
            case "complete":
                step += number
                kept.append(KeptCheckpoint(generation=generation, step=step, completed_at=now))
            case "restore" if kept:
                base = kept[number % len(kept)]
                if base.is_restorable:
                    generation, step = generation + 1, base.step
                    kept = [replace(each, is_restorable=each.is_restorable and each.step <= step) for each in kept]
            case "verify" | "damage" | "pin" | "unpin" if kept:
                place = number % len(kept)
                each = kept[place]
                kept[place] = {
                    "verify": replace(each, is_verified=True),
                    "damage": replace(each, is_verified=False, is_restorable=False),
                    "pin": replace(each, is_needed=True, is_counted=False),
                    "unpin": replace(each, is_needed=False, is_counted=True),
                }[what]
            case _:
                pass
        before = newest_restorable(kept)
        facts = [replace(each, is_needed=each.is_needed or each == before) for each in kept]
        going = surplus(facts, limits, now)
        left = [each for each in kept if each.key not in going]
        assert newest_restorable(left) == before
        assert not kept or max(each.step for each in left) == max(each.step for each in kept)
        if limits.max_age_seconds is None and limits.max_count is not None:
            usable = [sum(each.is_restorable and each.is_counted for each in some) for some in (kept, left)]
            assert usable[1] >= min(limits.max_count, usable[0]), (
                "an unusable checkpoint took the place of a usable one"
            )
        for each in kept:
            if each.key in going:
                assert each.is_counted, "pinned"
                assert any(other.is_verified and other.is_restorable and other.step > each.step for other in left), (
                    "a later verified one is left"
                )
        if what == "collect":
            kept = left
        if (candidate := to_verify(facts, limits, now)) is not None:
            assert before is not None
            assert candidate == before.key
