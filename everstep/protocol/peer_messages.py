"""Between two agents over TCP: who is there, shards in chunks, and the rounds.

Every connection begins with a challenge and an answer in both directions, keyed by the generation's key, so that
neither a stranger nor a member of another generation gets past the first message.

    dialler                                   listener
    Open(nonce_a, …)              ─────▶
                                  ◀─────      Challenge(nonce_b, mac over "listener", nonce_a, nonce_b, …)
    Answer(mac over "dialler", …) ─────▶
                                  ◀─────      Accepted | Refused

    replica session: ReserveShard ─▶ ; ◀─ ShardReserved ; a shard ─▶
    fetch session:   FetchShard ─▶ ; ◀─ a shard | ShardRefused
    a shard:         BeginShard, ShardDigests …, EndShard ─▶ ; ◀─ ShardWanted … ; chunks on the streams ─▶ ; ◀─ ShardSealed | ShardRefused
                     (ahead of EndShard on a replica session: PrintedLines …)
    round session:   RoundReport ─▶ ; ◀─ Announcement
    stream:          a connection of its own, opened by the dialler of a replica or fetch session and named after it; chunks alone follow

A chunk on a stream (integers big endian):

    offset  size  field
    0       4     transfer    of the BeginShard that announced the shard
    4       4     index       of the chunk
    8       4     size        bytes
    12      52    zeros       a chunk stays aligned as it is in its slot
    64      size  the chunk

Invariant: nothing is written into a slot that its holder has not asked for, and it seals only what hashes to the
owner's digests, chunk by chunk.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.rounds import Announcement, RoundReport

CHUNK_HEADER = struct.Struct(">III52x")
"""As long as a cache line: a shorter one would shift every byte behind it, and copying what is not aligned takes a fifth longer (measured)."""
MAX_PEER_MESSAGE_BYTES = 1024 * 1024
NONCE_BYTES = 32

SessionKind = Literal["replica", "fetch", "round", "stream"]


class Open(Message, frozen=True):
    """First message of the dialling agent."""

    run: RunId
    generation: Generation
    kind: SessionKind
    node_id: NodeId
    owner_rank: Rank
    """The shard of a replica session; -1 for the others."""
    nonce: bytes
    """32 fresh bytes; they also name the session."""
    session: bytes = b""
    """The nonce of the session that a stream belongs to."""


class Challenge(Message, frozen=True):
    """The listener proves that it holds the generation's key, and asks the same."""

    node_id: NodeId
    nonce: bytes
    mac: bytes


class Answer(Message, frozen=True):
    """The dialler's proof, over the listener's nonce; the listener answers `Accepted` or `Refused`."""

    mac: bytes


class Accepted(Message, frozen=True):
    """The session is open."""

    addresses: tuple[tuple[str, int], ...] = ()
    """Where the listener can be reached, one (address, port) for each of its network cards: streams are spread over them."""


class Refused(Message, frozen=True):
    """The session is not opened; the connection is closed."""

    reason: str


class ReserveShard(Message, frozen=True):
    """The owner has slots of this size, and captures nothing before its holders have theirs; answered by `ShardReserved`."""

    capacity_bytes: int
    layout_hash: bytes


class PreparingShard(Message, frozen=True):
    """The holder is making slots, memory that is touched for the first time; said again and again, so that it does not seem silent."""


class ShardReserved(Message, frozen=True):
    """The holder has made its slots, or will have to refuse what does not fit: either way it is ready for the first shard."""

    capacity_bytes: int
    layout_hash: bytes


class BeginShard(Message, frozen=True):
    """A shard is to be had, or will be: its owner may still be capturing it."""

    transfer: int
    """Numbers the shards of a session: later ones are higher."""
    owner_rank: Rank
    origin_generation: Generation
    step: Step
    payload_bytes: int
    capacity_bytes: int
    index_offset: int
    index_bytes: int
    layout_hash: bytes
    committed: Step
    """C as the sender knows it: the slot that holds it is not the one to overwrite."""


class ShardDigests(Message, frozen=True):
    """The next chunks are there: each such message goes on where the one before it ended, and is answered by `ShardWanted`."""

    transfer: int
    first: int
    """Index of the first of them."""
    chunk_digests: bytes
    """Of these chunks, as `everstep.protocol.slot` draws them."""


class PrintedLines(Message, frozen=True):
    """The newest lines that the owner's ranks printed, from `first` on.

    The holder keeps them before it acknowledges the shard that ends behind them.

    The next such message of the session goes on where this one ends. The first may begin before lines that the holder
    has.
    """

    first: int
    """Number of the first line on the owner's node, in this generation."""
    lines: bytes
    """As in a chunk of the log (`everstep.protocol.log_chunks`), each with its line feed."""


class EndShard(Message, frozen=True):
    """The shard is complete, and a snapshot: before this the receiver seals nothing."""

    transfer: int
    digest: bytes
    """Of the payload."""


class ShardWanted(Message, frozen=True):
    """The receiver has a slot for the shard and lacks these of the chunks that were named.

    Said again for chunks that came damaged.
    """

    transfer: int
    chunks: tuple[tuple[int, int], ...]
    """(first, count), ascending, apart from each other; none: it has them all."""


class CancelShard(Message, frozen=True):
    """The owner gave the step up in the middle: what came of it is nothing."""

    transfer: int


class ShardSealed(Message, frozen=True):
    """The receiver has verified and sealed it."""

    transfer: int
    digest: bytes


class ShardRefused(Message, frozen=True, omit_defaults=True):
    """The holder does not seal it, or the fetched shard is not to be had."""

    transfer: int
    reason: str
    is_damaged: bool = False
    """Chunks do not hash to the digests that their owner named, however often they are sent: what the owner has may be what is wrong."""


class HolderInventory(Message, frozen=True):
    """What the holder has of this shard, first message of the holder in a replica session: acknowledgements not listed are revoked."""

    owner_rank: Rank
    sealed: tuple[tuple[Generation, Step, bytes], ...]
    """(origin generation, step, digest)."""


class FetchShard(Message, frozen=True):
    """Asks the holder for exactly this content; answered by `BeginShard`, or by `ShardRefused` when it is not there."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: bytes


PeerMessage = (
    Open | Challenge | Answer | Accepted | Refused | ReserveShard | PreparingShard | ShardReserved | BeginShard | ShardDigests
    | PrintedLines | EndShard | ShardWanted | CancelShard | ShardSealed | ShardRefused
    | HolderInventory | FetchShard | RoundReport | Announcement
)  # fmt: skip


def session_mac(
    key: bytes,
    role: Literal["dialler", "listener"],
    opened: Open,
    challenge_nonce: bytes,
    listener: NodeId,
    job: JobName,
) -> bytes:
    """Return the proof of `role` for one session: HMAC-SHA256 over everything both sides said, so that no proof fits another session.

    Args:
        key: the generation's key, 32 bytes.
        role: who proves; a listener's proof sent back is not a dialler's.
        opened: the dialler's first message.
        challenge_nonce: the listener's nonce.
        listener: the listening node.
        job: the job whose generation it is.

    Returns:
        uint8[32]; to be compared in constant time.
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
