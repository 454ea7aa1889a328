"""The manifest of a checkpoint: what makes a set of shard objects in S3 one complete checkpoint.

Written last, by the control plane.

Keys, below the job's checkpoint prefix:

    run=<run>/gen=<g>/step=<k>/<upload id>/rank=<r>.safetensors
    run=<run>/gen=<g>/step=<k>/manifest.json

Invariant: an object without a manifest that names it is garbage; a manifest names only objects that were complete
before it was written.
"""

from __future__ import annotations

import msgspec

from everstep.protocol.errors import MalformedMessage, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step


class ManifestShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's object."""

    rank: Rank
    key: str
    object_bytes: int
    etag: str
    payload_bytes: int
    payload_digest: str
    """Of the slot's payload (`slot.shard_digest`), hexadecimal: what a restored slot must hash to."""
    layout_hash: str
    origin_generation: Generation


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete set of shards of one step."""

    version: int
    job: JobName
    run: RunId
    generation: Generation
    parent_chain: tuple[tuple[Generation, Step], ...]
    """(generation, base step) from this generation back to the first."""
    step: Step
    shards: tuple[ManifestShard, ...]


_MANIFEST = msgspec.json.Decoder(CheckpointManifest)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Return the manifest in `data`.

    Args:
        data: the object as it is stored.

    Returns:
        The manifest, its shards in the order of their ranks.

    Raises:
        MalformedMessage: not a manifest, or ranks are missing or doubled.
        UnknownVersion: of a version that this process does not know.
    """
    try:
        manifest = _MANIFEST.decode(data)
    except (
        msgspec.ValidationError,
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:  # the last: a key that is no text
        raise MalformedMessage(f"not a checkpoint manifest: {error}") from error
    if manifest.version != 1:
        raise UnknownVersion(f"a checkpoint manifest of version {manifest.version}")
    if [shard.rank for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise MalformedMessage("a checkpoint manifest whose ranks are not 0 … n-1")
    return manifest
