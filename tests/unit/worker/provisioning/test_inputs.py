"""A node fetches an input channel once and completely, caches it, and verifies it before each use."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import worker.provisioning.inputs
from everstep.protocol.ids import RunId
from everstep.protocol.plan import InputChannel, ObjectReference
from tests.fakes.storage import MemoryObjectStore
from worker.errors import InputRefused, StoreDenied, StoreUnavailable
from worker.provisioning.inputs import FetchStopped, InputCache
from worker.storage.aws import JobPrincipal
from worker.storage.object_store import ObjectReader, Span, StoredObject

BUCKET = "data"
RUN, OTHER_RUN = RunId("ab" * 16), RunId("cd" * 16)


class Store(MemoryObjectStore):
    """A store that counts reads and fails as the test decides."""

    def __init__(self, **objects: bytes) -> None:
        super().__init__(BUCKET)
        self.read: list[str] = []
        self.asked = 0
        self.fails: dict[str, list[Exception]] = {}
        for key, data in objects.items():
            self.add(key, data)

    def add(self, key: str, data: bytes) -> None:
        self.put_bytes(ObjectReference(bucket=BUCKET, key=key), data)

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        self.read.append(reference.key)
        if self.fails.get(reference.key):
            raise self.fails[reference.key].pop(0)
        with super().open(reference, etag=etag) as reader:
            yield reader

    def list(self, prefix: ObjectReference):  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().list(prefix)


def channel(name: str = "train", key: str = "set") -> InputChannel:
    return InputChannel(name=name, prefix=ObjectReference(bucket=BUCKET, key=key))


def store_of(*keys: str) -> Store:
    store = Store()
    for key in keys:
        store.add(key, key.encode() * 100)
    return store


cache_at = partial(InputCache, retry_seconds=0.0)


def principal(run: RunId, project: str = "a", role: str = "") -> JobPrincipal:
    return JobPrincipal(project=project, job="gpt", run=run, role_arn=role)


def fetch(cache: InputCache, store: Store, *channels: InputChannel, run: RunId = RUN) -> dict[str, Path]:
    return cache.fetch(store, principal(run), channels or (channel(),), threading.Event())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_channel_has_what_lies_below_its_prefix_and_nothing_else(tmp_path: Path) -> None:
    store = store_of("set/a", "set/deep/b", "settle/c", "other")
    store.add("set/empty", b"")
    store.add("set/folder/", b"")
    found = fetch(cache_at(tmp_path), store)
    assert contents(found["train"]) == {"a": b"set/a" * 100, "deep/b": b"set/deep/b" * 100, "empty": b""}
    modes = {path.stat().st_mode & 0o777 for path in found["train"].rglob("*")}
    assert modes == {0o444, 0o555}
    assert found["train"].stat().st_mode & 0o777 == 0o555


def test_a_channel_may_be_one_object(tmp_path: Path) -> None:
    assert list(contents(fetch(cache_at(tmp_path), store_of("set/a", "set/ab"), channel(key="set/a"))["train"])) == [
        "a"
    ]


def test_the_same_run_asks_for_nothing_again_and_another_one_reads_nothing_again(tmp_path: Path) -> None:
    cache, store = cache_at(tmp_path), store_of("set/a", "set/b")
    first = contents(fetch(cache, store)["train"])
    assert (sorted(store.read), store.asked) == (["set/a", "set/b"], 1)
    store.add("set/a", b"changed")  # the object changes in S3, but a run must keep the inputs with which it began
    assert contents(fetch(cache_at(tmp_path), store)["train"]) == first
    assert (len(store.read), store.asked) == (2, 1)
    other = contents(fetch(cache, store, run=OTHER_RUN)["train"])
    assert other == {**first, "a": b"changed"}
    assert store.read[2:] == ["set/a"]
    cache.forget(OTHER_RUN)
    assert contents(tmp_path / "inputs/runs" / RUN / "train") == first


def test_a_directory_of_the_node_is_given_as_it_is(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    given = InputChannel(name="train", directory=str(data))
    assert fetch(cache_at(tmp_path), Store(), given) == {"train": data}
    for absent, words in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Not a directory")):
        (tmp_path / "file").touch()
        with pytest.raises(InputRefused, match=f"InputDataConfig, channel 'train': {absent}: {words}"):
            fetch(cache_at(tmp_path), Store(), InputChannel(name="train", directory=str(absent)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ((), "there is no object at or below s3://data/set"),
        (("settle",), "there is no object at or below"),
        (("set/../x",), "is no path of a file"),
        (("set/a", "set/a/b"), "'a' would be a file, and the folder of 'a/b'"),
    ],
)
def test_what_is_no_channel_is_refused_by_its_name(tmp_path: Path, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputRefused, match=f"InputDataConfig, channel 'train': .*{words}") as refused:
        fetch(cache_at(tmp_path), store_of(*keys))
    assert not refused.value.retryable
    assert not (tmp_path / "inputs/runs" / RUN / "train").exists()


def test_what_may_pass_is_tried_again_and_what_is_denied_is_not(tmp_path: Path) -> None:
    store = store_of("set/a")
    store.fails["set/a"] = [StoreUnavailable("503"), StoreUnavailable("reset")]
    assert fetch(cache_at(tmp_path), store)
    store.fails["set/b"] = [StoreDenied("AccessDenied: no s3:GetObject")]
    store.add("set/b", b"b")
    with pytest.raises(InputRefused, match="AccessDenied: no s3:GetObject") as refused:
        fetch(cache_at(tmp_path), store, run=OTHER_RUN)
    assert (store.read.count("set/a"), store.read.count("set/b"), refused.value.retryable) == (3, 1, False)
    store.fails["set/b"] = [StoreUnavailable("503")] * 9
    with pytest.raises(InputRefused, match="503") as refused:
        fetch(cache_at(tmp_path), store, run=OTHER_RUN)
    assert refused.value.retryable


def test_an_object_that_changes_between_the_list_and_the_read_is_not_taken(tmp_path: Path) -> None:
    class Changing(Store):
        @contextmanager
        def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
            self.add("set/a", b"another one")
            with super().open(reference, etag=etag) as reader:
                yield reader

    store = Changing()
    store.add("set/a", b"the listed one")
    with pytest.raises(InputRefused, match="has the ETag") as refused:
        fetch(cache_at(tmp_path), store)
    assert refused.value.retryable
    assert fetch(cache_at(tmp_path), store), "a second fetch uses the current list"


def test_bytes_that_do_not_hash_to_their_etag_get_no_name(tmp_path: Path) -> None:
    class Flipping(Store):
        @contextmanager
        def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
            with super().open(reference, etag=etag) as reader:
                reader._data = memoryview(b"x" + bytes(reader._data[1:]))  # type: ignore[attr-defined]
                yield reader

    store = Flipping()
    store.add("set/a", b"right")
    with pytest.raises(InputRefused, match="arrived with the MD5"):
        fetch(cache_at(tmp_path), store)
    assert [path.suffix for path in (tmp_path / "inputs/objects").iterdir()] == [".new"]
    assert fetch(cache_at(tmp_path), store_of("set/b"))
    assert [path.suffix for path in (tmp_path / "inputs/objects").iterdir()] == [""], (
        "what was left half there went with the next fetch"
    )


def test_a_file_that_somebody_has_written_to_is_fetched_anew(tmp_path: Path) -> None:
    cache, store = cache_at(tmp_path), store_of("set/a", "set/b")
    folder = fetch(cache, store)["train"]
    (folder / "a").chmod(0o600)
    (folder / "a").write_bytes(b"X" + (folder / "a").read_bytes()[1:])
    assert contents(fetch(cache, store)["train"])["a"] == b"set/a" * 100
    assert sorted(store.read) == ["set/a", "set/a", "set/b"]


@pytest.mark.parametrize("dies_at", ["link", "rename", "fsync", "replace", "utime"])
def test_an_agent_that_dies_in_the_middle_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    class Died(BaseException):
        pass

    store, count = store_of("set/a", "set/b", "set/deep/c"), 0
    whole = {key.removeprefix("set/"): key.encode() * 100 for key in ("set/a", "set/b", "set/deep/c")}
    real = getattr(os, dies_at)
    for last in range(12):
        state = tmp_path / str(last)
        state.mkdir()
        calls = 0

        def die(*arguments: object, _last: int = last, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls > _last:
                raise Died
            return real(*arguments, **named)

        with monkeypatch.context() as patched:
            patched.setattr(os, dies_at, die)
            try:
                fetch(cache_at(state), store)
            except Died:
                count += 1
        assert contents(fetch(cache_at(state), store)["train"]) == whole
    assert count, "it never died"


def test_the_cache_keeps_to_its_limit_and_lets_go_of_what_no_run_uses(tmp_path: Path) -> None:
    cache, store = cache_at(tmp_path, limit_bytes=1000), Store()
    for name in ("one", "two", "three"):
        store.add(f"{name}/x", name[-1:].encode() * 400)
    fetch(cache, store, channel(key="one"))
    with pytest.raises(
        InputRefused, match=r"InputDataConfig: .* 800 bytes, which is 200 bytes more .* limit for inputs is 1,000 bytes"
    ):
        fetch(cache, store, channel("a", "two"), channel("b", "three"), run=OTHER_RUN)
    cache.forget(RUN)
    fetch(cache, store, channel("a", "two"), channel("b", "three"), run=OTHER_RUN)
    assert sorted(store.read) == ["one/x", "three/x", "two/x"]
    assert len(list((tmp_path / "inputs/objects").iterdir())) == 2, "what no run uses any more has made room"


def test_a_disk_without_space_is_no_refused_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, store = cache_at(tmp_path), store_of("set/a")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        with pytest.raises(OSError, match="No space left"):
            fetch(cache, store, channel())
    fetch(cache, store, channel())


def test_a_fetch_that_nobody_waits_for_ends_and_what_it_has_stays(tmp_path: Path) -> None:
    cancelled = threading.Event()
    store = store_of("set/a", "set/b")

    class Reader:
        def __init__(self, reader: ObjectReader) -> None:
            self.bytes, self.md5, self._reader = reader.bytes, reader.md5, reader

        def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
            cancelled.set()
            self._reader.read_into(target, spans)

    class Cut(Store):
        @contextmanager
        def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
            with super().open(reference, etag=etag) as reader:
                yield Reader(reader)

    cut = Cut()
    cut.objects = store.objects
    with pytest.raises(FetchStopped):
        cache_at(tmp_path).fetch(cut, principal(RUN), (channel(),), cancelled)
    assert not (tmp_path / "inputs/runs" / RUN / "train").exists()


def test_the_first_object_that_is_refused_ends_the_fetch(tmp_path: Path) -> None:
    """The first refused object ends the fetch. Requests and retries for thousands of objects would take hours."""
    keys = [f"set/{number:03}" for number in range(100)]
    store = store_of(*keys)
    store.fails = {key: [StoreDenied("no")] for key in keys}
    with pytest.raises(InputRefused, match="no"):
        fetch(cache_at(tmp_path), store)
    assert len(store.read) <= worker.provisioning.inputs.FETCHES_AT_ONCE


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_fetch_that_was_given_up_asks_for_nothing_more(
    tmp_path: Path, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()
    store = store_of(*(f"set/{number:03}" for number in range(100)))
    objects = store.list

    def list_then_cancel(prefix: ObjectReference) -> Iterator[StoredObject]:
        yield from objects(prefix)
        cancelled.set()

    if is_listed:
        monkeypatch.setattr(store, "list", list_then_cancel)
    else:
        cancelled.set()
    with pytest.raises(FetchStopped):
        cache_at(tmp_path).fetch(store, principal(RUN), (channel(),), cancelled)
    assert store.read == []


@pytest.mark.security
@pytest.mark.parametrize(
    ("project", "role", "is_shared"),
    [
        ("speech", "arn:one", True),
        ("speech", "arn:two", False),
        ("vision", "arn:one", False),
        ("speech arn:one", "", False),
    ],
)
def test_jobs_of_one_project_with_one_role_share_what_they_fetch(
    tmp_path: Path, project: str, role: str, is_shared: bool
) -> None:
    cache, store = cache_at(tmp_path), store_of("set/a")
    cache.fetch(store, principal(RUN, "speech", "arn:one"), (channel(),), threading.Event())
    cache.fetch(store, principal(OTHER_RUN, project, role), (channel(),), threading.Event())
    assert store.read == ["set/a"] * (1 if is_shared else 2)
