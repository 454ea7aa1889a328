"""The benchmark of bulk transfers: its limits and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.durable.report import GOALS, NAMES, RAW, SYSTEMS, Comparison, Run, Sample, rows
from benchmarks.durable.transfer import MIB
from benchmarks.durable.writers import WRITERS, SharedUploadTime
from benchmarks.measures import Verdict
from tests.unit.benchmarks.machine import MACHINE

SECONDS = {"boto3": 1.0, "awscrt": 1.4, "obstore": 0.9, "everstep": 1.1}


def samples(*, round_count: int = 3) -> Sequence[Sample]:
    return [
        Sample(
            server="SeaweedFS",
            client=client,
            is_upload=is_upload,
            bytes=64 * MIB,
            seconds=SECONDS[client] + 0.01 * number,
            cpu_seconds=0.2,
            extra_bytes=4 * MIB,
            is_intact=True,
        )
        for is_upload in (True, False)
        for client in NAMES
        for number in range(round_count)
    ]


def comparisons() -> Sequence[Comparison]:
    """Return measurements in which Everstep takes 0.9 s and each other system 1 s."""
    return [
        Comparison(name=name, system=system, mib=64, seconds=0.9 if system == "everstep" else 1.0, is_equal=True)
        for name, systems in SYSTEMS.items()
        for system in systems
    ]


SHARED = [
    SharedUploadTime(writers=writers, seconds=16.0 / writers + number) for writers in WRITERS for number in range(3)
]
RUN = Run(machine=MACHINE, is_quick=False, seconds=100.0, samples=samples(), comparisons=comparisons(), shared=SHARED)


def verdicts(run: Run) -> dict[str, Verdict]:
    return {row.what: row.verdict for row in rows(run)}


def test_every_limit_passes_in_a_good_run() -> None:
    assert set(verdicts(RUN).values()) == {Verdict.PASS}
    assert len(verdicts(RUN)) == 5 + len(GOALS) + 2


@pytest.mark.parametrize(("operation", "limit"), [("load", 1.5), ("copy", 1.25), ("export", 1.0)])
def test_a_slow_load_or_export_falls_short_of_its_goal(operation: str, limit: float) -> None:
    def short(seconds: float) -> set[str]:
        changed = [
            replace(each, seconds=seconds) if (each.name, each.system) == (operation, "everstep") else each
            for each in RUN.comparisons
        ]
        found = verdicts(replace(RUN, comparisons=changed))
        return {what for what, verdict in found.items() if verdict is Verdict.SHORT}

    assert short(limit) == set()
    assert short(limit + 0.01) == {what for (name, _), (what, _) in GOALS.items() if name == operation}


@pytest.mark.parametrize(
    ("writers", "which"), [(2, "2 nodes, time ÷ that by 1 node"), (4, "4 nodes, time ÷ that by 2 nodes")]
)
def test_more_writers_that_save_no_time_fall_short(writers: int, which: str) -> None:
    slow = [replace(each, seconds=each.seconds * writers) if each.writers >= writers else each for each in SHARED]
    found = verdicts(replace(RUN, shared=slow))
    assert [what for what, verdict in found.items() if verdict is Verdict.SHORT] == [f"upload of one shard by {which}"]


def test_a_result_with_other_tensors_falls_short_on_a_busy_machine_too() -> None:
    changed = [replace(each, is_equal=each.system != "zero_to_fp32") for each in RUN.comparisons]
    busy = replace(RUN, machine=replace(RUN.machine, load_average=(99.0, 99.0, 99.0)), comparisons=changed)
    found = {what: verdict for what, verdict in verdicts(busy).items() if verdict is Verdict.SHORT}
    assert list(found) == [GOALS["export", "zero_to_fp32"][0]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seconds": 1.5}, "upload of 64 MiB, throughput ÷ that of boto3 with s3transfer"),
        ({"extra_bytes": 65 * MIB}, "upload of 64 MiB, extra memory"),
    ],
)
def test_a_slow_or_large_upload_falls_short(change: dict[str, float], what: str) -> None:
    changed = [
        replace(sample, **change) if sample.client == "everstep" and sample.is_upload else sample
        for sample in RUN.samples
    ]
    found = verdicts(replace(RUN, samples=changed))
    assert [name for name, verdict in found.items() if verdict is not Verdict.PASS] == [what]
    assert found[what] is Verdict.SHORT


def test_a_download_with_other_bytes_falls_short_even_on_a_busy_machine() -> None:
    first, *others = [sample for sample in RUN.samples if not sample.is_upload and sample.client == RAW]
    kept = [sample for sample in RUN.samples if sample is not first]
    busy = replace(MACHINE, load_average=(9.0, 9.0, 9.0))
    found = verdicts(replace(RUN, machine=busy, samples=[*kept, replace(first, is_intact=False)]))
    assert others
    assert found["downloads with other bytes than the upload"] is Verdict.SHORT
