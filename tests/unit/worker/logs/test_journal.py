"""A node's journal contains each printed line of its ranks once and in order, even if a process dies."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.log_chunks import LINE_BYTES, decode_chunk, parse_name
from worker.logs.journal import STATE_SECONDS, JournalLimits, LogJournal, split_lines


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.limits = JournalLimits()
        self.streams = {(Rank(0), "stdout"): folder / "rank=0.stdout", (Rank(0), "stderr"): folder / "rank=0.stderr"}

    def journal(self) -> LogJournal:
        return LogJournal(self.folder, NodeId("i-0"), self.streams, lambda: self.now, self.limits)

    def say(self, text: str | bytes, stream: str = "stdout") -> None:
        with self.streams[Rank(0), stream].open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def kept(self) -> list[str]:
        """Return the lines of all chunks on disk, in the order of their numbers."""
        found = []
        for path in sorted(self.folder.glob("node=*/*.jsonl")):
            head, lines, _ = decode_chunk(path.read_bytes())
            assert head is not None
            assert head.first == parse_name(f"{path.parent.name}/{path.name}").first == len(found)
            found += [line.text for line in lines]
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Limit the size of files. A write beyond `size` bytes stores what fits and then fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def texts(lines) -> list[str]:
    return [line.text for line in lines]


def test_whole_lines_are_kept_with_their_time_and_the_rest_when_it_is_whole(bench) -> None:
    journal = bench.journal()
    bench.say("one\ntw")
    bench.say("oh\n", "stderr")
    first = journal.read()
    assert [(line.text, line.stream, line.at_ms) for line in first] == [
        ("one", "stdout", 1_000_000),
        ("oh", "stderr", 1_000_000),
    ]
    assert journal.read() == []
    bench.now = 999.0  # set the clock back
    bench.say("o\n")
    assert [(line.text, line.at_ms) for line in journal.read()] == [("two", 1_000_000)]
    bench.say("last")
    assert [(line.text, line.stream) for line in journal.end()] == [("last", "stdout"), ("", "end")]
    assert journal.end() == []
    assert bench.kept() == ["one", "oh", "two", "last", ""]


def test_it_is_known_without_reading_whether_something_was_printed(bench) -> None:
    journal = bench.journal()
    assert not journal.has_news(), "no stream is there yet"
    bench.say("one\n", "stderr")
    assert journal.has_news()
    journal.read()
    assert not journal.has_news()
    assert not bench.journal().has_news(), "another agent takes up where it was"
    bench.say("tw")
    assert journal.has_news()


def test_a_stream_that_somebody_begins_anew_is_read_from_its_beginning(bench) -> None:
    """A shell's `> /dev/stderr` truncates the file that receives a rank's stream.

    The journal records a gap and reads the file again from its beginning.
    """
    journal = bench.journal()
    for number in range(100):
        bench.say(f"line {number}\n", "stderr")
    journal.read()
    bench.streams[Rank(0), "stderr"].write_text("warning\n")
    assert journal.has_news()
    assert [(line.text.split(":")[0], line.is_gap) for line in journal.read()] == [
        ("stderr of rank 0 was begun anew", True),
        ("warning", False),
    ]
    bench.say("Traceback\n", "stderr")
    assert texts(bench.journal().read()) == ["Traceback"], "another agent takes up where it was"


def test_another_agent_goes_on_where_the_first_stopped(bench) -> None:
    bench.limits = JournalLimits(chunk_bytes=200)
    lines = [f"line {number}" for number in range(40)]
    for line in lines:
        journal = bench.journal()
        bench.say(line + "\n")
        assert texts(journal.read()) == [line]
    assert bench.kept() == lines
    assert len(list(bench.folder.glob("node=*/*.jsonl"))) > 3
    bench.journal().end()
    assert bench.journal().is_ended
    assert bench.journal().end() == []


@pytest.mark.parametrize("cut", [1, 30, 60, 90])
def test_a_line_that_was_half_written_when_the_agent_died_is_read_again(bench, cut) -> None:
    bench.journal()
    bench.say("one\ntwo\n")
    journal = bench.journal()
    journal.read()
    (path,) = bench.folder.glob("node=*/*.jsonl")
    os.truncate(path, path.stat().st_size - cut)
    bench.journal().end()
    assert bench.kept() == ["one", "two", ""]


def test_what_is_stored_leaves_the_node_and_what_is_not_is_offered_again(bench) -> None:
    bench.limits = JournalLimits(chunk_bytes=100)
    journal = bench.journal()
    for number in range(5):
        bench.say(f"{'x' * 100} {number}\n")
        journal.read()
    offered = journal.unstored()
    assert [chunk.is_complete for chunk in offered] == [True, True, True, True, False]
    for chunk in offered:
        journal.stored(chunk)
    assert journal.unstored() == []
    assert len(list(bench.folder.glob("node=*/*.jsonl"))) == 1
    bench.say("more\n")
    again = bench.journal()
    assert texts(again.read()) == ["more"]
    assert again.count == 6
    assert [chunk.name.first for chunk in again.unstored()] == [4, 5]


def test_a_chunk_that_grew_while_it_was_stored_is_stored_again(bench) -> None:
    journal = bench.journal()
    bench.say("one\n")
    journal.read()
    (before,) = journal.unstored()
    bench.say("two\n")
    journal.read()
    journal.stored(before)
    (after,) = journal.unstored()
    assert after.name == before.name
    assert after.size > before.size


def test_a_full_journal_reads_no_further_and_says_what_it_gave_up(bench) -> None:
    bench.limits = JournalLimits(journal_bytes=100, behind_bytes=1000)
    journal = bench.journal()
    bench.say(f"{'x' * 100}\n")
    assert len(journal.read()) == 1
    bench.say("later\n")
    assert journal.read() == []
    for chunk in journal.unstored():
        journal.stored(chunk)
    assert texts(journal.read()) == ["later"]
    bench.say("y" * 200 + "\n")
    journal.read()
    bench.say("z" * 2000 + "\n")
    (gap,) = journal.read()
    assert gap.is_gap
    assert gap.text.startswith("1702 bytes of stdout of rank 0 were not kept")
    (rest, _) = journal.end()
    assert rest.is_gap
    assert bench.journal().is_ended


def test_lines_that_the_disk_does_not_take_are_read_again(bench) -> None:
    journal = bench.journal()
    bench.say("one\n")
    journal.read()
    (chunk,) = journal.unstored()
    bench.say("two\nthree\n")
    bench.say("four\n", "stderr")
    for room in (0, 10, 60):
        with files_end_at(chunk.size + room), pytest.raises(OSError, match="too large"):
            journal.read()
        assert journal.has_news()
        assert journal.unstored() == [chunk]
        assert chunk.path.stat().st_size == chunk.size, "what was written of them is cut off again"
        assert (journal.count, bench.journal().count) == (1, 1)
    assert texts(journal.read()) == ["two", "three", "four"]
    bench.say("five")
    with files_end_at(chunk.size), pytest.raises(OSError, match="too large"):
        journal.end()
    assert not journal.is_ended
    assert texts(journal.end()) == ["five", ""]
    assert bench.kept() == ["one", "two", "three", "four", "five", ""]


def test_a_chunk_that_the_disk_does_not_take_is_begun_again(bench) -> None:
    journal = bench.journal()
    bench.say("one\n")
    for room in (0, 10):
        with files_end_at(room), pytest.raises(OSError, match="too large"):
            journal.read()
        assert journal.unstored() == []
        assert list(bench.folder.glob("node=*/*")) == []
    assert texts(journal.read()) == ["one"]
    assert bench.kept() == ["one"]


def test_what_is_not_in_the_journal_is_not_given_back(bench) -> None:
    bench.limits = JournalLimits(freed_bytes=128 * 1024, pass_characters=1 << 30)
    journal = bench.journal()
    text = "".join(f"{number:07}\n" for number in range(32 * 1024))
    bench.say(text)
    with files_end_at(0), pytest.raises(OSError, match="too large"):
        journal.read()
    assert bench.streams[Rank(0), "stdout"].read_text() == text
    journal.read()
    assert "\0" in bench.streams[Rank(0), "stdout"].read_text()
    assert bench.kept() == text.splitlines()


def test_a_long_stream_is_given_back_to_the_file_system(bench) -> None:
    bench.limits = JournalLimits(freed_bytes=256 * 1024)
    journal = bench.journal()
    line = "x" * 1023 + "\n"
    for _ in range(16):
        bench.say(line * 256)
        journal.read()
    path = bench.streams[Rank(0), "stdout"]
    assert path.stat().st_size == 16 * 256 * 1024
    assert path.stat().st_blocks * 512 < 1024 * 1024
    assert journal.count == 16 * 256
    assert path.read_bytes().endswith(line.encode())


@given(
    st.lists(
        st.binary(max_size=40).map(lambda data: data.replace(b"\r", b""))
        | st.just(b"\n")
        | st.just("é€😀".encode() * 20),
        max_size=30,
    ),
    st.integers(8, 64),
)
def test_lines_and_pieces_are_the_stream_again(pieces, limit) -> None:
    data = b"".join(pieces)
    found = list(split_lines(data, is_last=True, max_line_bytes=limit))
    assert sum(part.size for part in found) == len(data)
    assert all(part.size <= limit for part in found)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    said = "".join(part.text + ("" if part.is_piece else "\n") for part in found)
    assert said.removesuffix("\n") == text.removesuffix("\n")


def test_a_line_is_not_longer_than_its_limit(bench) -> None:
    journal = bench.journal()
    bench.say("x" * (LINE_BYTES + 5) + "\n")
    assert [(len(line.text), line.is_piece) for line in journal.read()] == [(LINE_BYTES, True), (5, False)]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"crlf\r\nnext\r\n", ["crlf", "next"]),
        (b"\r 1%\r 2%\r 3%\n", [" 3%*"]),
        (b"one\rtwo\r   \rthree\nfour\n", ["three*", "four"]),
        (b"bar\r   \r\n", ["bar"]),
        (b"\r\r\n\n", ["", ""]),
    ],
)
def test_a_line_is_what_a_terminal_shows_at_its_end(data, lines) -> None:
    """A `*` marks a line that overwrites the one before it."""
    assert [part.text + "*" * part.overwrites for part in split_lines(data, is_last=False)] == lines


def test_a_moving_line_is_stored_at_a_limited_rate_and_ends_with_its_last_state(bench) -> None:
    """A progress bar prints a state per second for an hour, and then a line feed."""
    journal = bench.journal()
    begin = bench.now
    seen = []
    for second in range(3600):
        bench.now = begin + second
        bench.say(f"\r{second // 36:3d}%|{'█' * 10}| {second}/3600")
        seen += journal.read()
    bench.say("\nafter\n")
    seen += journal.read()
    assert len(seen) == 3600 / STATE_SECONDS + 2
    assert [seen[0].text, *texts(seen[-2:])] == [f"  0%|{'█' * 10}| 0/3600", f" 99%|{'█' * 10}| 3599/3600", "after"]
    assert [line.overwrites for line in seen] == [True] * (len(seen) - 1) + [False]
    assert max(len(line.text) for line in seen) < 40
    assert bench.kept() == texts(seen)


def test_a_state_is_stored_once_and_not_with_half_a_character(bench) -> None:
    journal = bench.journal()
    bench.say("Epoch 1\r")
    assert texts(journal.read()) == [], "a line feed may follow the carriage return"
    bench.say("Epoch 2\r")
    bench.now += STATE_SECONDS
    assert texts(journal.read()) == ["Epoch 2"]
    bench.now += STATE_SECONDS
    assert texts(journal.read()) == []
    bench.say("Epoch 3 █".encode()[:-1])
    assert texts(journal.read()) == ["Epoch 3 "]
    bench.say("█".encode()[-1:] + b"\n")
    assert texts(journal.read()) == ["Epoch 3 █"]


def test_a_pass_and_a_chunk_are_bounded_however_short_the_lines_are(bench) -> None:
    """An empty line of one byte has about 50 bytes in a chunk. Both streams of the rank print."""
    bench.limits = JournalLimits(pass_characters=100_000)
    journal = bench.journal()
    for stream in ("stdout", "stderr"):
        bench.say("\n" * 20_000, stream)
    counts = []
    while lines := journal.read():
        counts.append({stream: sum(line.stream == stream for line in lines) for stream in ("stdout", "stderr")})
    assert sum(map(sum, (each.values() for each in counts))) == 40_000
    assert counts[0]["stdout"] == pytest.approx(counts[0]["stderr"], rel=0.1), "each stream has its share"
    sizes = [path.stat().st_size for path in bench.folder.glob("node=*/*.jsonl")]
    assert max(sizes) < bench.limits.chunk_bytes + bench.limits.pass_characters + 1000
    assert len(bench.kept()) == 40_000


@pytest.mark.parametrize("data", [b"\r" * 200_000, b"x" * 100_000 + b"\r" * 100_000, b"\r \r" * 60_000 + b"end"])
def test_carriage_returns_cost_linear_time(bench, data) -> None:
    """With quadratic time, this test would reach its time limit."""
    journal = bench.journal()
    bench.say(data)
    journal.read()
    assert "".join(texts(journal.end())).endswith("end" if data.endswith(b"end") else "")
