"""Defines the messages between two agents over TCP: authentication, transfer of shards, and rounds.

Every connection begins with a mutual challenge and response, for which both agents need the generation's key. An agent
without the key can send only the first message.

    dialler                                   listener
    Open(nonce_a, …)              ─────▶
                                  ◀─────      Challenge(nonce_b, mac over "listener", nonce_a, nonce_b, …)
    Answer(mac over "dialler", …) ─────▶
                                  ◀─────      Accepted | Refused

    replica session: ReserveShard ─▶ ; ◀─ ShardReserved ; a shard ─▶
    fetch session:   FetchShard ─▶ ; ◀─ a shard | ShardRefused
    a shard:         BeginShard, ShardDigests …, EndShard ─▶ ; ◀─ ShardWanted … ;
                     chunks on the streams ─▶ ; ◀─ ShardSealed | ShardRefused
                     (before EndShard on a replica session: PrintedLines …)
    upload session:  UploadPart ─▶ ; ◀─ PartStored | ShardRefused, several parts at a time
    load session:    LoadShard ─▶ ; ◀─ ReadyToLoad | ShardRefused ; ObjectHeader …, ShardWanted … ─▶ ;
                     ◀─ chunks on one stream
                     or LoadObject ─▶ ; ◀─ ReadyToLoad | ShardRefused ; ShardWanted … ─▶ ; ◀─ chunks on one stream
    division session: OfferTensors ─▶ ; ◀─ TensorsDivided (divides the upload of equal tensors among ranks)
    round session:   RoundReport ─▶ ; ◀─ Announcement
    stream:          a separate connection that carries only chunks, opened by the dialler of a replica, fetch or load
                     session and named after that session

A chunk on a stream (integers big endian):

    offset  size  field
    0       4     transfer    of the BeginShard that announced the shard
    4       4     index       of the chunk
    8       4     size        bytes
    12      52    zeros       give the chunk the same alignment as in its slot
    64      size  the chunk

Invariant: a holder writes only requested chunks into a slot. It seals a shard only if every chunk matches the owner's
digest.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Literal

from msgspec import Meta

from everstep.protocol.codec import Message
from everstep.protocol.fixed_length import Digest, Nonce, Sha256
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.limits import (
    Address,
    Count,
    FewItems,
    Items,
    MessageBytes,
    Path,
    Port,
    SlotNumber,
    Text,
    Word,
)
from everstep.protocol.plan import ObjectReference
from everstep.protocol.rounds import Announcement, RoundReport
from everstep.protocol.safetensors import NOTHING_SHARED, SharedGroups

# A header shorter than a cache line would misalign the chunk, and its copy would take a fifth longer (measured).
CHUNK_HEADER = struct.Struct(">III52x")
"""The header of a chunk on a stream."""
MAX_PEER_MESSAGE_BYTES = 1024 * 1024
NONCE_BYTES = 32

HEADER_PIECE_BYTES = 512 * 1024

SessionKind = Literal["replica", "fetch", "round", "stream", "upload", "load", "division"]


class Open(Message, frozen=True):
    """First message of the dialling agent, which names the run, the generation and the kind of session."""

    run: RunId
    generation: Generation
    kind: SessionKind
    node_id: NodeId
    owner_rank: Rank
    """The rank of a replica session's shard; -1 in other kinds of sessions."""
    nonce: Nonce
    """Random bytes, which also serve as the session's name."""
    session: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """The nonce of a stream's session; else empty."""


class Challenge(Message, frozen=True):
    """The listener's proof that it has the generation's key, and its nonce."""

    node_id: NodeId
    nonce: Nonce
    mac: Sha256


class Answer(Message, frozen=True):
    """The dialler's proof that it has the generation's key, computed from both nonces."""

    mac: Sha256


class Accepted(Message, frozen=True, omit_defaults=True):
    """The listener accepts the session."""

    addresses: Annotated[tuple[tuple[Address, Port], ...], FewItems] = ()
    """Address and port of each network card of the listener, over which the dialler spreads its streams."""


class Refused(Message, frozen=True):
    """The listener rejects the session, and then closes the connection."""

    reason: Text


class ReserveShard(Message, frozen=True):
    """The owner's request to reserve slots of `capacity_bytes` each, before it captures snapshots."""

    capacity_bytes: Count
    layout_hash: Digest


class PreparingShard(Message, frozen=True):
    """Report of the sender that it still works, so that the receiver does not count it as silent. A holder sends it
    while it loads a shard, allocates slots, or waits for other members of a stripe. With parity, an owner also sends it
    while it sends or delays its contribution.
    """


class ShardReserved(Message, frozen=True):
    """The answer to `ReserveShard`. Without memory, the holder later rejects each shard that does not fit."""

    capacity_bytes: Count
    layout_hash: Digest


class BeginShard(Message, frozen=True):
    """Announcement of a shard whose chunks follow. In a replica session, its rank may still be capturing it."""

    transfer: Count
    """Number of this transfer within the session, increasing."""
    owner_rank: Rank
    origin_generation: Generation
    step: Step
    payload_bytes: Count
    capacity_bytes: Count
    index_offset: Count
    index_bytes: Count
    layout_hash: Digest
    committed: Step
    """The newest committed step that the sender has received. A holder must not overwrite its slot with this step."""


class ShardDigests(Message, frozen=True):
    """The digests of the shard's next chunks, which are ready. The answer is `ShardWanted`."""

    transfer: Count
    first: Count
    """Index of the first announced chunk; each message continues after the previous one."""
    chunk_digests: MessageBytes


class PrintedLines(Message, frozen=True):
    """The newest lines that the owner's ranks printed. The holder stores them before it acknowledges the shard whose
    `EndShard` follows. The next message of the session continues after these lines. The session's first message may
    repeat lines that the holder already has.
    """

    first: Count
    """Number of the first line, counted on the owner's node in this generation."""
    lines: MessageBytes
    """Rows of a log chunk (`everstep.protocol.log_chunks`), each with its line feed."""


class EndShard(Message, frozen=True):
    """The sender has sealed its slot with the shard. Only now may the receiver seal its own."""

    transfer: Count
    digest: Digest


class ShardWanted(Message, frozen=True):
    """The receiver's request for the announced chunks that it lacks, and for chunks that arrived damaged."""

    transfer: Count
    chunks: Annotated[tuple[tuple[Count, Count], ...], Items]
    """Separate ranges (first, count), ascending; empty if the receiver lacks no chunk."""


class CancelShard(Message, frozen=True):
    """The owner cancels an incomplete transfer. The receiver discards its chunks."""

    transfer: Count


class ShardSealed(Message, frozen=True):
    """The receiver has verified and sealed the shard."""

    transfer: Count
    digest: Digest


class ShardRefused(Message, frozen=True, omit_defaults=True):
    """The holder rejects the announced shard, or cannot send the requested shard."""

    transfer: Count
    reason: Text
    is_damaged: bool = False
    """Whether chunks failed verification again after every retransmission, so the owner's copy may be damaged."""


class HolderInventory(Message, frozen=True):
    """The holder's verified copies of this shard, as the first message of a replica session. From then on, the owner
    ignores acknowledgements that the holder sent earlier for other steps.
    """

    owner_rank: Rank
    sealed: Annotated[tuple[tuple[Generation, Step, Digest], ...], Items]
    """Origin generation, step and digest of each sealed copy."""


class FetchShard(Message, frozen=True):
    """Request for exactly this content. The answer is `BeginShard` or `ShardRefused`."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest


class UploadPart(Message, frozen=True):
    """An owner's request to a holder to upload a part of its copy, which it keeps until the session ends."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest
    object: ObjectReference
    object_bytes: Count
    upload_id: Path
    part_bytes: Count
    """Size of all parts but the last, which may be smaller."""
    number: Count
    """Counts from 1."""
    shared: SharedGroups = NOTHING_SHARED
    """The tensors in separate S3 objects, which this upload does not contain."""


class PartStored(Message, frozen=True):
    """S3 has stored a part of the owner's upload. The owner compares size, CRC and SHA-256 with its own bytes."""

    number: Count
    etag: Path
    size: Count
    crc: Word
    """CRC64NVME of the part, which S3 has verified."""
    sha256: Sha256


class LoadShard(Message, frozen=True):
    """An owner's request to another node, the helper, to read parts of the shard from S3 after its own shards."""

    owner_rank: Rank
    digest: Digest
    """The plan names an S3 source with this digest for the rank."""
    object: ObjectReference
    object_bytes: Count
    header_bytes: Count
    """Total size of the `ObjectHeader` messages that follow the answer, from 1 to `MAX_HEADER_BYTES`."""


class ReadyToLoad(Message, frozen=True):
    """The helper can now read parts of the shard from S3. The owner sends the object's header, opens a stream, and
    requests chunks with `ShardWanted`. Each request names whole upload parts of the object.
    """


class LoadObject(Message, frozen=True):
    """A node's request to another node for parts of an object that shards of both nodes share.

    A load session contains either one `LoadShard`, or one `LoadObject` per object. Each later `ShardWanted` names all
    chunks of an upload part of the object's data, without the header. The asked node sends a part as soon as it has
    read the part from S3 for itself. The receiver verifies the bytes.
    """

    transfer: Count
    """Number of the request within the session, from 1, which answers and chunks repeat."""
    object: ObjectReference


class ObjectHeader(Message, frozen=True):
    """The next bytes of the header of a shard's object in S3, so that the helper need not read them."""

    data: Annotated[bytes, Meta(max_length=HEADER_PIECE_BYTES)]


class OfferTensors(Message, frozen=True):
    """An owner's list of tensors, in which the coordinator's agent finds those that several ranks have."""

    owner_rank: Rank
    step: Step
    digests: Annotated[tuple[Digest, ...], Items]
    """Digest of each item: a tensor or a frozen object."""
    sizes: Annotated[tuple[Count, ...], Items]
    frozen_count: Count = 0
    """Number of items that are frozen objects. They precede all other items."""


class TensorsDivided(Message, frozen=True):
    """The coordinator's answer to `OfferTensors`: which rank uploads which of the items."""

    objects: Annotated[tuple[SlotNumber, ...], Items] = ()
    """Number of each item's S3 object; -1: the object of the owner's shard. If the list is empty, the coordinator did
    not use the offer, and the owner stores all items in the object of its shard.
    """
    writes: Annotated[tuple[Count, ...], Items] = ()
    """Numbers of the objects that the owner uploads."""


PeerMessage = (
    Open | Challenge | Answer | Accepted | Refused | ReserveShard | PreparingShard | ShardReserved | BeginShard
    | ShardDigests | PrintedLines | EndShard | ShardWanted | CancelShard | ShardSealed | ShardRefused
    | HolderInventory | FetchShard | UploadPart | PartStored | LoadShard | LoadObject | ReadyToLoad
    | ObjectHeader | OfferTensors | TensorsDivided | RoundReport | Announcement
)  # fmt: skip


def session_mac(
    key: bytes,
    role: Literal["dialler", "listener"],
    opened: Open,
    challenge_nonce: bytes,
    listener: NodeId,
    job: JobName,
) -> bytes:
    """Return the proof of `role` for one session: HMAC-SHA256 over all values that both sides sent. The role is part of
    it, so a listener's proof is not valid as a dialler's. The caller must compare proofs in constant time.
    """
    parts = (
        b"everstep-peer-1",
        role.encode(),
        job.encode(),
        opened.run.encode(),
        str(opened.generation).encode(),
        opened.kind.encode(),
        opened.node_id.encode(),
        str(opened.owner_rank).encode(),
        opened.nonce,
        opened.session,
        challenge_nonce,
        listener.encode(),
    )
    return hmac.new(key, b"".join(struct.pack(">I", len(part)) + part for part in parts), hashlib.sha256).digest()
