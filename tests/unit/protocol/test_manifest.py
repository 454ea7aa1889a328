"""Checkpoint manifests: a complete manifest of this version is accepted, any other is refused."""

from __future__ import annotations

import msgspec
import pytest

from everstep.protocol.errors import MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.manifest import CheckpointManifest, ManifestShard, decode_manifest, encode_manifest


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


def manifest(*ranks: int, version: int = 1) -> CheckpointManifest:
    return CheckpointManifest(
        version=version,
        job=JobName("gpt"),
        run=RunId("ab" * 16),
        generation=Generation(2),
        parent_chain=((Generation(2), Step(5)), (Generation(1), Step(0))),
        step=Step(9),
        shards=tuple(shard(rank) for rank in ranks),
    )


def test_it_comes_back() -> None:
    assert decode_manifest(encode_manifest(manifest(0, 1))) == manifest(0, 1)


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 0), (1, 0)])
def test_missing_doubled_and_disordered_ranks_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage, match="ranks"):
        decode_manifest(encode_manifest(manifest(*ranks)))


def test_another_version_is_refused() -> None:
    with pytest.raises(UnknownVersion):
        decode_manifest(encode_manifest(manifest(0, version=2)))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_manifest(data)


def test_an_unknown_field_is_refused() -> None:
    fields = msgspec.json.decode(encode_manifest(manifest(0)))
    with pytest.raises(MalformedMessage, match="surprise"):
        decode_manifest(msgspec.json.encode({**fields, "surprise": 1}))
