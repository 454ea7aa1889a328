"""Defines the manifest of a checkpoint, which lists the S3 objects of all its shards.

The control plane writes the manifest after all shards are complete.

Keys, below the job's checkpoint prefix:

    run=<run>/gen=<g>/step=<k>/<upload id>/rank=<r>.safetensors
    run=<run>/gen=<g>/step=<k>/manifest.json

Invariant: the manifest is written after every object that it names. Objects that no manifest names are garbage.
"""

from __future__ import annotations

import hashlib

import msgspec

from everstep.protocol.errors import MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step


class PartsHasher:
    """Computes `ManifestShard.sha256` from the content of an object, in order.

    Args:
        part_bytes: size of a part in bytes, above 0, as in `ManifestShard.part_bytes`.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._part = hashlib.sha256()
        self._left = part_bytes
        self._whole = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the object."""
        view = memoryview(data)
        while len(view):
            if not self._left:
                self._end_part()
            taken = view[: self._left]
            self._part.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]

    def hexdigest(self) -> str:
        """Return the digest of all bytes; call it once."""
        self._end_part()
        return self._whole.hexdigest()

    def _end_part(self) -> None:
        self._whole.update(self._part.digest())
        self._part, self._left = hashlib.sha256(), self._part_bytes


class ManifestShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object of one rank's shard."""

    rank: Rank
    key: str
    object_bytes: int
    etag: str
    payload_bytes: int
    payload_digest: str
    """`slot.shard_digest` of the slot's payload, hexadecimal. A restored slot must match it."""
    layout_hash: str
    origin_generation: Generation
    sha256: str = ""
    """Hexadecimal SHA-256 of the concatenated SHA-256 digests of the object's parts.

    A reader that has the digests of all other parts can verify a single part.
    """
    part_bytes: int = 0
    """Size of the parts that `sha256` covers; the last part may be smaller."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The complete set of shards of one step."""

    version: int
    job: JobName
    run: RunId
    generation: Generation
    parent_chain: tuple[tuple[Generation, Step], ...]
    """(generation, base step) pairs, from this generation back to the first."""
    step: Step
    shards: tuple[ManifestShard, ...]


_MANIFEST = msgspec.json.Decoder(CheckpointManifest)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Return the manifest that is encoded in `data`.

    Args:
        data: content of the stored object.

    Returns:
        The manifest, with its shards in rank order.

    Raises:
        MalformedMessage: the data is not a manifest, or ranks are missing or duplicated.
        UnknownVersion: this process does not support the manifest's version.
    """
    try:
        manifest = _MANIFEST.decode(data)
    except (
        msgspec.ValidationError,
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:
        # msgspec raises UnicodeDecodeError for a key that is not UTF-8.
        raise MalformedMessage(f"not a checkpoint manifest: {error}") from error
    if manifest.version != 1:
        raise UnknownVersion(f"a checkpoint manifest has the unsupported version {manifest.version}")
    if [shard.rank for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise MalformedMessage("a checkpoint manifest must list ranks 0 to n-1")
    if any(shard.sha256 and shard.part_bytes <= 0 for shard in manifest.shards):
        raise MalformedMessage("a checkpoint manifest has a SHA-256 without the size of its parts")
    return manifest
