"""Between two agents over TCP: who is there, shards in chunks, and the rounds.

Every connection begins with a challenge and an answer in both directions, keyed by the generation's key, so that neither a stranger nor a
member of another generation gets past the first message.

    dialler                                   listener
    Open(nonce_a, …)              ─────▶
                                  ◀─────      Challenge(nonce_b, mac over "listener", nonce_a, nonce_b, …)
    Answer(mac over "dialler", …) ─────▶
                                  ◀─────      Accepted | Refused

    replica session: BeginShard, chunks, EndShard ─▶ ; ◀─ ShardSealed | ShardRefused
    fetch session:   FetchShard ─▶ ; ◀─ BeginShard, chunks, EndShard | ShardRefused
    round session:   RoundReport ─▶ ; ◀─ Announcement

A chunk is a frame of its own kind: length (4 bytes, big endian, top bit set), payload offset (8 bytes, big endian), then the bytes.

Invariant: lengths are checked against the announced shard before a byte is written; a holder seals only what hashes to the owner's digest.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.rounds import Announcement, RoundReport

CHUNK_BIT = 0x80000000
CHUNK_PREFIX = struct.Struct(">IQ")
MAX_CHUNK_BYTES = 64 * 1024 * 1024
MAX_PEER_MESSAGE_BYTES = 1024 * 1024
NONCE_BYTES = 32

SessionKind = Literal["replica", "fetch", "round"]


class Open(Message, frozen=True):
    """First message of the dialling agent."""

    run: RunId
    generation: Generation
    kind: SessionKind
    node_id: NodeId
    owner_rank: Rank
    """The shard of a replica session; -1 for the others."""
    nonce: bytes


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


class Refused(Message, frozen=True):
    """The session is not opened; the connection is closed."""

    reason: str


class BeginShard(Message, frozen=True):
    """A shard follows in chunks."""

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


class EndShard(Message, frozen=True):
    """All chunks are sent; `digest` is the owner's."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: bytes


class CancelShard(Message, frozen=True):
    """The owner gave the step up in the middle: what came of it is nothing."""

    owner_rank: Rank
    step: Step


class ShardSealed(Message, frozen=True):
    """The holder has verified and sealed it."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: bytes


class ShardRefused(Message, frozen=True):
    """The holder has not sealed it (or the fetched shard is not to be had)."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    reason: str


class HolderInventory(Message, frozen=True):
    """What the holder has of this shard, first message of the holder in a replica session: acknowledgements not listed are revoked."""

    owner_rank: Rank
    sealed: tuple[tuple[Generation, Step, bytes], ...]
    """(origin generation, step, digest)."""


class FetchShard(Message, frozen=True):
    """Asks the holder for exactly this content; answered by the shard in chunks, or `ShardRefused` when it is not there."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: bytes


PeerMessage = (
    Open | Challenge | Answer | Accepted | Refused | BeginShard | EndShard | CancelShard | ShardSealed | ShardRefused | HolderInventory | FetchShard
    | RoundReport | Announcement
)  # fmt: skip


def session_mac(key: bytes, role: Literal["dialler", "listener"], opened: Open, challenge_nonce: bytes, listener: NodeId, job: JobName) -> bytes:
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
        challenge_nonce,
        listener.encode(),
    )
    return hmac.new(key, b"".join(struct.pack(">I", len(part)) + part for part in parts), hashlib.sha256).digest()
