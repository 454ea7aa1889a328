"""A reader accepts a complete checkpoint manifest of this version, and refuses any other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import msgspec
import pytest

from everstep.protocol.errors import MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.manifest import (
    MANIFEST_VERSION,
    CheckpointManifest,
    ManifestShard,
    SharedObject,
    decode_manifest,
    encode_manifest,
    frozen_key,
    replicated_key,
)


def shard(rank: int) -> ManifestShard:
    return ManifestShard(
        rank=Rank(rank),
        key=f"rank={rank}.safetensors",
        object_bytes=10,
        etag="e",
        payload_bytes=9,
        payload_digest="ab" * 16,
        layout_hash="cd" * 16,
        origin_generation=Generation(2),
    )


def manifest(*ranks: int, version: int = MANIFEST_VERSION) -> CheckpointManifest:
    return CheckpointManifest(
        version=version,
        job=JobName("gpt"),
        run=RunId("ab" * 16),
        generation=Generation(2),
        parent_chain=((Generation(2), Step(5)), (Generation(1), Step(0))),
        step=Step(9),
        shards=tuple(shard(rank) for rank in ranks),
    )


def old(written: CheckpointManifest) -> bytes:
    """Return a manifest as versions 1 to 3 stored it: without a digest."""
    return msgspec.json.encode(written)


def test_it_comes_back() -> None:
    assert decode_manifest(encode_manifest(manifest(0, 1))) == manifest(0, 1)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_manifest_of_an_older_version_comes_back(version: int) -> None:
    whole = {1: manifest(0, 1), 2: with_frozen(), 3: with_replicated()}[version]
    whole = msgspec.structs.replace(whole, version=version)
    assert decode_manifest(old(whole)) == whole


def test_a_manifest_without_some_of_its_lines_is_refused_or_the_same() -> None:
    """No part of a manifest can be lost, even if the rest is a manifest of fewer ranks."""
    lines = encode_manifest(with_replicated()).splitlines(keepends=True)
    refused = 0
    for begin, end in combinations(range(len(lines) + 1), 2):
        try:
            found = decode_manifest(b"".join([*lines[:begin], *lines[end:]]))
        except (MalformedMessage, UnknownVersion):
            refused += 1
        else:
            assert found == with_replicated(), (begin, end)  # a line with the default of its field was dropped
    assert refused > 1000


def test_a_manifest_of_fewer_ranks_under_the_digest_of_more_is_refused() -> None:
    fields = msgspec.json.decode(encode_manifest(manifest(0, 1)))
    with pytest.raises(MalformedMessage, match="does not match the digest"):
        decode_manifest(msgspec.json.encode({**fields, "shards": fields["shards"][:1]}))
    with pytest.raises(MalformedMessage, match="does not match the digest"):
        decode_manifest(msgspec.json.encode({**fields, "sha256": ""}))
    with pytest.raises(MalformedMessage, match="does not match the digest"):
        decode_manifest(msgspec.json.encode({**fields, "version": 1}))


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 0), (1, 0)])
def test_missing_doubled_and_disordered_ranks_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage, match="ranks"):
        decode_manifest(encode_manifest(manifest(*ranks)))


def test_another_version_is_refused() -> None:
    with pytest.raises(UnknownVersion):
        decode_manifest(encode_manifest(manifest(0, version=MANIFEST_VERSION + 1)))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_manifest(data)


def test_an_unknown_field_is_refused() -> None:
    fields = msgspec.json.decode(encode_manifest(manifest(0)))
    with pytest.raises(MalformedMessage, match="surprise"):
        decode_manifest(msgspec.json.encode({**fields, "surprise": 1}))


RUN = "jobs/gpt/checkpoints/run=1/"
DIGESTS = ("a" * 64, "b" * 64)


def with_frozen() -> CheckpointManifest:
    """Return a manifest of two ranks whose shards need two frozen objects."""
    plain = manifest(0, 1)
    keys = [f"{RUN}gen=2/step=9/u{number}/rank={number}.safetensors" for number in range(2)]
    return msgspec.structs.replace(
        plain,
        shards=tuple(msgspec.structs.replace(each, key=key) for each, key in zip(plain.shards, keys, strict=True)),
        frozen=tuple(SharedObject(key=frozen_key(keys[0], each), object_bytes=7, sha256=each) for each in DIGESTS),
    )


def test_a_manifest_with_frozen_objects_comes_back() -> None:
    assert decode_manifest(encode_manifest(with_frozen())) == with_frozen()
    assert [each.key for each in with_frozen().frozen] == [f"{RUN}frozen/{each}.safetensors" for each in DIGESTS]


def test_a_manifest_without_frozen_objects_has_no_field_for_them() -> None:
    assert b"frozen" not in encode_manifest(manifest(0))


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: {"frozen": whole.frozen[::-1]},
        lambda whole: {"frozen": whole.frozen[:1] * 2},
        lambda whole: {"frozen": (msgspec.structs.replace(whole.frozen[0], key=f"other/{whole.frozen[0].key}"),)},
        lambda whole: {"frozen": (SharedObject(key=f"{RUN}frozen/../x.safetensors", object_bytes=7, sha256="../x"),)},
        lambda whole: {"shards": (msgspec.structs.replace(whole.shards[0], key="rank=0.safetensors"),)},
        lambda whole: {"shards": (msgspec.structs.replace(whole.shards[0], key=f"x{whole.shards[0].key}"),)},
    ],
    ids=["order", "doubled", "key", "no digest", "foreign shard", "other run"],
)
def test_a_manifest_with_wrong_frozen_objects_is_refused(
    change: Callable[[CheckpointManifest], dict[str, object]],
) -> None:
    whole = with_frozen()
    with pytest.raises(MalformedMessage):
        decode_manifest(encode_manifest(msgspec.structs.replace(whole, **change(whole))))


def with_replicated() -> CheckpointManifest:
    """Return a manifest of two ranks whose shards need two objects of frozen tensors and two of equal tensors."""
    whole = with_frozen()
    key = whole.shards[0].key
    objects = tuple(SharedObject(key=replicated_key(key, each), object_bytes=7, sha256=each) for each in DIGESTS)
    return msgspec.structs.replace(whole, replicated=objects)


def test_a_manifest_with_replicated_objects_comes_back() -> None:
    whole = with_replicated()
    assert decode_manifest(encode_manifest(whole)) == whole
    keys = [each.key for each in whole.replicated]
    assert keys == [f"{RUN}gen=2/step=9/replicated/{each}.safetensors" for each in DIGESTS]
    without_frozen = msgspec.structs.replace(whole, frozen=())
    assert decode_manifest(encode_manifest(without_frozen)) == without_frozen


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: {"replicated": whole.replicated[::-1]},
        lambda whole: {"replicated": whole.replicated[:1] * 2},
        lambda whole: {"replicated": whole.frozen},
        lambda whole: {
            "replicated": (
                SharedObject(
                    key=f"{RUN}gen=2/step=8/replicated/{'a' * 64}.safetensors", object_bytes=7, sha256="a" * 64
                ),
            )
        },
        lambda whole: {
            "replicated": (
                SharedObject(key=f"{RUN}gen=2/step=9/replicated/../x.safetensors", object_bytes=7, sha256="../x"),
            )
        },
        lambda whole: {
            "shards": (msgspec.structs.replace(whole.shards[0], key=whole.shards[0].key.replace("9", "8")),)
        },
    ],
    ids=["order", "doubled", "frozen", "other step", "no digest", "other shard"],
)
def test_a_manifest_with_wrong_replicated_objects_is_refused(
    change: Callable[[CheckpointManifest], dict[str, object]],
) -> None:
    whole = with_replicated()
    with pytest.raises(MalformedMessage):
        decode_manifest(encode_manifest(msgspec.structs.replace(whole, **change(whole))))


@pytest.mark.parametrize(
    ("version", "has_frozen", "has_replicated"),
    [(1, True, False), (1, False, True), (2, False, False), (2, True, True), (3, True, False), (3, False, False)],
)
def test_an_old_version_that_does_not_fit_the_shared_objects_is_refused(
    version: int, has_frozen: bool, has_replicated: bool
) -> None:
    whole = with_replicated()
    changes = {"frozen": whole.frozen if has_frozen else (), "replicated": whole.replicated if has_replicated else ()}
    with pytest.raises(MalformedMessage, match="before version 4"):
        decode_manifest(old(msgspec.structs.replace(whole, version=version, **changes)))
