from __future__ import annotations

import gzip
import hashlib
import io
import random
import subprocess
import tarfile
import tracemalloc
from contextlib import ExitStack, closing
from dataclasses import replace

import httpx
import pytest

from control_plane.api import archive as archives
from control_plane.api.archive import RefusedArchive, SourceLimits, inspect, inspect_apart
from control_plane.api.caller_threads import UPLOAD_BYTES_PER_SECOND, SpoolRoom
from control_plane.api.errors import Throttled
from control_plane.api.routes import sources as routes
from control_plane.api.routes.sources import IN_MEMORY_BYTES, PIECE_BYTES
from control_plane.db.tokens import Role
from everstep.protocol.pace import Pace
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, Service, refused


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Yield one service for all tests. Each source is named by its digest, so the tests do not affect each other."""
    with Service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with closing(service.client()) as connected:
        yield connected


def stored_keys(service) -> list[str]:
    return [info.reference.key for info in service.objects.list(ObjectReference(bucket=BUCKET, key=""))]


def archive(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return file.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.covers("PutSource.SourceId", "PutSource.Body")
def test_a_source_is_stored_under_its_digest_once(client, service):
    body = archive(special("pkg", tarfile.DIRTYPE), ("train.py", b"print()"), ("pkg/model.py", b"x = 1"))
    source_id = client.upload_source(Body=body)["SourceId"]
    assert source_id == hashlib.sha256(body).hexdigest()
    stored = ObjectReference(bucket=BUCKET, key=f"projects/default/sources/{source_id}.tar.gz")
    assert service.objects.get(stored) == body
    assert client.upload_source(Body=io.BytesIO(body))["SourceId"] == source_id


def test_an_upload_pays_for_each_byte(client, monkeypatch):
    paid = []

    async def pay(self, seconds):
        paid.append(seconds)

    monkeypatch.setattr(Pace, "pay", pay)
    body = archive(("train.py", random.Random(7).randbytes(300_000)))
    client.upload_source(Body=body)
    assert len(paid) > 1
    assert sum(paid) == pytest.approx(len(body) / UPLOAD_BYTES_PER_SECOND)


def test_an_archive_larger_than_memory_is_spooled(client, service):
    noise = random.Random(7).randbytes(2**20 - 4096)
    assert client.upload_source(Body=archive(("train.py", b""), ("noise", noise)))["SourceId"]
    assert list((service.settings.state_directory / "spool").iterdir()) == []


@pytest.fixture
def larger_sources(service):
    before = service.services
    service.app.state.services = replace(before, source_limits=SourceLimits(archive_bytes=2**22))
    yield
    service.app.state.services = before


@pytest.mark.parametrize(
    ("size", "waits"),
    [(IN_MEMORY_BYTES // 2, 1), (IN_MEMORY_BYTES + PIECE_BYTES // 2, 2), (IN_MEMORY_BYTES + PIECE_BYTES * 3 // 2, 3)],
)
@pytest.mark.usefixtures("larger_sources")
def test_an_upload_waits_for_a_thread_once_for_a_piece_and_not_for_what_is_in_memory(
    client, service, monkeypatch, size, waits
):
    """An upload waits for a free thread once per piece of the archive, not once per read.

    Bytes that are already in memory need no thread. Each wait puts the upload behind all other requests that wait.
    """
    run, asked = service.services.caller_threads.run, []
    monkeypatch.setattr(
        service.services.caller_threads, "run", lambda work, *arguments: asked.append(work) or run(work, *arguments)
    )
    body = archive(("train.py", b""), ("noise", random.Random(size).randbytes(size)))
    source_id = hashlib.sha256(body).hexdigest()
    client.put_source(SourceId=source_id, Body=body)
    assert (
        service.objects.get(ObjectReference(bucket=BUCKET, key=f"projects/default/sources/{source_id}.tar.gz")) == body
    )
    assert len(asked) == 2 + waits, "the entry of the audit log, and whether the quota has room"


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../evil.py", b"")], "'../evil.py' is not a normalized relative path"),
        ([("a/../../evil.py", b"")], "is not a normalized relative path"),
        ([("/etc/passwd", b"")], "is not a normalized relative path"),
        ([("a\\b.py", b"")], "is not a normalized relative path"),
        ([("a\nb.py", b"")], "is not a normalized relative path"),
        ([special("link", tarfile.SYMTYPE, "/etc/passwd")], "'link' is a symbolic link to '/etc/passwd'"),
        ([("a.py", b""), special("hard", tarfile.LNKTYPE, "a.py")], "'hard' is a hard link"),
        ([special("dev", tarfile.CHRTYPE)], "device"),
        ([special("pipe", tarfile.FIFOTYPE)], "device or a pipe"),
        ([("a.py", b"1"), ("./a.py", b"2")], "twice"),
        ([("a", b"1"), ("a/b.py", b"2")], "both a file and a directory"),
        ([special("only", tarfile.DIRTYPE)], "no files"),
        ([("zeros", bytes(8 * 2**20))], "bytes) when unpacked"),
    ],
)
def test_an_archive_that_could_hurt_is_refused(client, service, members, words):
    before = stored_keys(service)
    with refused("ValidationException") as caught:
        client.upload_source(Body=archive(*members))
    assert words in caught.value.message
    assert (".everstepignore" in caught.value.hint) is ("unpacked" in words)
    assert stored_keys(service) == before


def pax(name: str, **headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.pax_headers = {key.replace("__", "."): value for key, value in headers.items()}
    return info


@pytest.mark.security
@pytest.mark.parametrize(
    "info",
    [
        pax("x", GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__name="z", GNU__sparse__realsize="9"),
        pax("x", GNU__sparse__map="a,b"),
        pax("x", GNU__sparse__map="1"),
        pax("x", size="-5"),
        pax("x", size="9" * 30),
        *(tarfile.TarInfo(f"a{sign}.py") for sign in ("\udcff", "\x1b[31m", "\x7f", "\x9b31m", "\u202e", "\u2028")),
        tarfile.TarInfo("/".join(["a"] * 65)),
        tarfile.TarInfo("x" * 5000),
    ],
    ids=lambda info: ascii(info.name[:20]) + "".join(info.pax_headers)[:30],
)
def test_headers_and_names_that_no_archive_of_code_has_are_refused(client, service, info):
    """The service refuses archives with headers or names that would cause internal errors or be unsafe to display."""
    before = stored_keys(service)
    with refused("ValidationException"):
        client.upload_source(Body=packed((info, b"x")))
    assert stored_keys(service) == before


@pytest.mark.security
def test_names_that_would_fill_the_database_are_refused():
    names = ("/".join(["a" * 15] * 60) + f"/{number}" for number in range(3_000))
    with pytest.raises(RefusedArchive, match="paths have more than 2097152 bytes"):
        inspect(io.BytesIO(body := archive(*((name, b"") for name in names))), len(body), SourceLimits())


@pytest.mark.security
def test_an_archive_is_inspected_in_a_process_that_the_kernel_bounds(tmp_path, monkeypatch):
    body = archive(("train.py", b"1"))
    (tmp_path / "archive").write_bytes(body)
    with (tmp_path / "archive").open("rb") as file:
        assert inspect_apart(file, len(body), SourceLimits()).files == ("train.py",)
        monkeypatch.setattr(
            archives.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -9, b"", b"")
        )
        with pytest.raises(RefusedArchive, match="more than 30 s of CPU time or 536870912 bytes of memory"):
            inspect_apart(file, len(body), SourceLimits())


def packed(*members: tuple[tarfile.TarInfo, bytes], headers: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", pax_headers=headers) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def commented(name: str, comment_bytes: int) -> tarfile.TarInfo:
    """Return an archived file whose header contains a comment of `comment_bytes`."""
    info = tarfile.TarInfo(name)
    info.pax_headers = {"comment": "x" * comment_bytes}
    return info


def sparse(name: str, said_bytes: int) -> tarfile.TarInfo:
    """Return a sparse file whose header declares a size of `said_bytes`. The archive contains only one byte of it."""
    info = tarfile.TarInfo(name)
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(said_bytes)}
    return info


def peak_bytes(body: bytes, limits: SourceLimits, refused_with: str | None) -> int:
    tracemalloc.start()
    try:
        if refused_with is None:
            inspect(io.BytesIO(body), len(body), limits)
        else:
            with pytest.raises(RefusedArchive, match=refused_with):
                inspect(io.BytesIO(body), len(body), limits)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (packed((commented("a.py", 8 * 2**20), b"1")), "it contains a header of more than 65536 bytes"),
        (
            packed((tarfile.TarInfo("b.py"), b"1"), (commented("a.py", 8 * 2**20), b"1")),
            "it contains a header of more than 65536 bytes",
        ),
        (packed((sparse("b.py", 2**23), b"1"), (commented("a.py", 8 * 2**20), b"1")), "'b.py' is a special file"),
        (
            packed((tarfile.TarInfo("a.py"), b"1"), headers={f"comment{number}": "" for number in range(101)}),
            "more than 100 global pax headers",
        ),
        (gzip.compress(gzip.decompress(archive(("a.py", b"1"))) + bytes(100 * 2**20)), "bytes besides the content"),
    ],
    ids=["first", "second", "behind a sparse file", "global", "tail"],
)
def test_what_an_archive_says_besides_its_files_takes_no_memory(body, words):
    assert peak_bytes(body, SourceLimits(), words) < 4 * 2**20


def test_what_is_said_of_one_file_is_forgotten_with_the_next():
    body = packed(*((commented(f"{number}.py", 60_000), b"1") for number in range(200)))
    assert peak_bytes(body, SourceLimits(), None) < 4 * 2**20
    assert (
        peak_bytes(
            body, SourceLimits(file_count=1_000), "it contains more than 4096000 bytes besides the content of its files"
        )
        < 4 * 2**20
    )


def test_directories_are_counted():
    body = packed(*((special("folder", tarfile.DIRTYPE), b"") for _ in range(11)), (tarfile.TarInfo("a.py"), b"1"))
    inspect(io.BytesIO(body), len(body), SourceLimits(file_count=11))
    with pytest.raises(RefusedArchive, match="more than 10 directories"):
        inspect(io.BytesIO(body), len(body), SourceLimits(file_count=10))


def test_files_that_follow_long_ones_are_as_good():
    noise = random.Random(7).randbytes(300_000)
    body = packed(*((commented(f"{number}.py", 60_000), noise[: 1 + number * 100_000]) for number in range(4)))
    assert inspect(io.BytesIO(body), len(body), SourceLimits()).unpacked_bytes == 1 + 100_001 + 200_001 + 300_000
    body = archive(("noise", noise))
    assert inspect(io.BytesIO(body), len(body), SourceLimits(file_count=10)).unpacked_bytes == 300_000


@pytest.mark.parametrize(
    "body",
    [b"", b"not gzip at all", gzip.compress(b"not a tar" * 200), archive(("a.py", b"x" * 5000))[:-20]],
    ids=["empty", "no gzip", "no tar", "cut"],
)
def test_what_is_no_archive_is_refused(client, body):
    with refused("ValidationException", "not a complete gzipped tar|no files"):
        client.upload_source(Body=body)


def test_a_flipped_bit_is_refused(client):
    body = bytearray(archive(("a.py", random.Random(1).randbytes(5000))))
    body[len(body) // 2] ^= 1
    with refused("ValidationException"):
        client.upload_source(Body=bytes(body))


def test_another_digest_than_announced_is_refused(client):
    with refused("ValidationException", "SHA-256 is"):
        client.put_source(SourceId="0" * 64, Body=archive(("a.py", b"")))


def test_the_limit_holds_while_it_comes_in(client):
    with refused("ValidationException", r"larger than 1 MiB"):
        client.upload_source(Body=random.Random(3).randbytes(2**20 + 1))


def test_readers_store_nothing(service):
    with closing(service.client(service.token(Role.VIEWER))) as reader, refused("AccessDeniedException"):
        reader.upload_source(Body=archive(("a.py", b"")))


@pytest.mark.usefixtures("larger_sources")
@pytest.mark.parametrize("announces", [True, False])
def test_an_upload_without_room_in_the_quota_is_refused_before_its_body_is_read(client, service, announces) -> None:
    client.put_project_quota(Project="small", MaxSourceBytes=1000)
    body = b"x" * 2000 if announces else iter([b"x" * 2000])
    headers = {"authorization": f"Bearer {service.token(Role.SUBMITTER, 'small')}", "content-type": "application/gzip"}
    answer = httpx.put(
        f"http://{service.address}/v1/sources/{'0' * 64}", content=body, headers=headers, trust_env=False
    )
    assert (answer.status_code, answer.json()["Code"]) == (409, "ConflictException")


def test_the_uploads_of_a_project_leave_room_for_those_of_others() -> None:
    room = SpoolRoom()
    with ExitStack() as held:
        for project in ("a", "a", "b", "b", "c", "c", "d"):
            held.enter_context(room.hold(project, 10, 10))
        with pytest.raises(Throttled), room.hold("a", 1, 10):
            pass
        with room.hold("d", 10, 10), pytest.raises(Throttled), room.hold("e", 1, 10):
            pass
        with room.hold("e", 10, 10):
            pass
    with room.hold("a", 20, 10):
        pass


@pytest.mark.security
def test_a_project_inspects_one_archive_at_a_time_and_leaves_a_place_to_others(client, monkeypatch):
    """The lock of the project is held during the inspection, and that of another project is free."""
    seen = []

    def looked(*given):
        seen.append([archives.turn_of(name).locked() for name in ("default", "speech")])
        return inspect(*given)

    monkeypatch.setattr(routes, "inspect_apart", looked)
    body = archive(("train.py", b"one at a time"))
    client.put_source(SourceId=hashlib.sha256(body).hexdigest(), Body=body)
    assert seen == [[True, False]]
    assert not archives.turn_of("default").locked()
