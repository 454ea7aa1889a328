"""Defines the manifest of a checkpoint, which lists the S3 objects of all its shards.

Keys, below the job's checkpoint prefix:

    run=<run>/gen=<g>/step=<k>/<upload id>/rank=<r>.safetensors
    run=<run>/gen=<g>/step=<k>/manifest.json
    run=<run>/gen=<g>/step=<k>/replicated/<sha256>.safetensors
    run=<run>/frozen/<sha256>.safetensors

A frozen object holds tensors that training does not change. All checkpoints of the run refer to the same frozen
objects. A replicated object holds tensors that are equal on several ranks at one step.

Invariants: the control plane writes the manifest after every object that the manifest names. Objects that no manifest
names may be deleted. From version 4, a manifest contains a digest of its content, which readers verify.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from everstep.protocol.errors import UNDECODABLE, MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.limits import Count, HexDigest, Path

MANIFEST_VERSION: Final = 4
"""Everstep still reads versions 1 to 3, which contain no digest, but does not write them."""


class PartsHasher:
    """Computes `ManifestShard.sha256` from the content of an object, in order. `part_bytes` is above 0."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._part = hashlib.sha256()
        self._left = part_bytes
        self._whole = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the object to the digest."""
        view = memoryview(data)
        while len(view):
            if not self._left:
                self._end_part()
            taken = view[: self._left]
            self._part.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]

    def hexdigest(self) -> str:
        """Return the digest of all bytes passed to `update`. Call this once, after the last `update`."""
        self._end_part()
        return self._whole.hexdigest()

    def _end_part(self) -> None:
        self._whole.update(self._part.digest())
        self._part, self._left = hashlib.sha256(), self._part_bytes


class ManifestShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's entry for the S3 object of one rank's shard."""

    rank: Rank
    key: str
    object_bytes: int
    etag: str
    payload_bytes: int
    payload_digest: str
    """`slot.shard_digest` of the payload, hexadecimal. A restored slot must have this digest."""
    layout_hash: str
    origin_generation: Generation
    sha256: str = ""
    """Hexadecimal SHA-256 of the concatenated SHA-256 digests of the object's parts."""
    part_bytes: int = 0
    """Size of the parts; the last part may be smaller."""


class SharedObject(msgspec.Struct, frozen=True):
    """A frozen or replicated object with tensors that several shards refer to."""

    key: Path
    """`…/frozen/<sha256>.safetensors` or `…/replicated/<sha256>.safetensors`, in the manifest's bucket."""
    object_bytes: Count
    sha256: HexDigest


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a manifest: the complete set of shards of one step in S3."""

    version: int
    job: JobName
    run: RunId
    generation: Generation
    parent_chain: tuple[tuple[Generation, Step], ...]
    """Pairs of a generation and the step that it restored, back to the run's first generation."""
    step: Step
    shards: tuple[ManifestShard, ...]
    frozen: tuple[SharedObject, ...] = ()
    """Sorted by SHA-256."""
    replicated: tuple[SharedObject, ...] = ()
    """Sorted by SHA-256."""

    @property
    def shared(self) -> tuple[SharedObject, ...]:
        """All frozen and replicated objects."""
        return (*self.frozen, *self.replicated)


class _StoredManifest(CheckpointManifest, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    sha256: str = ""
    """SHA-256 of the manifest without this field, as JSON without blanks, hexadecimal. Empty before version 4."""


def frozen_key(shard_key: str, sha256: str) -> str:
    """Return the S3 key of a frozen object of the run, whose hexadecimal SHA-256 is given. Raises MalformedMessage if
    `shard_key` is not the key of a shard of the run.
    """
    return f"{_shard_key(shard_key)['run']}frozen/{sha256}.safetensors"


def replicated_key(shard_key: str, sha256: str) -> str:
    """Return the S3 key of a replicated object of the step of `shard_key`. Errors are those of `frozen_key`."""
    found = _shard_key(shard_key)
    return f"{found['run']}{found['step']}replicated/{sha256}.safetensors"


def _shard_key(shard_key: str) -> re.Match[str]:
    """Return the parts of a shard's key. Raise MalformedMessage if the key does not have the form of a shard's key."""
    found = _SHARD_KEY.fullmatch(shard_key)
    if found is None:
        raise MalformedMessage(f"{shard_key} is not the key of a shard, so its shared objects cannot be found")
    return found


_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)
_SHARD_KEY = re.compile(r"(?P<run>.*)(?P<step>gen=\d+/step=\d+/)[^/]+/rank=\d+\.safetensors", re.ASCII | re.DOTALL)
_MANIFEST = msgspec.json.Decoder(_StoredManifest)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return a manifest of `MANIFEST_VERSION` as JSON, with its digest."""
    return _formatted(_StoredManifest(**msgspec.structs.asdict(manifest), sha256=_digest(manifest)))


def _formatted(manifest: CheckpointManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _digest(manifest: CheckpointManifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def _old_version(frozen: Sequence[SharedObject], replicated: Sequence[SharedObject]) -> int:
    """Return the version below 4 that a manifest with these objects has."""
    if replicated:
        return 3
    return 2 if frozen else 1


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Return the manifest that is encoded in `data`, with its shards in rank order. Raises MalformedMessage if the data
    is not a manifest, its content does not match its digest, or ranks are missing or duplicated. Raises UnknownVersion
    if this process does not support the manifest's version.
    """
    try:
        stored = _MANIFEST.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(f"not a checkpoint manifest: {error}") from error
    manifest = CheckpointManifest(**{name: getattr(stored, name) for name in CheckpointManifest.__struct_fields__})
    if not 1 <= manifest.version <= MANIFEST_VERSION:
        raise UnknownVersion(f"a checkpoint manifest has the unsupported version {manifest.version}")
    if stored.sha256 != (_digest(manifest) if manifest.version == MANIFEST_VERSION else ""):
        raise MalformedMessage("the content of a checkpoint manifest does not match the digest in it")
    if manifest.version < MANIFEST_VERSION and manifest.version != _old_version(manifest.frozen, manifest.replicated):
        raise MalformedMessage(
            "a checkpoint manifest before version 4 must have version 3 if it names replicated objects, 2 if it names "
            "frozen objects only, and otherwise 1"
        )
    for named in ([each.sha256 for each in manifest.frozen], [each.sha256 for each in manifest.replicated]):
        if named != sorted(set(named)):
            raise MalformedMessage("a checkpoint manifest must list its shared objects by SHA-256, each once")
        if any(_SHA256.fullmatch(sha256) is None for sha256 in named):
            raise MalformedMessage(
                "a checkpoint manifest has a shared object whose SHA-256 is not 64 hexadecimal digits"
            )
    folders = {_shard_key(shard.key).group("run", "step") for shard in manifest.shards} if manifest.shared else ()
    if any(each.key != f"{run}frozen/{each.sha256}.safetensors" for run, _ in folders for each in manifest.frozen):
        raise MalformedMessage("a checkpoint manifest names a frozen object of another run than its shards")
    if any(
        each.key != f"{run}{step}replicated/{each.sha256}.safetensors"
        for run, step in folders
        for each in manifest.replicated
    ):
        raise MalformedMessage("a checkpoint manifest names a replicated object of another step than its shards")
    if [shard.rank for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise MalformedMessage("a checkpoint manifest must list ranks 0 to n-1")
    if any(shard.sha256 and shard.part_bytes <= 0 for shard in manifest.shards):
        raise MalformedMessage("a checkpoint manifest has a SHA-256 without the size of its parts")
    return manifest
