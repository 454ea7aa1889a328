"""Tests how an agent uploads the output files of ranks."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.agent_messages import NodeFault, OutputCause
from everstep.protocol.codec import encode
from everstep.protocol.plan import ObjectReference, SourceArchive
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.logs.bench import RUN, Bench
from tests.unit.worker.node.test_file_trees import nest
from worker.errors import StoreDenied, StoreUnavailable
from worker.logs import outputs
from worker.logs.outputs import MAX_UNSTORED, RankOutputs
from worker.ranks.files import source_of
from worker.storage.object_store import StoredObject

MTIME = 1_600_000_000


def keep(bench: Bench, *patterns: str, shipped: dict[str, str]) -> None:
    """Store an archive with the given files on the node, and give the job's plan patterns of kept files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in shipped.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), MTIME
            tar.addfile(member, io.BytesIO(content.encode()))
    data = buffer.getvalue()
    place = ObjectReference(bucket="bucket", key="source")
    bench.objects.put_bytes(place, data)
    source = SourceArchive(object=place, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    bench.archives.keep({source.sha256})
    bench.archives.get(source)
    del bench.objects.objects["bucket"]["source"]
    script = msgspec.structs.replace(bench.plan.script, source=source, kept_files=patterns)
    bench.plan = msgspec.structs.replace(bench.plan, script=script)


def write_source(bench: Bench, files: dict[str, str], mtime: int | None = None) -> None:
    for name, content in files.items():
        path = source_of(bench.state, RUN) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        if mtime is not None:
            os.utime(path, (mtime, mtime))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_outputs_are_uploaded_when_ranks_have_ended(bench: Bench) -> None:
    bench.files(0).stdout.write_text("hello\n")
    (bench.files(0).output_dir / "sub").mkdir()
    (bench.files(0).output_dir / "sub" / "model.bin").write_bytes(b"\0\1")
    (bench.files(1).output_dir / "losses.json").write_text("[]")
    assert await bench.outputs.upload_all(bench.plan, bench.here) == ()
    assert bench.stored == {
        "output/gen=3/rank=0/sub/model.bin": b"\0\1",
        "output/gen=3/rank=1/losses.json": b"[]",
    }
    assert await bench.outputs.upload_all(bench.plan, bench.here) == ()


async def test_files_in_the_source_directory_are_kept_or_named(bench: Bench) -> None:
    keep(bench, "runs/*", "*.pt", shipped={"train.py": "x", "lib/a.py": "y", "runs/old.txt": "o"})
    (bench.files(0).output_dir / "taken.pt").write_text("own")
    write_source(bench, {"train.py": "x", "lib/a.py": "y", "runs/old.txt": "o"}, mtime=MTIME)
    write_source(bench, {"runs/new/log.txt": "1", "taken.pt": "2", "data/a": "3", "data/b/c": "4", "lib/b.txt": "5"})
    write_source(
        bench, {"weights/w.pt": "6", "weights/notes": "7", "lib/__pycache__/a.pyc": "8", "lib/a.py": "changed"}
    )
    (source_of(bench.state, RUN) / "runs" / "key").symlink_to("/etc/hostname")
    bench.outputs.take_source(bench.plan)
    bench.outputs.take_source(bench.plan)
    assert not source_of(bench.state, RUN).exists()  # the next generation's tree has this path
    for _ in range(2):
        missing = await bench.outputs.upload_all(bench.plan, bench.here)
        assert {output.path: output.cause for output, _ in missing} == {
            "data/": OutputCause.NOT_KEPT,
            "lib/a.py": OutputCause.NOT_KEPT,
            "lib/b.txt": OutputCause.NOT_KEPT,
            "runs/key": OutputCause.OUTSIDE,
            "taken.pt": OutputCause.NAME,
            "weights/notes": OutputCause.NOT_KEPT,
        }
        assert bench.stored == {
            "output/gen=3/rank=0/taken.pt": b"own",
            "output/gen=3/rank=0/runs/new/log.txt": b"1",
            "output/gen=3/rank=0/weights/w.pt": b"6",
        }
    bench.outputs.forget_source(bench.plan)
    assert await bench.outputs.upload_all(bench.plan, bench.here) == ()


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("runs", {"runs/a", "runs/b/c.pt"}),
        ("runs/**", {"runs/a", "runs/b/c.pt"}),
        ("log.txt", {"log.txt"}),
        ("*.pt", {"runs/b/c.pt", "m.pt"}),
        ("runs/*.pt", {"runs/b/c.pt"}),
        ("none", set[str]()),
    ],
)
async def test_a_pattern_names_a_file_a_folder_or_has_one_star(bench: Bench, pattern: str, kept: set[str]) -> None:
    names = {"runs/a", "runs/b/c.pt", "log.txt", "m.pt", "runs2"}
    keep(bench, pattern, shipped={"train.py": "x"})
    bench.files(0)
    write_source(bench, dict.fromkeys(names, "1"))
    bench.outputs.take_source(bench.plan)
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    assert set(bench.stored) == {f"output/gen=3/rank=0/{name}" for name in kept}
    named = {output.path for output, _ in missing}
    others = names - kept
    assert all(name in named or any(each.endswith("/") and name.startswith(each) for each in named) for name in others)
    assert all(output.cause is OutputCause.NOT_KEPT for output, _ in missing)


async def test_the_agents_work_for_one_folder_is_bounded(bench: Bench) -> None:
    for number in range(outputs.MAX_ENTRIES + 20):
        (bench.files(0).output_dir / f"{number}").touch()
        (bench.files(1).output_dir / f"folder-{number}").mkdir(parents=True)
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    assert [(output.rank, output.cause) for output, _ in missing] == [
        (0, OutputCause.TOO_MANY),
        (1, OutputCause.TOO_MANY),
    ]
    assert len(bench.stored) == outputs.MAX_ENTRIES


async def test_kept_files_are_stored_if_the_archive_cannot_be_read(bench: Bench) -> None:
    keep(bench, "*.pt", shipped={"train.py": "x"})
    bench.archives.keep(())
    bench.files(0)
    write_source(bench, {"a.pt": "1", "train.py": "x", "log": "2"})
    bench.outputs.take_source(bench.plan)
    assert await bench.outputs.upload_all(bench.plan, bench.here) == ()
    assert bench.stored == {"output/gen=3/rank=0/a.pt": b"1"}


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
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    for output, sentence in missing:
        # the agent sends both in a report, and would end if the encoding failed
        encode(NodeFault(code="output_missing", message=sentence, is_permanent=False, output=output))
    assert bench.stored == {"output/gen=3/rank=0/real.txt": b"real", "output/gen=3/rank=0/inside": b"real"}
    # The link with the odd name is broken, too.
    assert {output.path: output.cause for output, _ in missing} == {
        **dict.fromkeys(("'caf\\udce9'", "dangling", "loop", "pipe"), OutputCause.NOT_A_FILE),
        **dict.fromkeys(("folder", "outside"), OutputCause.OUTSIDE),
    }


async def test_a_folder_that_cannot_be_read_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = bench.files(0).output_dir / "closed"
    closed.mkdir()
    (closed / "model").write_text("x")
    (bench.files(0).output_dir / "open").write_text("x")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if os.fspath(path) == str(closed.resolve()):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    ((output, _),) = await bench.outputs.upload_all(bench.plan, bench.here)
    assert (output.path, output.cause, output.generation) == ("closed", OutputCause.UNREADABLE, bench.plan.generation)
    assert bench.stored == {"output/gen=3/rank=0/open": b"x"}


async def test_sockets_long_names_and_a_missing_folder_end_no_upload(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = bench.files(0).output_dir
    with socket.socket(socket.AF_UNIX) as made:
        monkeypatch.chdir(out)  # A socket's path has at most 107 bytes.
        made.bind("s")
        (out / ("n" * 255)).write_text("x")
        (out / "two\nlines").write_text("x")
        Path(os.fsdecode(os.fsencode(out) + b"/bad\xff.txt")).write_text("x")
        bench.files(1).output_dir.rmdir()
        missing = await bench.outputs.upload_all(bench.plan, bench.here)
    assert {output.path: output.cause for output, _ in missing} == {
        "s": OutputCause.NOT_A_FILE,
        "'bad\\udcff.txt'": OutputCause.NAME,
    }
    assert len(bench.stored) == 2


@pytest.mark.security
async def test_deep_folders_and_chains_of_links_are_reported_and_do_not_stop_the_upload(bench: Bench) -> None:
    out = bench.files(0).output_dir
    nest(out / "deep")
    for number in range(1_500):
        (out / f"link-{number}").symlink_to(f"link-{number + 1}")
    (out / "link-1500").touch()
    (out / "model").write_text("x")
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    assert missing[0][0].cause is OutputCause.NOT_A_FILE
    assert bench.stored.keys() >= {"output/gen=3/rank=0/model", "output/gen=3/rank=0/link-1490"}
    for number in range(1_500):
        (out / f"link-{number}").unlink()
    ((output, words),) = await bench.outputs.upload_all(bench.plan, bench.here)
    assert (output.path, output.cause) == ("/".join(["deep", *["ab"] * 100]), OutputCause.UNREADABLE)
    assert "below more than 100 folders" in words
    bench.outputs.forget(RUN)
    assert not out.exists()


async def test_of_many_outputs_that_are_missing_some_are_named(bench: Bench) -> None:
    """The agent names only some of many missing outputs, because the control plane rejects large reports."""
    for number in range(MAX_UNSTORED + 5):
        (bench.files(0).output_dir / f"link-{number}").symlink_to("nowhere")
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    assert len(missing) == MAX_UNSTORED
    assert [output.omitted_count for output, _ in missing] == [*[0] * (MAX_UNSTORED - 1), 5]
    assert missing[-1][1].endswith("; 5 more outputs are not in S3")


async def test_a_refused_output_is_reported_and_the_others_are_uploaded(bench: Bench) -> None:
    calls: list[str] = []

    class Failing(MemoryObjectStore):
        def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
            name = reference.key.rpartition("/")[2]
            calls.append(name)
            if name == "denied":
                raise StoreDenied("no")
            if name == "unavailable":
                raise StoreUnavailable("503")
            return super().put_file(reference, path, size)

    bench.objects = Failing("bucket")
    bench.outputs = RankOutputs(bench.state, bench.objects, bench.archives.files, retry_seconds=0.0)
    for name in ("denied", "unavailable", "stored"):
        (bench.files(0).output_dir / name).write_text("x")
    missing = await bench.outputs.upload_all(bench.plan, bench.here)
    found = [(output.rank, output.path, output.cause) for output, _ in missing]
    assert found == [(0, "denied", OutputCause.REFUSED), (0, "unavailable", OutputCause.REFUSED)]
    assert set(bench.stored) == {"output/gen=3/rank=0/stored"}
    assert (calls.count("denied"), calls.count("unavailable")) == (1, outputs.MAX_ATTEMPTS)


async def test_a_forgotten_run_leaves_nothing(bench: Bench) -> None:
    bench.files(0).stdout.write_text("x")
    bench.outputs.forget(RUN)
    assert not list(bench.state.rglob("*rank=*"))
    bench.outputs.forget(RUN)
