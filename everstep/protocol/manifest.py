"""The manifest of a checkpoint, which lists the shard objects in S3 that form one complete checkpoint.

The control plane writes the manifest after all shards are complete.

Keys, below the job's checkpoint prefix:

    run=<run>/gen=<g>/step=<k>/<upload id>/rank=<r>.safetensors
    run=<run>/gen=<g>/step=<k>/manifest.json

Invariant: an object without a manifest that names it is garbage. Every named object was complete before the manifest
was written.
"""

from __future__ import annotations

import msgspec

from everstep.protocol.errors import MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step


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
        # UnicodeDecodeError: a key is not UTF-8.
        raise MalformedMessage(f"not a checkpoint manifest: {error}") from error
    if manifest.version != 1:
        raise UnknownVersion(f"a checkpoint manifest has the unsupported version {manifest.version}")
    if [shard.rank for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise MalformedMessage("a checkpoint manifest must list ranks 0 to n-1")
    return manifest
