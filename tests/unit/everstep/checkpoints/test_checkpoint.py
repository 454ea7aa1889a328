"""Logical tensors are read whole from shards of any layout, and damaged bytes are never returned."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.errors import CheckpointError, CorruptCheckpoint, StoreFailure
from everstep.protocol.manifest import decode_manifest, encode_manifest
from everstep.protocol.parts import TensorPart, parts_of_range
from everstep.protocol.safetensors import LENGTH
from everstep.protocol.slot import CHUNK_BYTES
from tests.unit.everstep.checkpoints.stored import FOLDER, Stored, store, with_text

RANDOM = np.random.default_rng(7)


def array(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def read(manifest: Path, name: str) -> np.ndarray:
    with open_checkpoint(str(manifest)) as checkpoint:
        tensor = checkpoint.tensors[name]
        return np.frombuffer(checkpoint.read(tensor), tensor.dtype).reshape(tensor.shape)


@given(
    st.lists(st.integers(1, 5), max_size=3), st.lists(st.integers(0, 125), min_size=0, max_size=4), st.integers(0, 3)
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_flat_ranges_of_any_ranks_become_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], cuts: list[int], padding: int
) -> None:
    """With ZeRO, each rank saves a flat range of all parameters, with padding.

    The ranges combine to the whole tensors.
    """
    whole, other = array(*shape), array(3)
    count = whole.size
    edges = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    ranks = {}
    for rank, (begin, end) in enumerate(itertools.pairwise(edges)):
        flat = np.concatenate([np.zeros(padding, np.float32), whole.ravel()[begin:end], other])
        parts = parts_of_range("model/w", tuple(shape), begin, end, padding)
        parts += parts_of_range("model/b", (3,), 0, 3, padding + end - begin)
        ranks[rank] = [Stored("model/master0", flat, parts)]
    manifest = store(tmp_path_factory.mktemp("checkpoint"), ranks)
    assert np.array_equal(read(manifest, "model/w"), whole)
    assert np.array_equal(read(manifest, "model/b"), other)


def test_boxes_of_two_dimensions_become_the_tensor(tmp_path: Path) -> None:
    whole = array(5, 7)
    ranks = {}
    for rank, (rows, columns) in enumerate([((0, 3), (0, 4)), ((0, 3), (4, 7)), ((3, 5), (0, 4)), ((3, 5), (4, 7))]):
        offsets, sizes = (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
        local = np.ascontiguousarray(whole[slice(*rows), slice(*columns)])
        ranks[rank] = [Stored("model/w", local, (TensorPart("model/w", (5, 7), offsets, sizes, 0),))]
    assert np.array_equal(read(store(tmp_path, ranks), "model/w"), whole)


def test_tensors_of_many_chunks_are_read_whole(tmp_path: Path) -> None:
    first, second = array(CHUNK_BYTES // 4 + 3), array(3 * CHUNK_BYTES // 4 + 5)
    manifest = store(tmp_path, {0: [Stored("model/a", first), Stored("model/b", second)]})
    assert np.array_equal(read(manifest, "model/a"), first)
    assert np.array_equal(read(manifest, "model/b"), second)


def test_replicated_tensors_are_taken_from_one_rank_and_tensors_of_one_rank_are_left_out(tmp_path: Path) -> None:
    whole = array(4)
    rng = Stored("value/rng", array(2))
    manifest = store(tmp_path, {rank: [Stored("model/w", whole + rank), rng] for rank in range(2)})
    with open_checkpoint(str(manifest)) as checkpoint:
        assert list(checkpoint.tensors) == ["model/w"]
        assert [box.rank for box in checkpoint.tensors["model/w"].boxes] == [0]


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    """The test flips each byte of an object in turn.

    Reading the tensors must fail, unless the byte is unused padding.
    """
    whole = array(3, 5)
    manifest = store(tmp_path, {0: [Stored("model/w", whole)]})
    (path,) = tmp_path.rglob("*.safetensors")
    good = path.read_bytes()
    refused = 0
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        try:
            found = read(manifest, "model/w")
        except CorruptCheckpoint:
            refused += 1
        else:
            assert np.array_equal(found, whole), position
    assert refused >= whole.nbytes
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(CheckpointError):
            read(manifest, "model/w")


def test_an_index_that_was_changed_is_refused_although_each_chunk_of_data_is_whole(tmp_path: Path) -> None:
    """Reading fails if the names of two tensors in the object's header are exchanged.

    The digest of every chunk of data is still correct, so only the header's digest can show the change.
    """
    count = 2 * CHUNK_BYTES // 4
    manifest = store(tmp_path, {0: [Stored("model/a", array(count)), Stored("model/b", array(count))]})
    (path,) = tmp_path.rglob("*.safetensors")
    data = path.read_bytes()
    (length,) = LENGTH.unpack_from(data)
    header = json.loads(data[LENGTH.size : LENGTH.size + length])
    index = base64.b64decode(header["__metadata__"]["index"])
    changed = index.replace(b"model/a", b"model/x").replace(b"model/b", b"model/a").replace(b"model/x", b"model/b")
    header["__metadata__"]["index"] = base64.b64encode(changed).decode()
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(data[: LENGTH.size] + text.ljust(length) + data[LENGTH.size + length :])
    with pytest.raises(CorruptCheckpoint, match="do not hash to their digest"):
        open_checkpoint(str(manifest))


def test_shards_of_two_ranks_that_change_places_are_refused(tmp_path: Path) -> None:
    manifest = store(tmp_path, {rank: [Stored("model/w", array(4))] for rank in range(2)})
    one, two = sorted(tmp_path.rglob("*.safetensors"))
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    with pytest.raises(CorruptCheckpoint, match="another shard than the manifest names"):
        open_checkpoint(str(manifest))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(0, 3)], "hold 3 elements of the 5"),
        ([(0, 3), (2, 4)], "hold 5 elements of the 5"),
        ([(0, 3), (2, 5)], "hold 6 elements of the 5"),
    ],
    ids=["a part is missing", "a part is missing and another twice", "parts overlap"],
)
def test_parts_that_do_not_make_a_tensor_make_it_incomplete(
    tmp_path: Path, parts: list[tuple[int, int]], reason: str
) -> None:
    whole = array(5)
    ranks = {
        rank: [Stored("x", whole[begin:end], parts_of_range("model/w", (5,), begin, end, 0))]
        for rank, (begin, end) in enumerate(parts)
    }
    other = array(2)
    ranks[0].append(Stored("model/other", other))
    manifest = store(tmp_path, ranks)
    with open_checkpoint(str(manifest)) as checkpoint:
        assert list(checkpoint.incomplete) == ["model/w"]
        assert reason in checkpoint.incomplete["model/w"]
        assert list(checkpoint.tensors) == ["model/other"]
    assert np.array_equal(read(manifest, "model/other"), other)


def test_a_tensor_about_which_ranks_contradict_each_other_is_incomplete(tmp_path: Path) -> None:
    ranks = {0: [Stored("model/w", array(4))], 1: [Stored("model/w", array(2, 2))]}
    with open_checkpoint(str(store(tmp_path, ranks))) as checkpoint:
        assert checkpoint.incomplete == {"model/w": "model/w is float32[4] on one rank and float32[2, 2] on rank 1"}
        assert checkpoint.tensors == {}


def test_a_manifest_that_names_objects_elsewhere_is_refused(tmp_path: Path) -> None:
    manifest = store(tmp_path, {0: [Stored("model/w", array(4))]})
    good = manifest.read_bytes()
    for other in (f"jobs/job/checkpoints/{FOLDER}../../secret", "elsewhere/rank=0.safetensors"):
        key = f"jobs/job/checkpoints/{FOLDER}{0:016x}/rank=0.safetensors"
        manifest.write_bytes(with_text(good, key, other))
        with pytest.raises(CorruptCheckpoint, match="outside of its folder"):
            open_checkpoint(str(manifest))


def test_what_does_not_exist_or_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreFailure, match=r"nothing: No such file or directory"):
        open_checkpoint(str(tmp_path / "nothing"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="not a checkpoint manifest"):
        open_checkpoint(str(tmp_path / "other.json"))
    with pytest.raises(StoreFailure, match=r"neither a path nor s3://bucket/key"):
        open_checkpoint("ftp://host/file")


def test_safetensors_alone_can_read_the_tensors_of_a_shard(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    whole = array(2, 3)
    store(tmp_path, {0: [Stored("model/w", whole)]})
    (path,) = tmp_path.rglob("*.safetensors")
    assert np.array_equal(safetensors.load_file(path)["model/w"], whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"job": "job"', '"job": "other"'), ('"origin_generation": 2', '"origin_generation": 1'), ("0001", "0002")],
    ids=["another job", "another generation", "another layout"],
)
def test_a_manifest_that_contradicts_the_header_of_an_object_is_refused(tmp_path: Path, old: str, new: str) -> None:
    manifest = store(tmp_path, {0: [Stored("model/w", array(4))]})
    manifest.write_bytes(with_text(manifest.read_bytes(), old, new))
    with pytest.raises(CorruptCheckpoint, match="is a shard of"):
        open_checkpoint(str(manifest))


def test_an_older_checkpoint_in_the_folder_of_a_newer_one_is_refused(tmp_path: Path) -> None:
    """An older manifest is refused in a folder with the name of a newer step.

    If the folder's name contains no step, the reader accepts the manifest.
    """
    manifest = store(tmp_path, {0: [Stored("model/w", array(4))]})
    copied = manifest.parent.rename(manifest.parent.with_name("step=8")) / manifest.name
    with pytest.raises(CorruptCheckpoint, match=r"is the manifest of another checkpoint: run=\w+/gen=3/step=7/"):
        open_checkpoint(str(copied))
    renamed = copied.parent.rename(copied.parent.with_name("mine")) / manifest.name
    with open_checkpoint(str(renamed)) as checkpoint:
        assert list(checkpoint.tensors) == ["model/w"]


def frozen_ranks() -> dict[int, list[Stored]]:
    """Return the tensors of two ranks. `shared` is frozen on both, and `divided` is frozen and divided between them."""
    shared, divided = array(40, 3), array(8, 5)
    return {
        rank: [
            Stored(f"model/first{rank}", array(7)),
            Stored("model/shared", shared, is_frozen=True),
            Stored("model/lora", np.float32(rank)),
            Stored(
                "model/divided",
                divided[4 * rank : 4 * rank + 4],
                (TensorPart("model/divided", (8, 5), (4 * rank, 0), (4, 5), 0),),
                is_frozen=True,
            ),
        ]
        for rank in range(2)
    }


def test_frozen_tensors_are_read_from_their_objects(tmp_path: Path) -> None:
    ranks = frozen_ranks()
    manifest = store(tmp_path, ranks)
    assert len(list(tmp_path.glob("**/frozen/*.safetensors"))) == 2
    assert np.array_equal(read(manifest, "model/shared"), ranks[0][1].data)
    assert np.array_equal(read(manifest, "model/divided"), np.concatenate([ranks[0][3].data, ranks[1][3].data]))
    assert np.array_equal(read(manifest, "model/first1"), ranks[1][0].data)


def test_frozen_tensors_of_many_chunks_are_read_and_streamed_whole(tmp_path: Path) -> None:
    large = array(3 * CHUNK_BYTES // 4 + 77)
    tensors = [Stored("model/a", array(5)), Stored("model/large", large, is_frozen=True), Stored("model/b", array(9))]
    manifest = store(tmp_path, {0: tensors})
    assert np.array_equal(read(manifest, "model/large"), large)
    with open_checkpoint(str(manifest)) as checkpoint:
        streamed = b"".join(piece for _, piece in checkpoint.stream(checkpoint.tensors.values()))
    assert streamed == b"".join(stored.data.tobytes() for stored in tensors)


def test_every_flipped_byte_of_a_frozen_object_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    ranks = frozen_ranks()
    manifest = store(tmp_path, ranks)
    path = min(tmp_path.glob("**/frozen/*.safetensors"))
    whole, refused = path.read_bytes(), 0
    (length,) = LENGTH.unpack_from(whole)
    for position in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[position] ^= 4
        path.write_bytes(changed)
        try:
            assert np.array_equal(read(manifest, "model/shared"), ranks[0][1].data)
            assert np.array_equal(read(manifest, "model/divided")[:4], ranks[0][3].data)
            assert np.array_equal(read(manifest, "model/divided")[4:], ranks[1][3].data)
        except CorruptCheckpoint:
            refused += 1
        else:
            assert position < LENGTH.size + length, "a reader does not need the header of a frozen object"
    assert refused >= (len(whole) - LENGTH.size - length) // 5


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"x", None], ids=["cut", "long", "none"]
)
def test_a_frozen_object_of_another_size_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes] | None) -> None:
    manifest = store(tmp_path, frozen_ranks())
    path = min(tmp_path.glob("**/frozen/*.safetensors"))
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=path.name):
        open_checkpoint(str(manifest))


def test_a_shard_whose_frozen_object_the_manifest_lacks_is_refused(tmp_path: Path) -> None:
    manifest = store(tmp_path, frozen_ranks())
    whole = decode_manifest(manifest.read_bytes())
    manifest.write_bytes(encode_manifest(msgspec.structs.replace(whole, frozen=whole.frozen[:1])))
    with pytest.raises(CorruptCheckpoint, match="which the manifest lacks"):
        open_checkpoint(str(manifest))


def test_a_copy_of_a_checkpoint_alone_has_its_frozen_objects_inside(tmp_path: Path) -> None:
    manifest = store(tmp_path, ranks := frozen_ranks())
    copied = tmp_path / "copied"
    shutil.copytree(manifest.parent, copied)
    shutil.copytree(manifest.parents[2] / "frozen", copied / "frozen")
    assert np.array_equal(read(copied / "manifest.json", "model/shared"), ranks[0][1].data)


def test_replicated_tensors_are_read_from_their_object_also_in_a_copy_of_the_folder(tmp_path: Path) -> None:
    bias = np.arange(40, dtype=np.float32)
    ranks = {
        rank: [
            Stored("model/equal", bias, is_replicated=True),
            Stored(f"model/own{rank}", np.full(3, rank, dtype=np.float32)),
        ]
        for rank in range(2)
    }
    manifest = store(tmp_path / "bucket", ranks)
    assert len(list(manifest.parent.glob("replicated/*.safetensors"))) == 1
    copied = shutil.copytree(manifest.parent, tmp_path / "copied")
    for each in (manifest, copied / "manifest.json"):
        assert np.array_equal(read(each, "model/equal"), bias)
        assert np.array_equal(read(each, "model/own1"), ranks[1][1].data)


def test_safetensors_alone_can_read_the_tensors_of_all_objects_of_a_manifest(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    manifest = store(tmp_path, ranks := frozen_ranks())
    facts = json.loads(manifest.read_text())
    assert facts["version"] == 4
    shared = [safetensors.load_file(tmp_path / each["key"]) for each in facts["frozen"]]
    for rank, shard in enumerate(facts["shards"]):
        own = safetensors.load_file(tmp_path / shard["key"])
        assert {*own} == {f"model/first{rank}", "model/lora"}
        assert any(np.array_equal(each["model/divided"], ranks[rank][3].data) for each in shared)
