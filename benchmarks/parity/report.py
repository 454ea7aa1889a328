"""Computes the table rows, verdicts and page of the parity benchmark. The functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.measures import Verdict
from benchmarks.page import BenchmarkRun, Page
from benchmarks.parity.group import MEMBERS, SLOTS, GroupTimes
from benchmarks.parity.xor import GIB, XorTime
from benchmarks.rows import Row, limits, number, table, without_verdicts

MOST_MEMORY = 2.8
"""Bytes of slots per byte of state with four nodes; 4 with two copies."""
MOST_SENT = 1.01
"""Sent bytes per byte of state; 1 with two copies."""
MOST_SLOWER = 2.0
"""Time from the last seal to the last vote, relative to two copies."""
MIB = 1 << 20
NAMES = {False: "two copies", True: f"parity, group of {MEMBERS}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the parity benchmark."""

    groups: Sequence[GroupTimes]
    """Two copies and parity in turn, with shards of one size."""
    xors: Sequence[XorTime]


def rows(run: Run) -> list[Row]:
    """Return the rows of memory, network traffic, time, and wrong bytes in restored shards."""
    parity, copies = _of(run, True), _of(run, False)
    wrong = sum(not each.is_equal for each in run.groups)
    timed = [
        Row(
            what="from the last seal to the last vote, time ÷ that of two copies",
            value=_median(parity, lambda each: each.step_seconds) / _median(copies, lambda each: each.step_seconds),
            n=len(parity),
            limit=MOST_SLOWER,
        ).judged()
    ]
    return [
        Row(
            what=f"memory of all slots ÷ state, group of {MEMBERS}",
            value=max(each.memory_ratio for each in parity),
            n=len(parity),
            limit=MOST_MEMORY,
        ).judged(),
        Row(
            what="bytes sent per step ÷ state",
            value=max(each.sent_ratio for each in parity),
            n=len(parity),
            limit=MOST_SENT,
        ).judged(),
        *(without_verdicts(timed) if run.is_busy else timed),
        Row(
            what="restored shards with other bytes than the lost shard",
            value=wrong,
            n=len(run.groups),
            limit=0,
            verified=not wrong,
            verdict=Verdict.SHORT if wrong else Verdict.PASS,
        ),
    ]


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    return {
        "machine": run.machine.words(),
        "members": str(MEMBERS),
        "slots": str(SLOTS),
        "state": f"{run.groups[0].state_bytes // MIB} MiB",
        "steps": str(len(run.groups[0].step_seconds)),
        "groups": str(len(_of(run, True))),
        "limits": limits(rows(run)),
        "costs": _costs(run),
        "xors": table(
            ("operation", "ms per GiB, median", "ms per GiB, fastest"),
            [
                [
                    each.name,
                    number(statistics.median(each.seconds_per_gib) * 1000),
                    number(min(each.seconds_per_gib) * 1000),
                ]
                for each in run.xors
            ],
        ),
    }


def _costs(run: Run) -> str:
    head = (
        "protection",
        "memory ÷ state",
        "sent per step ÷ state",
        "seal to votes, ms",
        "CPU, ms per GiB of state",
        "restore of a lost shard, ms",
    )
    body = [
        [
            words,
            number(max(each.memory_ratio for each in found)),
            number(max(each.sent_ratio for each in found)),
            number(_median(found, lambda each: each.step_seconds) * 1000),
            number(_median(found, lambda each: each.cpu_seconds) * 1000 * GIB / (MEMBERS * run.groups[0].state_bytes)),
            number(statistics.median(each.restore_seconds for each in found) * 1000),
        ]
        for has_parity, words in NAMES.items()
        if (found := _of(run, has_parity))
    ]
    return table(head, body)


def _of(run: Run, has_parity: bool) -> list[GroupTimes]:
    return [each for each in run.groups if each.has_parity is has_parity]


def _median(groups: Sequence[GroupTimes], values_of: Callable[[GroupTimes], Sequence[float]]) -> float:
    return statistics.median(value for each in groups for value in values_of(each))


PAGE = Page(name="parity", command="make bench-parity", run=Run, values=values, rows=rows)
