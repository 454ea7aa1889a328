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

CHUNK_HEADER = struct.Struct(">III52x")
"""Layout of a chunk's header on a stream. The header has the size of a cache line.

A shorter header would misalign the chunk, and its copy would take a fifth longer (measured).
"""
MAX_PEER_MESSAGE_BYTES = 1024 * 1024
NONCE_BYTES = 32

HEADER_PIECE_BYTES = 512 * 1024
"""Maximum bytes of a checkpoint object's header in one `ObjectHeader` message."""

SessionKind = Literal["replica", "fetch", "round", "stream", "upload", "load", "division"]


class Open(Message, frozen=True):
    """First message of the dialling agent, which names the run, the generation and the kind of session."""

    run: RunId
    generation: Generation
    kind: SessionKind
    node_id: NodeId
    owner_rank: Rank
    """The rank whose shard is copied in a replica session; -1 in other kinds of sessions."""
    nonce: Nonce
    """32 random bytes, which also serve as the session's name."""
    session: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """For a stream (a connection that carries only chunks): the nonce of its session. Empty for other connections."""


class Challenge(Message, frozen=True):
    """The listener's proof that it has the generation's key, and a nonce for the dialler's own proof."""

    node_id: NodeId
    nonce: Nonce
    mac: Sha256


class Answer(Message, frozen=True):
    """The dialler's proof that it has the generation's key, computed from both nonces.

    The listener replies with `Accepted` or `Refused`.
    """

    mac: Sha256


class Accepted(Message, frozen=True, omit_defaults=True):
    """The answer by which the node that was contacted (the listener) accepts the session."""

    addresses: Annotated[tuple[tuple[Address, Port], ...], FewItems] = ()
    """(address, port) of each network card of the listener.

    The dialler spreads its streams, the connections that carry chunks, over these cards.
    """


class Refused(Message, frozen=True):
    """The listener's rejection of the session. The listener then closes the connection."""

    reason: Text


class ReserveShard(Message, frozen=True):
    """The owner's request to a holder to reserve slots with `capacity_bytes` each. The answer is `ShardReserved`.

    The owner captures no snapshot until its holders have reserved their slots.
    """

    capacity_bytes: Count
    layout_hash: Digest


class PreparingShard(Message, frozen=True):
    """Report that the sender still works, so that the receiver does not count the sender as silent.

    A holder sends it while the holder loads a shard, allocates slots, or waits for other members of a stripe. With
    parity, an owner also sends it, while the owner sends or delays its contribution to a share.
    """


class ShardReserved(Message, frozen=True):
    """The holder's answer to `ReserveShard`. The owner may now begin to send snapshots.

    Usually the holder has allocated its slots. If the allocation failed, the holder rejects any shard that does not
    fit.
    """

    capacity_bytes: Count
    layout_hash: Digest


class BeginShard(Message, frozen=True):
    """Announcement of a shard whose chunks follow.

    In a replica session, the owner's rank may still be capturing the shard.
    """

    transfer: Count
    """Number of this transfer of a shard within the session. Later shards have higher numbers."""
    owner_rank: Rank
    origin_generation: Generation
    step: Step
    payload_bytes: Count
    capacity_bytes: Count
    index_offset: Count
    index_bytes: Count
    layout_hash: Digest
    committed: Step
    """The newest committed step that the sending agent has received.

    A holder must not overwrite the slot in which it holds this step.
    """


class ShardDigests(Message, frozen=True):
    """Announcement that the next chunks of the shard are ready, with their digests.

    Each message continues after the chunks of the previous message. The answer is `ShardWanted`.
    """

    transfer: Count
    first: Count
    """Index of the first announced chunk within the shard."""
    chunk_digests: MessageBytes
    """Digests of the chunks, in the format of `everstep.protocol.slot`."""


class PrintedLines(Message, frozen=True):
    """The newest lines that the owner's ranks printed, from number `first` on.

    The holder stores the lines before it acknowledges the shard whose `EndShard` follows them. The next message of the
    session continues after these lines. The session's first message may repeat lines that the holder already has.
    """

    first: Count
    """Number of the first line, counted on the owner's node in this generation."""
    lines: MessageBytes
    """Rows of a log chunk (`everstep.protocol.log_chunks`), each with its line feed."""


class EndShard(Message, frozen=True):
    """Announcement that the sender has sealed its slot with the shard. Only now may the receiver seal its own slot."""

    transfer: Count
    digest: Digest
    """Digest of the shard's payload."""


class ShardWanted(Message, frozen=True):
    """The receiver's request for those announced chunks that it lacks. The receiver has a slot for the shard.

    If a chunk arrives damaged, the receiver requests it again.
    """

    transfer: Count
    chunks: Annotated[tuple[tuple[Count, Count], ...], Items]
    """Requested chunks as separate ranges (first, count), ascending; empty if the receiver lacks no chunk."""


class CancelShard(Message, frozen=True):
    """The owner's cancellation of a transfer before its shard is complete.

    The receiver discards the received chunks.
    """

    transfer: Count


class ShardSealed(Message, frozen=True):
    """The receiver's report that it has verified and sealed the shard."""

    transfer: Count
    digest: Digest


class ShardRefused(Message, frozen=True, omit_defaults=True):
    """The holder's report that it rejects the announced shard, or cannot send the requested shard."""

    transfer: Count
    reason: Text
    is_damaged: bool = False
    """True if chunks failed verification again after every retransmission.

    The owner's copy of the shard may then be damaged.
    """


class HolderInventory(Message, frozen=True):
    """The steps for which the holder has a complete and verified copy of this shard.

    The holder sends it as the first message of a replica session. From then on, the owner ignores acknowledgements that
    the holder sent earlier for other steps.
    """

    owner_rank: Rank
    sealed: Annotated[tuple[tuple[Generation, Step, Digest], ...], Items]
    """One entry per sealed copy of the shard: (origin generation, step, digest)."""


class FetchShard(Message, frozen=True):
    """Request for a shard with exactly this generation, step and digest.

    The answer is `BeginShard`, or `ShardRefused` if the holder does not have this content.
    """

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest


class UploadPart(Message, frozen=True):
    """A shard owner's request to a holder to upload one part of the shard to S3.

    The holder reads the bytes from its copy of the shard, and keeps the copy until the session ends. The answer is
    `PartStored`, or `ShardRefused` if the holder cannot upload the part.
    """

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest
    """Digest of the shard's payload."""
    object: ObjectReference
    object_bytes: Count
    upload_id: Path
    """S3's id of the owner's multipart upload."""
    part_bytes: Count
    """Size in bytes of all upload parts but the last, which may be smaller."""
    number: Count
    """Number of the part within the multipart upload, from 1."""
    shared: SharedGroups = NOTHING_SHARED
    """The tensors that are stored in separate S3 objects. This upload does not contain them."""


class PartStored(Message, frozen=True):
    """The holder's report that S3 has stored a part of the owner's multipart upload.

    The owner compares size, CRC and SHA-256 with its own bytes.
    """

    number: Count
    etag: Path
    size: Count
    crc: Word
    """CRC64NVME of the part, which S3 has verified."""
    sha256: Sha256
    """SHA-256 of the part, 32 bytes."""


class LoadShard(Message, frozen=True):
    """A shard owner's request to another node to read parts of the shard from S3.

    The answer is `ReadyToLoad` once the node has loaded its own shards, or `ShardRefused`.
    """

    owner_rank: Rank
    digest: Digest
    """Digest of the shard's payload. The plan names an S3 source with this digest for the rank."""
    object: ObjectReference
    object_bytes: Count
    header_bytes: Count
    """Total size of the `ObjectHeader` messages that follow after the answer, from 1 to `MAX_HEADER_BYTES`."""


class ReadyToLoad(Message, frozen=True):
    """The report of the asked node (the helper) that it can now read parts of the shard from S3.

    The owner sends the object's header, opens a stream, and requests chunks with `ShardWanted`. Each request names
    whole upload parts of the object. The helper reads the parts from S3 and sends their chunks over the stream.
    """


class LoadObject(Message, frozen=True):
    """A node's request to another node for parts of an object that shards of both nodes share.

    A load session contains either one `LoadShard`, or one `LoadObject` per object. The answer is `ReadyToLoad` if a
    shard of the asked node uses the object, or `ShardRefused`. Then the node requests chunks of the object's data,
    without the header, with `ShardWanted`. Each request names all chunks of an upload part of the object. The asked
    node sends a part over the stream as soon as it has read the part from S3 for itself. The receiver verifies the
    bytes.
    """

    transfer: Count
    """Number of the request within the session, from 1. Answers and chunks repeat it."""
    object: ObjectReference


class ObjectHeader(Message, frozen=True):
    """The next bytes of the header of a shard's object in S3, at most `HEADER_PIECE_BYTES`.

    The owner sends the header to the node that reads parts of the object, so that this node need not read the header
    from S3 itself.
    """

    data: Annotated[bytes, Meta(max_length=HEADER_PIECE_BYTES)]


class OfferTensors(Message, frozen=True):
    """A shard owner's list of tensors, from which the coordinator's agent finds tensors that several ranks have.

    The coordinator's agent decides which rank uploads each of these tensors.

    The message begins a session in which the agents divide the tensors of one step. The answer is `TensorsDivided`.
    """

    owner_rank: Rank
    step: Step
    digests: Annotated[tuple[Digest, ...], Items]
    """Digest of each listed item, 16 bytes each. An item is a tensor or a frozen object (see `frozen_count`)."""
    sizes: Annotated[tuple[Count, ...], Items]
    """Size of each listed item in bytes."""
    frozen_count: Count = 0
    """Number of listed items that are frozen objects: S3 objects with tensors that training does not change. They
    precede all other items."""


class TensorsDivided(Message, frozen=True):
    """The answer of the coordinator's agent to `OfferTensors`: which rank uploads which of the listed tensors."""

    objects: Annotated[tuple[SlotNumber, ...], Items] = ()
    """For each listed item, the number of the S3 object that will hold it; -1 if the object of the owner's shard holds
    it.

    Empty if the coordinator's agent did not use this list, for example because it arrived too late. The owner then
    stores all items in the object of its shard.
    """
    writes: Annotated[tuple[Count, ...], Items] = ()
    """Numbers of the objects that the requesting owner uploads to S3."""


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
    """Return the proof of `role` for one session: HMAC-SHA256 over all values that both sides sent.

    A proof is valid for one session only.

    Args:
        key: the generation's key, 32 bytes.
        role: the proving side, so that a listener's proof is not valid as a dialler's proof.
        opened: the dialler's first message, which names the run, generation and owner.
        challenge_nonce: random bytes that the listener created for this session.
        listener: the listening node.
        job: the job that the generation belongs to.

    Returns:
        uint8[32]. The caller must compare it in constant time.
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
