"""Computes the rows and tables of uploads during training and loads from memory. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.durable.loads import MOVED, SAME, Layout, Load, needed_bytes
from benchmarks.durable.transfer import MIB
from benchmarks.durable.uploads import DCP, EVERSTEP, FLOOR, UploadBlock, added_wait, compared_count, slowdown_ratio
from benchmarks.measures import Verdict, bootstrap_interval
from benchmarks.rows import Row, number, table

MOST_SLOWDOWN, MOST_BLOCKED = 0.25, 0.1
"""Limits of an Everstep checkpoint, relative to DCP's: slowdown and waits; blocked time."""
MOST_OF_SAME = 2.0
"""Limit of the load time by another number of ranks, relative to the same number, plus the transfer of missing bytes.
"""
UPLOAD_NAMES = {FLOOR: "no checkpoint", EVERSTEP: "Everstep", DCP: "`async_save`"}


def upload_rows(blocks: Sequence[UploadBlock]) -> list[Row]:
    """Return the rows of training during an upload, relative to DCP."""
    if not blocks:
        return []
    own = [block for block in blocks if block.system == EVERSTEP]
    other = [block for block in blocks if block.system == DCP]
    return [
        _compared("slowdown of training during an upload, Everstep ÷ DCP's `async_save`", slowdown_ratio, own, other),
        _compared(
            "time that an upload makes the training thread wait, Everstep ÷ DCP's `async_save`", added_wait, own, other
        ),
        Row(
            what="time that a checkpoint blocks training, Everstep ÷ DCP's `async_save`",
            value=_median(own, "save_seconds") / _median(other, "save_seconds"),
            n=len(own),
            limit=MOST_BLOCKED,
        ).judged(),
    ]


def _compared(
    what: str,
    cost: Callable[[Sequence[UploadBlock], int], float],
    own: Sequence[UploadBlock],
    other: Sequence[UploadBlock],
) -> Row:
    """Return the row of a cost, by Everstep relative to DCP, with its 95 % interval.

    `cost` receives blocks of one system, and the number of steps that count as during the upload.
    """
    count = compared_count([*own, *other])

    def ratio(samples: Sequence[Sequence[UploadBlock]]) -> float:
        mine, theirs = (cost(blocks, count) for blocks in samples)
        return mine / theirs if theirs > 0 else math.inf

    low, high = bootstrap_interval(ratio, own, other)
    late = [UPLOAD_NAMES[block.system] for block in (*own, *other) if not block.is_whole]
    doubt = ""
    if late:
        doubt = f"an upload took most of its block ({late[0]})"
    elif cost(other, count) <= 0:
        doubt = "`async_save` had no such cost in this run"
    elif low <= MOST_SLOWDOWN < high:
        doubt = "the 95 % interval contains the limit"
    return Row(what=what, value=ratio([own, other]), low=low, high=high, n=len(own), limit=MOST_SLOWDOWN).judged(doubt)


def upload_table(blocks: Sequence[UploadBlock]) -> str:
    """Return the Markdown table of uploads during training, with one line per system."""
    head = (
        "system",
        "blocked, ms",
        "slowdown during the upload",
        "slowdown, 95 % interval",
        "added waits, ms",
        "upload, s",
        "CPU time beside the ranks, s",
    )
    count, body = compared_count(blocks), []
    for system, words in UPLOAD_NAMES.items():
        found = [block for block in blocks if block.system == system]
        low, high = bootstrap_interval(lambda drawn: slowdown_ratio(drawn[0], count), found)
        is_floor = system == FLOOR
        body.append(
            [
                words,
                "" if is_floor else number(1000 * _median(found, "save_seconds")),
                f"{slowdown_ratio(found, count):.1%}",
                f"{low:.1%} to {high:.1%}",
                number(1000 * added_wait(found, count)),
                "" if is_floor else number(_median(found, "upload_seconds")),
                number(_median(found, "cpu_seconds")),
            ]
        )
    return table(head, body)


def usual_step_seconds(blocks: Sequence[UploadBlock]) -> float:
    """Return the median step time without a checkpoint."""
    return statistics.median(step for block in blocks if block.system == FLOOR for step in block.steps)


def load_rows(loads: Sequence[Load]) -> list[Row]:
    """Return one row per number of ranks, except that of the ranks that had saved the state."""
    if not loads:
        return []
    same, moved = _seconds(loads, SAME), _seconds(loads, MOVED)
    state = loads[0].state_bytes
    seconds_per_byte = max(0.0, moved - same) / state
    rows = []
    for layout in dict.fromkeys(load.layout for load in loads):
        if layout.world_size == SAME.world_size:
            continue
        allowed = MOST_OF_SAME * same + needed_bytes(layout, state) * seconds_per_byte
        found = [load for load in loads if load.layout == layout]
        is_equal = all(load.is_equal for load in loads)
        row = Row(
            what=f"load from memory by {layout.world_size} ranks, time ÷ the time allowed",
            value=_seconds(loads, layout) / allowed,
            n=len(found),
            limit=1.0,
            verified=is_equal,
        )
        rows.append(row.judged() if is_equal else replace(row, verdict=Verdict.SHORT, reason="tensors differ"))
    return rows


def load_table(loads: Sequence[Load]) -> str:
    """Return the Markdown table of loads from memory, with one line per number of loading ranks (`Layout`)."""
    head = ("ranks", "seconds, median", "seconds, all", "needed from other nodes, MiB", "fetched, MiB")
    body = []
    for layout in sorted(dict.fromkeys(load.layout for load in loads), key=_order):
        found = [load for load in loads if load.layout == layout]
        words = str(layout.world_size) if layout.has_own else f"{layout.world_size}, each shard on another node"
        body.append(
            [
                words,
                number(_seconds(loads, layout)),
                ", ".join(number(load.seconds) for load in found),
                number(needed_bytes(layout, found[0].state_bytes) / MIB),
                number(statistics.median(load.fetched_bytes for load in found) / MIB),
            ]
        )
    return table(head, body)


def _order(layout: Layout) -> tuple[bool, int, bool]:
    return layout.world_size != SAME.world_size, layout.world_size, not layout.has_own


def _seconds(loads: Sequence[Load], layout: Layout) -> float:
    return statistics.median(load.seconds for load in loads if load.layout == layout)


def _median(blocks: Sequence[UploadBlock], name: str) -> float:
    return statistics.median(getattr(block, name) for block in blocks)
