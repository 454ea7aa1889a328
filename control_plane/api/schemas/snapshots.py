"""API models: snapshots that a running job keeps in memory for an export."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import OfRun, Request, Shape

SNAPSHOT_ID = r"^[0-9]{1,10}-[0-9]{1,19}-[0-9a-f]{32}$"
"""Pattern of a snapshot's id: generation, step and a random number."""


class HoldSnapshotRequest(Request):
    """A request to keep a snapshot in memory, or to keep an already held snapshot for longer."""

    snapshot_id: Annotated[str | None, StringConstraints(pattern=SNAPSHOT_ID)] = None
    """A snapshot whose hold this request extends.

    Without this field, the request begins a new hold of the newest committed step.
    """
    client_request_token: Annotated[
        str | None,
        StringConstraints(min_length=1, max_length=64),
        Field(json_schema_extra={"x-idempotency-token": True}),
    ] = None
    """Identifies the request.

    A repeated request with the same token returns the same hold. After the hold has ended, the service rejects the
    token.
    """


class HeldShard(Shape):
    """The shard of one rank, which its node keeps in memory during the export.

    ReadSnapshot returns the shard in the format of a checkpoint's object in S3.
    """

    rank: int
    origin_generation: int
    object_bytes: int = Field(ge=0)
    payload_bytes: int = Field(ge=0)
    payload_digest: str
    """Digest of the shard in hexadecimal, computed as docs/reference/checkpoint-format.md describes."""
    layout_hash: str


class HoldSnapshotResponse(OfRun):
    """The snapshots of all ranks at one committed step. The nodes keep them in memory until the export ends."""

    snapshot_id: str
    generation: int
    step: int
    hold_in_seconds: int
    """Seconds from the last HoldSnapshot or ReadSnapshot until the hold ends. ReleaseSnapshot ends it earlier."""
    max_read_bytes: int
    """Maximum number of bytes that one ReadSnapshot returns."""
    shards: list[HeldShard]
    """The held shards of all ranks, in the order of ranks."""


class ReleaseSnapshotResponse(Shape):
    """Confirms that the nodes need not keep the snapshot in memory any more."""

    snapshot_id: str
