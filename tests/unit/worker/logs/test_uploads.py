"""Uploads of ranks' printed lines and outputs to the store."""

from __future__ import annotations

import asyncio
import errno
import os
from itertools import accumulate
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import LogLines, NodeFault
from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation, Rank
from everstep.protocol.log_chunks import LINE_BYTES, LogLine, decode_chunk, decode_lines
from everstep.protocol.plan import GenerationPlan, ObjectReference
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import RUN, rank_plan
from worker.errors import StoreDenied, StoreUnavailable
from worker.logs import journal as log_journal
from worker.logs import uploads as logs
from worker.logs.journal import LogJournal
from worker.logs.uploads import LIVE_LINES, MAX_TOLD, SHORT_BYTES, LogShipper, RankLogs, batches, is_due
from worker.ranks.files import RankFiles

PREFIX = "jobs/job/"


class Bench:
    def __init__(self, state: Path, ranks_per_node: int = 2) -> None:
        self.state = state
        self.objects = MemoryObjectStore("bucket")
        self.plan: GenerationPlan = rank_plan(ranks_per_node=ranks_per_node, generation=3)
        self.here = self.plan.nodes[0]
        self.logs = RankLogs(state, self.objects)

    def files(self, rank: int) -> RankFiles:
        files = RankFiles(self.state, RUN, Generation(3), Rank(rank))
        files.make()
        return files

    @property
    def stored(self) -> dict[str, bytes]:
        return {key.removeprefix(PREFIX): data for key, data in self.objects.objects["bucket"].items()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_streams_and_outputs_are_sent_when_ranks_have_ended(bench: Bench) -> None:
    bench.files(0).stdout.write_text("hello\n")
    bench.files(0).stderr.write_text("")
    (bench.files(0).output_dir / "sub").mkdir()
    (bench.files(0).output_dir / "sub" / "model.bin").write_bytes(b"\0\1")
    (bench.files(1).output_dir / "losses.json").write_text("[]")
    assert await bench.logs.upload_all(bench.plan, bench.here) == ()
    assert bench.stored == {
        "logs/gen=3/rank=0.stdout": b"hello\n",
        "logs/gen=3/rank=0.stderr": b"",
        "output/gen=3/rank=0/sub/model.bin": b"\0\1",
        "output/gen=3/rank=1/losses.json": b"[]",
    }
    assert await bench.logs.upload_all(bench.plan, bench.here) == ()


async def test_nothing_outside_the_output_folder_is_sent(bench: Bench, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("s3cret")
    out = bench.files(0).output_dir
    (out / "real.txt").write_text("real")
    (out / "inside").symlink_to("real.txt")
    (out / "outside").symlink_to(secret / "key")
    (out / "folder").symlink_to(secret)
    (out / "dangling").symlink_to("nowhere")
    (out / "loop").symlink_to("loop")
    os.mkfifo(out / "pipe")
    os.symlink(b"nowhere", os.fsencode(out) + b"/caf\xe9")
    missing = await bench.logs.upload_all(bench.plan, bench.here)
    for sentence in missing:
        # an unencodable sentence would end the agent
        encode(NodeFault(code="output_missing", message=sentence, is_permanent=False))
    assert bench.stored == {"output/gen=3/rank=0/real.txt": b"real", "output/gen=3/rank=0/inside": b"real"}
    assert sorted(sentence.split()[1] for sentence in missing) == [
        *("'caf\\udce9'", "dangling", "folder", "loop", "outside", "pipe")
    ]


async def test_of_many_outputs_that_are_missing_some_are_named(bench: Bench) -> None:
    """The agent names only some missing outputs, because the control plane rejects reports above a size limit."""
    for number in range(MAX_TOLD + 5):
        (bench.files(0).output_dir / f"link-{number}").symlink_to("nowhere")
    missing = await bench.logs.upload_all(bench.plan, bench.here)
    assert len(missing) == MAX_TOLD + 1
    assert missing[-1] == "5 more outputs are not in S3; the agent's log names them"


async def test_what_cannot_be_sent_is_told_and_the_rest_is_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RETRY_SECONDS", 0.0)
    calls: list[str] = []

    class Failing(MemoryObjectStore):
        def put_file(self, reference: ObjectReference, path: Path, size: int | None = None):  # type: ignore[no-untyped-def]
            calls.append(path.name)
            if path.name == "rank=0.stdout":
                raise StoreDenied("no")
            if path.name == "rank=0.stderr":
                raise StoreUnavailable("503")
            return super().put_file(reference, path, size)

    bench.objects = Failing("bucket")
    bench.logs = RankLogs(bench.state, bench.objects)
    for rank in (0, 1):
        bench.files(rank).stdout.write_text("out")
        bench.files(rank).stderr.write_text("err")
    missing = await bench.logs.upload_all(bench.plan, bench.here)
    assert len(missing) == 2
    assert "rank=0.stdout" in missing[0]
    assert set(bench.stored) == {"logs/gen=3/rank=1.stdout", "logs/gen=3/rank=1.stderr"}
    assert (calls.count("rank=0.stdout"), calls.count("rank=0.stderr")) == (1, logs.MAX_ATTEMPTS)


async def test_a_running_ranks_streams_are_readable(bench: Bench) -> None:
    files = bench.files(0)
    files.stdout.write_text("one\n")
    task = asyncio.create_task(bench.logs.follow(bench.plan, bench.here, interval_seconds=0.001))
    key = "logs/gen=3/rank=0.stdout"
    try:
        for text in ("one\n", "one\ntwo\n"):
            files.stdout.write_text(text)
            while bench.stored.get(key) != text.encode():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_long_streams_are_sent_less_often() -> None:
    assert is_due(0, None)
    assert not is_due(0, 0)
    assert is_due(1, 0)
    assert not is_due(100, 100)
    assert is_due(10, 100), "it was begun anew"
    assert is_due(SHORT_BYTES, SHORT_BYTES - 1)
    big = 100 * SHORT_BYTES
    assert not is_due(big + 1, big)
    assert is_due(int(big * logs.GROWTH), big)


async def test_a_forgotten_run_leaves_nothing(bench: Bench) -> None:
    bench.files(0).stdout.write_text("x")
    bench.logs.forget(RUN)
    assert not list(bench.state.rglob("*rank=*"))
    bench.logs.forget(RUN)


def shipper(bench: Bench) -> tuple[LogShipper, list[LogLines]]:
    """Return a shipper that has not started, and the list of the lines that it forwards."""
    passed: list[LogLines] = []
    return LogShipper(bench.state, bench.objects, bench.plan, bench.here, now=lambda: 1.0, live=passed.append), passed


def texts(rows: tuple[bytes, ...]) -> list[str]:
    return [line.text for line in decode_lines(b"".join(rows))]


async def test_peers_get_every_line_that_is_printed_by_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_journal, "READ_BYTES", 16)
    ships, passed = shipper(bench)
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


async def test_peers_get_the_newest_lines_of_many(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TAIL_BYTES", 200)
    ships, _ = shipper(bench)
    bench.files(0).stdout.write_text("".join(f"line {number}\n" for number in range(100)))
    tail = await ships.printed(0)
    assert tail.end == 100
    assert texts(tail.rows) == [f"line {number}" for number in range(tail.first, 100)]
    assert 0 < tail.size <= 200 * 2


async def test_a_disk_that_takes_no_lines_holds_up_no_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    ships, _ = shipper(bench)
    bench.files(0).stdout.write_text("one\n")
    monkeypatch.setattr(log_journal, "_write", full)
    assert (await ships.printed(0)).rows == ()


async def test_who_begins_to_follow_is_given_the_newest_lines_once_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ships, passed = shipper(bench)
    bench.files(0).stdout.write_text("one\ntwo\n")
    await ships._read()
    bench.files(0).stdout.write_text("one\ntwo\nthree\n")
    await ships._read()
    before = list(passed)
    assert [(lines.first, [line.text for line in lines.lines]) for lines in before] == [
        (0, ["one", "two"]),
        (2, ["three"]),
    ]
    ships.show_recent()
    assert passed == before * 2


async def test_lines_that_the_disk_does_not_take_at_first_are_shipped_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "READ_SECONDS", 0.0)
    bench = Bench(tmp_path)
    failing, is_full = asyncio.Event(), True
    append, loop, tries = LogJournal._append, asyncio.get_running_loop(), []

    def refuse(journal: LogJournal, *arguments: object) -> None:
        if is_full:
            tries.append(1)
            if len(tries) == 3:
                loop.call_soon_threadsafe(failing.set)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LogJournal, "_append", refuse)
    ships, passed = shipper(bench)
    bench.files(0).stdout.write_text("one\ntwo\n")
    ships.begin()
    await failing.wait()
    assert passed == []
    is_full = False
    assert await ships.finish() == ()
    assert [line.text for lines in passed for line in lines.lines] == ["one", "two", ""]
    assert b'"two"' in b"".join(data for key, data in bench.stored.items() if key.endswith(".jsonl"))
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


async def test_lines_that_the_disk_never_takes_are_told_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "RETRY_SECONDS", 0.0)
    bench = Bench(tmp_path)
    ships, _ = shipper(bench)
    bench.files(0).stdout.write_text("one\n")
    await ships._read()
    monkeypatch.setattr(LogJournal, "_append", refuse)
    (missing,) = await ships.finish()
    assert "No space left on device" in missing
    assert any(b'"one"' in data for data in bench.stored.values()), "what was kept is shipped"


async def test_what_ranks_print_last_is_kept_where_the_journal_has_no_room_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_journal, "JOURNAL_BYTES", 1024 * 1024)
    bench = Bench(tmp_path)
    ships, passed = shipper(bench)
    bench.files(0).stdout.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert await ships.finish() == ()
    lines = [line for lines in passed for line in lines.lines]
    assert [line.text for line in lines] == [*(f"line {number}" for number in range(100_000)), ""]
    assert [lines.first for lines in passed] == list(accumulate((len(lines.lines) for lines in passed[:-1]), initial=0))


@pytest.mark.parametrize("is_the_next_agent", [False, True])
async def test_nothing_is_behind_the_end_of_a_journal(tmp_path: Path, is_the_next_agent: bool) -> None:
    """A process that has escaped from its rank still prints after the journal's end.

    The agent discards these lines. Readers treat a journal as incomplete if its last line is not its end.
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


async def test_of_much_the_oldest_is_not_held(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs, "RECENT_CHARACTERS", 9)
    bench = Bench(tmp_path)
    ships, passed = shipper(bench)
    for text in ("aaaa\n", "aaaa\nbbbb\n", "aaaa\nbbbb\ncccc\n"):
        bench.files(0).stdout.write_text(text)
        await ships._read()
    del passed[:]
    ships.show_recent()
    assert [lines.first for lines in passed] == [1, 2]
