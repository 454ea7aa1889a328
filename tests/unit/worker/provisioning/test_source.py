"""Tests which archives of source trees a node keeps. Each job gets exactly its own archive."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.plan import ObjectReference, ScriptPlan, SourceArchive
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from worker.errors import ObjectMissing, SourceRefused
from worker.provisioning.source import SourceArchives, fetch_source, unpack

BUCKET = "bucket"


class Store(MemoryObjectStore):
    """A store that counts fetches and runs a function of the test during a fetch."""

    def __init__(self) -> None:
        super().__init__(BUCKET)
        self.fetched: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def get_bytes(self, reference: ObjectReference) -> bytes:
        self.fetched.append(reference.key)
        self.meanwhile()
        return super().get_bytes(reference)


def archive(store: Store, name: str) -> SourceArchive:
    data = name.encode()
    place = ObjectReference(bucket=BUCKET, key=name)
    store.put_bytes(place, data)
    return SourceArchive(object=place, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def on_disk(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_archive_is_fetched_once_and_kept_for_the_next_agent(tmp_path: Path) -> None:
    store = Store()
    one = archive(store, "one")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({one.sha256})
    assert archives.get(one).read_bytes() == b"one"
    assert archives.get(one) == SourceArchives(tmp_path / "archives", store).get(one)
    assert archives.held == SourceArchives(tmp_path / "archives", store).held == (one.sha256,)
    assert store.fetched == ["one"]


def test_what_is_not_to_be_kept_is_gone_at_once(tmp_path: Path) -> None:
    store = Store()
    one, two = archive(store, "one"), archive(store, "two")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({one.sha256, two.sha256})
    archives.get(one)
    archives.get(two)
    archives.keep({two.sha256})
    assert archives.held == (two.sha256,)
    assert on_disk(tmp_path / "archives") == {f"{two.sha256}.tar.gz"}


def test_an_archive_that_arrives_when_it_is_not_wanted_any_more_never_reaches_the_disk(tmp_path: Path) -> None:
    store = Store()
    one, mine = archive(store, "one"), archive(store, "mine")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({one.sha256})
    # during the fetch, the node gets a job that needs another archive
    store.meanwhile = lambda: archives.keep({mine.sha256})
    with pytest.raises(SourceRefused, match="no longer needed"):
        archives.get(one)
    assert (archives.held, on_disk(tmp_path / "archives")) == ((), set())


def test_another_archive_under_the_name_is_refused(tmp_path: Path) -> None:
    store = Store()
    one = archive(store, "one")
    store.put_bytes(one.object, b"another")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({one.sha256})
    with pytest.raises(SourceRefused, match="hashes to"):
        archives.get(one)
    assert on_disk(tmp_path / "archives") == set()
    del store.objects[BUCKET]["one"]
    with pytest.raises(ObjectMissing):
        archives.get(one)


def test_what_somebody_has_changed_here_is_fetched_anew(tmp_path: Path) -> None:
    """If a rank of another job has changed the stored archive, the node fetches the archive again."""
    store = Store()
    one = archive(store, "one")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({one.sha256})
    archives.get(one).write_bytes(b"evil")
    assert archives.get(one).read_bytes() == b"one"
    assert store.fetched == ["one", "one"]


def test_what_an_agent_that_died_was_fetching_is_no_archive(tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    folder.mkdir()
    (folder / f"{'0' * 64}.7.new").write_bytes(b"half")
    assert SourceArchives(folder, Store()).held == ()
    assert on_disk(folder) == set()


def script_of(store: Store, *names: str, more: tuple[tarfile.TarInfo, ...] = ()) -> ScriptPlan:
    """Store a source tree of these files, the first of which is the entry point."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info in (*map(tarfile.TarInfo, names), *more):
            tar.addfile(info)
    place = ObjectReference(bucket=BUCKET, key="tree")
    store.put_bytes(place, buffer.getvalue())
    source = SourceArchive(object=place, sha256=hashlib.sha256(buffer.getvalue()).hexdigest(), bytes=1)
    return msgspec.structs.replace(rank_plan(entry_point=names[0]).script, source=source)


async def test_a_load_that_was_ended_leaves_the_next_ones_tree_alone(tmp_path: Path) -> None:
    """A cancelled load does not change the source tree that the next load has completed.

    The store answers the cancelled load late, when ranks already use the tree.
    """
    store = Store()
    script, folder = script_of(store, "train.py", "more.py"), tmp_path / "run"
    archives = SourceArchives(tmp_path / "archives", store)
    asked, answered, threads = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def hang() -> None:
        store.meanwhile = lambda: None
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(asked.set)
        assert answered.wait(30)

    store.meanwhile = hang
    first = asyncio.create_task(fetch_source(archives, script, folder))
    await asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await fetch_source(archives, script, folder) == folder / "train.py"
    there = folder.stat().st_ino
    answered.set()
    await loop.shutdown_default_executor()  # this also waits for the first load's thread
    assert [thread.is_alive() for thread in threads] == [False]
    assert (folder.stat().st_ino, on_disk(tmp_path)) == (there, {"archives", "run"})


def test_what_nobody_waits_for_is_unpacked_no_further(tmp_path: Path) -> None:
    store = Store()
    script = script_of(store, "train.py")
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({script.source.sha256})
    cancelled = threading.Event()
    entry = unpack(archives.get(script.source), script, tmp_path / "run", cancelled)
    there = entry.parent.stat().st_ino
    unpack(archives.get(script.source), script, tmp_path / "other", threading.Event())
    cancelled.set()
    with pytest.raises(SourceRefused, match="no longer needed"):
        unpack(archives.get(script.source), script, tmp_path / "run", cancelled)
    assert (entry.parent.stat().st_ino, on_disk(tmp_path)) == (there, {"archives", "run", "other"})


def test_a_disk_without_space_is_no_unsound_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("train.py"))
    found = tmp_path / "archive"
    found.write_bytes(buffer.getvalue())
    script = msgspec.structs.replace(
        rank_plan().script,
        source=SourceArchive(
            object=ObjectReference(bucket=BUCKET, key="a"),
            sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
            bytes=len(buffer.getvalue()),
        ),
    )

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="No space left"):
            unpack(found, script, tmp_path / "tree", threading.Event())
    assert unpack(found, script, tmp_path / "tree", threading.Event()).is_file()


def test_a_tree_is_readable_by_all_and_replaced_as_a_whole(tmp_path: Path) -> None:
    store = Store()
    script, folder = script_of(store, "code/train.py"), tmp_path / "run"
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({script.source.sha256})
    for _ in range(2):
        unpack(archives.get(script.source), script, folder, threading.Event())
        assert [path.stat().st_mode & 0o777 for path in (folder, folder / "code", folder / "code" / "train.py")] == [
            0o755,
            0o755,
            0o644,
        ]
        assert on_disk(folder) == {"code"}
        (folder / "left by a rank").touch()


def member(name: str, kind: bytes = tarfile.REGTYPE, **pax: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.pax_headers = kind, {key.replace("__", "."): value for key, value in pax.items()}
    return info


@pytest.mark.security
@pytest.mark.parametrize(
    ("info", "words"),
    [
        (member("../evil.py"), "not a normalized relative path"),
        (member("/tmp/evil.py"), "not a normalized relative path"),
        (member("a\\b.py"), "not a normalized relative path"),
        (member("a\x1b[31m.py"), "not a normalized relative path"),
        (member("a\u202eyp.exe"), "not a normalized relative path"),
        (member("/".join("a" * 65)), "more than 64 names deep"),
        (member("a/" * 20 + "/".join(["x" * 200] * 6)), "longer than 1024 bytes"),
        (member("x", size="-5"), "has -5 bytes"),
        (member("x", GNU__sparse__map="a,b"), "source archive is damaged"),
        (member("link", tarfile.SYMTYPE), "a symbolic link"),
        (member("pipe", tarfile.FIFOTYPE), "a device or a pipe"),
    ],
    ids=lambda value: (
        ascii(value)[:24] if isinstance(value, str) else ascii(value.name[:12]) + "".join(value.pax_headers)
    ),
)
def test_a_member_that_the_server_refuses_is_not_unpacked(tmp_path: Path, info: tarfile.TarInfo, words: str) -> None:
    store = Store()
    script = script_of(store, "train.py", more=(info,))
    archives = SourceArchives(tmp_path / "archives", store)
    archives.keep({script.source.sha256})
    with pytest.raises(SourceRefused, match=words):
        unpack(archives.get(script.source), script, tmp_path / "run", threading.Event())
    assert on_disk(tmp_path) == {"archives"}
