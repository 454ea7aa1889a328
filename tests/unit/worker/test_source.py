"""Archives of source trees: what is kept, for whom, and that nobody gets another one than was asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from everstep.protocol.plan import ObjectReference, SourceArchive
from worker.errors import ObjectMissing, SourceRefused
from worker.source import SourceArchives
from worker.storage.memory import MemoryObjectStore

BUCKET = "bucket"


class Store(MemoryObjectStore):
    """Counts, and lets a test act while an archive is on its way."""

    def __init__(self) -> None:
        super().__init__(BUCKET)
        self.fetched: list[str] = []
        self.meanwhile = lambda: None

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
    store.meanwhile = lambda: archives.keep({mine.sha256})  # the node is given work
    with pytest.raises(SourceRefused, match="not wanted any more"):
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
    """Ranks of another job have run as the same user."""
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
