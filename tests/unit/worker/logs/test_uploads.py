"""Tests how an agent uploads the lines that ranks print."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.agent_messages import LogLines
from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation, Rank
from everstep.protocol.log_chunks import LINE_BYTES, LINE_MEMORY, LogLine, decode_chunk, decode_lines
from tests.unit.worker.logs.bench import RUN, Bench
from tests.unit.worker.logs.test_journal import files_end_at
from worker.logs.journal import JournalLimits
from worker.logs.uploads import LIVE_LINES, LogShipper, ShipperOptions, batches


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def shipper(
    bench: Bench, on_trouble: Callable[[OSError], object] | None = None, **options: Any
) -> tuple[LogShipper, list[LogLines]]:
    """Return a shipper that has not started, and the list of the lines that it forwards."""
    passed: list[LogLines] = []
    made = LogShipper(
        bench.state,
        bench.objects,
        bench.plan,
        bench.here,
        now=lambda: 1.0,
        live=passed.append,
        on_trouble=on_trouble,
        options=ShipperOptions(**options),
    )
    return made, passed


def texts(rows: tuple[bytes, ...]) -> list[str]:
    return [line.text for line in decode_lines(b"".join(rows))]


async def test_peers_get_every_line_that_is_printed_by_now(bench: Bench) -> None:
    ships, passed = shipper(bench, journal=JournalLimits(read_bytes=16))
    bench.files(0).stdout.write_text("".join(f"line {number}\n" for number in range(20)) + "half a li")
    bench.files(1).stderr.write_text("warning\n")
    tail = await ships.printed(0)
    assert (tail.first, sorted(texts(tail.rows))) == (
        0,
        sorted([*(f"line {number}" for number in range(20)), "warning"]),
    )
    assert sum(len(lines.lines) for lines in passed) == 21, "who follows gets them, too"
    assert (await ships.printed(19)).first == 19
    assert (await ships.printed(21)).rows == ()
    with bench.files(0).stdout.open("a") as stream:
        stream.write("ne\n")
    assert texts((await ships.printed(21)).rows) == ["half a line"]


async def test_peers_get_lines_that_an_earlier_agent_has_read(bench: Bench) -> None:
    before, _ = shipper(bench)
    bench.files(0).stdout.write_text("one\ntwo\n")
    await before.printed(0)
    bench.files(0).stdout.write_text("one\ntwo\nthree\n")
    after, _ = shipper(bench)
    assert texts((await after.printed(0)).rows) == ["one", "two", "three"]


async def test_peers_get_the_newest_lines_of_many(bench: Bench) -> None:
    ships, _ = shipper(bench, tail_bytes=200)
    bench.files(0).stdout.write_text("".join(f"line {number}\n" for number in range(100)))
    tail = await ships.printed(0)
    assert tail.end == 100
    assert texts(tail.rows) == [f"line {number}" for number in range(tail.first, 100)]
    assert 0 < tail.size <= 200 * 2


async def test_a_disk_that_takes_no_lines_holds_up_no_step(bench: Bench) -> None:
    ships, _ = shipper(bench)
    bench.files(0).stdout.write_text("one\n")
    with files_end_at(0):
        assert (await ships.printed(0)).rows == ()
    assert texts((await ships.printed(0)).rows) == ["one"]


async def test_who_begins_to_follow_is_given_the_newest_lines_once_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ships, passed = shipper(bench)
    bench.files(0).stdout.write_text("one\ntwo\n")
    await ships.printed(0)
    bench.files(0).stdout.write_text("one\ntwo\nthree\n")
    await ships.printed(0)
    before = list(passed)
    assert [(lines.first, [line.text for line in lines.lines]) for lines in before] == [
        (0, ["one", "two"]),
        (2, ["three"]),
    ]
    ships.show_recent()
    assert passed == before * 2


async def test_lines_that_the_disk_does_not_take_at_first_are_shipped_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    failures: asyncio.Queue[OSError] = asyncio.Queue()
    ships, passed = shipper(bench, failures.put_nowait)
    bench.files(0).stdout.write_text("one\ntwo\n")
    with files_end_at(0):
        ships.begin()
        for _ in range(3):
            await failures.get()
    assert passed == []
    assert await ships.finish() == ()
    assert [line.text for lines in passed for line in lines.lines] == ["one", "two", ""]
    assert b'"two"' in b"".join(data for key, data in bench.stored.items() if key.endswith(".jsonl"))
    assert len([record for record in caplog.records if "cannot be written to disk yet" in record.message]) == 1


async def test_lines_that_the_disk_never_takes_are_told_to_be_missing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ships, _ = shipper(bench, retry_seconds=0.0)
    bench.files(0).stdout.write_text("one\n")
    await ships.printed(0)
    with files_end_at(0):
        (missing,) = await ships.finish()
    assert "File too large" in missing
    assert any(b'"one"' in data for data in bench.stored.values()), "what was kept is shipped"


async def test_what_ranks_print_last_is_kept_where_the_journal_has_no_room_for_all_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ships, passed = shipper(bench, journal=JournalLimits(journal_bytes=1024 * 1024))
    bench.files(0).stdout.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert await ships.finish() == ()
    lines = [line for lines in passed for line in lines.lines]
    assert [line.text for line in lines] == [*(f"line {number}" for number in range(100_000)), ""]
    assert [lines.first for lines in passed] == list(accumulate((len(lines.lines) for lines in passed[:-1]), initial=0))


@pytest.mark.parametrize("is_the_next_agent", [False, True])
async def test_nothing_is_behind_the_end_of_a_journal(tmp_path: Path, is_the_next_agent: bool) -> None:
    """The agent discards lines that an escaped process of a rank prints after the end of the log.

    A log ends with a mark. If a line followed the mark, readers would treat the log as incomplete.
    """
    bench = Bench(tmp_path)
    ships, _ = shipper(bench)
    bench.files(0).stdout.write_text("one\n")
    assert await ships.finish() == ()
    bench.files(0).stdout.write_text("one\ntwo\n")
    if is_the_next_agent:
        ships, _ = shipper(bench)
    assert await ships.finish() == ()
    (chunk,) = (data for key, data in bench.stored.items() if key.endswith(".jsonl"))
    assert [(line.stream, line.text) for line in decode_chunk(chunk)[1]] == [("stdout", "one"), ("end", "")]


def test_lines_of_whatever_ranks_print_fit_into_messages() -> None:
    lines = [
        LogLine(at_ms=1, rank=Rank(0), stream="stdout", text="\N{REPLACEMENT CHARACTER}" * LINE_BYTES, end=1)
        for _ in range(LIVE_LINES + 1)
    ]
    sent = list(batches(lines))
    assert [line for some in sent for line in some] == lines
    for some in sent:
        encode(LogLines(run=RUN, generation=Generation(3), first=0, lines=some))
    short = [LogLine(at_ms=1, rank=Rank(0), stream="stdout", text="x", end=1)] * (LIVE_LINES + 1)
    assert [len(some) for some in batches(short)] == [LIVE_LINES, 1]


async def test_of_much_the_oldest_is_not_held(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ships, passed = shipper(bench, recent_characters=2 * (4 + LINE_MEMORY))
    for text in ("aaaa\n", "aaaa\nbbbb\n", "aaaa\nbbbb\ncccc\n"):
        bench.files(0).stdout.write_text(text)
        await ships.printed(0)
    del passed[:]
    ships.show_recent()
    assert [lines.first for lines in passed] == [1, 2]
