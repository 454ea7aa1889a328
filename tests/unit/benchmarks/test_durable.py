"""Tests the benchmark of bulk transfers: its limits and its page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from benchmarks.durable import uploads
from benchmarks.durable.jobs import upload_table
from benchmarks.durable.loads import LAYOUTS, MOVED, SAME, Layout, Load, absent_share, needed_bytes
from benchmarks.durable.part_sink import running_part_sink
from benchmarks.durable.readers import READERS, SharedLoadTime
from benchmarks.durable.report import GOALS, NAMES, PAGE, RAW, SYSTEMS, Comparison, Run, Sample, replaced, rows
from benchmarks.durable.transfer import MIB
from benchmarks.durable.uploads import DCP, EVERSTEP, FLOOR, UploadBlock
from benchmarks.durable.writers import WRITERS, SharedUploadTime
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Verdict
from benchmarks.page import render
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
RESTORES = [
    SharedLoadTime(readers=readers, seconds=16.0 / readers + number) for readers in READERS for number in range(3)
]
ADDED = {FLOOR: 0.0, EVERSTEP: 0.2, DCP: 1.0}
"""Seconds by which an upload of each system lengthens the two steps during the upload. Other steps take 0.3 s each."""


def block(system: str, *, added: float, save_seconds: float, usual: float = 0.3) -> UploadBlock:
    return UploadBlock(
        system=system,
        state_bytes=64 * MIB,
        steps=[*[usual + added / 2] * 2, *[usual] * 8],
        waits=[*[0.01 + added / 2] * 2, *[0.01] * 8],
        save_seconds=save_seconds,
        upload_seconds=0.0 if system == FLOOR else 2 * usual + 0.9 * added,
        cpu_seconds=0.1,
    )


BLOCKS = [
    block(system, added=added, save_seconds=0.004 if system == EVERSTEP else 0.1)
    for _ in range(4)
    for system, added in ADDED.items()
]
LOAD_SECONDS = {SAME: 0.1, MOVED: 0.5, LAYOUTS[2]: 0.2, LAYOUTS[3]: 0.3}
LOADS = [
    Load(layout=layout, seconds=seconds, state_bytes=64 * MIB, fetched_bytes=16 * MIB, is_equal=True)
    for layout, seconds in LOAD_SECONDS.items()
    for _ in range(3)
]
RUN = Run(
    machine=MACHINE,
    is_quick=False,
    seconds=100.0,
    samples=samples(),
    comparisons=comparisons(),
    shared=SHARED,
    restores=RESTORES,
    uploads=BLOCKS,
    loads=LOADS,
)


def verdicts(run: Run) -> dict[str, Verdict]:
    return {row.what: row.verdict for row in rows(run)}


def test_every_limit_passes_in_a_good_run() -> None:
    assert set(verdicts(RUN).values()) == {Verdict.PASS}
    assert len(verdicts(RUN)) == 5 + len(GOALS) + 2 + 2 + 3 + 2


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


def test_more_readers_that_save_no_time_fall_short() -> None:
    slow = [replace(each, seconds=16.0) for each in RESTORES]
    found = verdicts(replace(RUN, restores=slow))
    assert [what for what, verdict in found.items() if verdict is Verdict.SHORT] == [
        "load of one shard by 2 nodes, time ÷ that by 1 node",
        "load of one shard by 4 nodes, time ÷ that by 2 nodes",
    ]


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


def short(run: Run) -> set[str]:
    return {what for what, verdict in verdicts(run).items() if verdict is Verdict.SHORT}


ADDS = "slowdown of training during an upload, Everstep ÷ DCP's `async_save`"
WAITS = "time that an upload makes the training thread wait, Everstep ÷ DCP's `async_save`"
BLOCKS_FOR = "time that a checkpoint blocks training, Everstep ÷ DCP's `async_save`"


def with_own(change: Callable[[UploadBlock], UploadBlock]) -> Run:
    """Return the run, with `change` applied to each upload block of Everstep."""
    return replace(RUN, uploads=[change(each) if each.system == EVERSTEP else each for each in BLOCKS])


def test_an_upload_that_slows_training_down_falls_short() -> None:
    assert short(with_own(lambda _: block(EVERSTEP, added=0.24, save_seconds=0.004))) == set()
    assert short(with_own(lambda _: block(EVERSTEP, added=0.26, save_seconds=0.004))) == {ADDS, WAITS}


def test_an_upload_that_makes_training_wait_falls_short() -> None:
    assert short(with_own(lambda each: replace(each, waits=[0.134, 0.134, *[0.01] * 8]))) == set()
    assert short(with_own(lambda each: replace(each, waits=[0.136, 0.136, *[0.01] * 8]))) == {WAITS}


def test_a_snapshot_that_blocks_training_falls_short() -> None:
    assert short(with_own(lambda each: replace(each, save_seconds=0.0099))) == set()
    assert short(with_own(lambda each: replace(each, save_seconds=0.0101))) == {BLOCKS_FOR}


@pytest.mark.parametrize(
    ("blocks", "doubt"),
    [
        ([*BLOCKS, replace(BLOCKS[1], upload_seconds=9.0)], "an upload took most of its block (Everstep)"),
        (
            [each for each in BLOCKS if each.system != DCP] + [block(DCP, added=-0.02, save_seconds=0.1)],
            "`async_save` had no such cost in this run",
        ),
        ([*BLOCKS, block(EVERSTEP, added=0.8, save_seconds=0.004)], "the 95 % interval contains the limit"),
    ],
)
def test_a_slowdown_within_the_noise_has_no_verdict(blocks: Sequence[UploadBlock], doubt: str) -> None:
    (row,) = [row for row in rows(replace(RUN, uploads=blocks)) if row.what == ADDS]
    assert row.verdict is Verdict.INCONCLUSIVE
    assert doubt in row.reason


def test_a_block_takes_its_times_from_the_slowest_rank() -> None:
    def rank(save: float, stored: float) -> dict[str, object]:
        return {
            "system": EVERSTEP,
            "state_bytes": 8,
            "saved_at": 9.5,
            "resumed_at": 10.0,
            "ended_at": [11.0, 13.0, 14.0],
            "save_seconds": save,
            "stored_at": stored,
            "helper_seconds": 0.5,
            "waited": [0.0, 0.5, 0.0],
        }

    found = uploads.of_ranks([rank(0.1, 11.5), rank(0.2, 10.5)])
    assert found.steps == [1.0, 2.0, 1.0]
    assert (found.save_seconds, found.upload_seconds, found.state_bytes, found.cpu_seconds) == (0.2, 2.0, 16, 1.0)
    assert found.slowed_count == 2
    assert found.is_whole
    assert not uploads.of_ranks([rank(0.1, 14.5)]).is_whole


def test_a_slowdown_is_relative_to_the_later_steps_of_the_same_block() -> None:
    slow, fast = (block(EVERSTEP, added=0.2 * usual, save_seconds=0.1, usual=usual) for usual in (0.3, 0.2))
    assert slow.times(2) == pytest.approx((0.66, 0.6))
    assert uploads.slowdown_ratio([slow, fast], 2) == pytest.approx(0.1)
    assert uploads.slowdown_ratio([slow, fast], 4) == pytest.approx(0.05)
    assert slow.slowed_count == 2
    assert replace(slow, save_seconds=0.4).slowed_count == 1, "the first step begins after the blocked time"


def test_all_systems_are_compared_over_the_steps_of_the_longest_uploads() -> None:
    long = [replace(each, upload_seconds=1.9) if each.system == DCP else each for each in BLOCKS]
    assert [uploads.compared_count(blocks) for blocks in (BLOCKS, long)] == [2, 3]
    table = upload_table(long).splitlines()
    assert [line.split(" | ")[2] for line in table[2:]] == ["0.0%", "22.2%", "111.1%"]
    assert uploads.compared_count([replace(each, upload_seconds=99.0) for each in BLOCKS]) == 9


def test_the_server_of_the_uploads_discards_parts_and_keeps_small_objects() -> None:
    with running_part_sink(1e9) as environment:
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="any",
            aws_secret_access_key="any",
            region_name="us-east-1",
        )
        with closing(client):
            client.upload_fileobj(io.BytesIO(bytes(20 * MIB)), "bench", "a/large")
            client.put_object(Bucket="bench", Key="a/b small", Body=b"small")
            client.copy_object(Bucket="bench", Key="a/c", CopySource={"Bucket": "bench", "Key": "a/b small"})
            client.delete_object(Bucket="bench", Key="a/b small")
            keys = [each["Key"] for each in client.list_objects_v2(Bucket="bench", Prefix="a/")["Contents"]]
            assert keys == ["a/c", "a/large"]
            assert client.get_object(Bucket="bench", Key="a/c")["Body"].read() == b"small"
            assert client.get_object(Bucket="bench", Key="a/large")["Body"].read() == b""
            with pytest.raises(client.exceptions.NoSuchKey):
                client.get_object(Bucket="bench", Key="a/b small")
            with pytest.raises(ClientError, match="501"):
                client.delete_objects(Bucket="bench", Delete={"Objects": [{"Key": "a/c"}]})


def test_ranks_need_the_part_of_the_state_that_their_node_lacks() -> None:
    # Rank 1 of 3 needs the second third. Its node holds the first half.
    assert absent_share(3, 1, {0, 1}) == pytest.approx(2 / 3 - 1 / 2)
    assert absent_share(4, 2, {2, 3}) == 0.0
    assert absent_share(6, 4, set()) == pytest.approx(1 / 6)
    assert needed_bytes(SAME, 1200) == 0.0
    assert needed_bytes(MOVED, 1200) == pytest.approx(1200)
    assert needed_bytes(Layout(world_size=3), 1200) == pytest.approx(200)
    # Four ranks made the state: shards of 300 bytes, and nodes 2k and 2k + 1 hold each other's shards. Of six ranks,
    # each needs 200 bytes. Rank 2 needs the last two thirds of shard 1, which its node lacks. The nodes of ranks 4 and
    # 5 are new.
    assert needed_bytes(Layout(world_size=6), 1200) == pytest.approx(200 + 200 + 200)


@pytest.mark.parametrize(
    ("layout", "allowed"),
    [(LAYOUTS[2], 2 * 0.1 + 0.4 / 6), (LAYOUTS[3], 2 * 0.1 + 0.4 / 2)],
)
def test_a_load_that_takes_longer_than_allowed_falls_short(layout: Layout, allowed: float) -> None:
    def changed(seconds: float) -> Run:
        return replace(RUN, loads=[replace(each, seconds=seconds) if each.layout == layout else each for each in LOADS])

    assert short(changed(allowed - 0.001)) == set()
    what = f"load from memory by {layout.world_size} ranks, time ÷ the time allowed"
    assert short(changed(allowed + 0.001)) == {what}


def test_a_load_of_other_tensors_falls_short_on_a_busy_machine_too() -> None:
    wrong = [replace(LOADS[0], is_equal=False), *LOADS[1:]]
    busy = replace(RUN, machine=replace(RUN.machine, load_average=(99.0, 99.0, 99.0)), loads=wrong)
    assert len(short(busy)) == 2


def test_a_part_can_be_measured_again_on_the_same_revision() -> None:
    loads = [replace(each, seconds=0.1) for each in LOADS]
    later = Run(
        machine=replace(MACHINE, load_average=(0.1, 0.2, 0.3)), is_quick=False, seconds=20.0, samples=(), loads=loads
    )
    whole = replaced(RUN, later, ["loads"])
    assert whole == replace(RUN, loads=loads, seconds=120.0, remeasured=["loads"])
    assert "`loads`" in render(PAGE, whole)
    assert "measured these parts again" not in render(PAGE, RUN)
    assert replaced(whole, replace(later, uploads=BLOCKS), ["uploads"]).remeasured == ["loads", "uploads"]


@pytest.mark.parametrize(
    "change",
    [
        {"machine": replace(MACHINE, revision="other")},
        {"machine": replace(MACHINE, load_average=(99.0, 0.0, 0.0))},
        {"is_quick": True},
    ],
)
def test_a_run_that_does_not_fit_replaces_no_part(change: dict[str, Any]) -> None:
    for before, found in ((RUN, replace(RUN, **change)), (replace(RUN, **change), RUN)):
        with pytest.raises(BenchmarkFailed, match="measure all parts"):
            replaced(before, found, ["loads"])


def test_the_page_has_a_section_for_each_part_that_was_measured() -> None:
    page = render(PAGE, RUN)
    sections = ("Training while a checkpoint is stored", "Loads by other numbers of ranks")
    assert all(f"## {title}" in page for title in sections)
    parts = ("samples", "comparisons", "shared", "restores", "uploads", "loads")
    empty = replace(RUN, **dict.fromkeys(parts, ()))
    others = ("Loads and exports", "Uploads", "Downloads")
    assert not any(f"## {title}" in render(PAGE, empty) for title in (*sections, *others))
    assert rows(empty) == []
