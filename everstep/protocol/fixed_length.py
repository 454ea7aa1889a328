"""Defines the byte strings of fixed length in messages.

Invariant: `codec.decode` raises `MalformedMessage` for a value of a different length. A receiver therefore never stores
such a value in a slot's header, which has a fixed layout.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""An xxh3-128 digest as in `everstep.protocol.slot`, or a layout hash: 16 bytes."""
StateDigest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
"""A digest of the tensors of a shard at one step (`everstep.protocol.slot.state_digest`): 8 bytes."""
Sha256: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A SHA-256 digest, or an HMAC-SHA256 proof of a key: 32 bytes."""
Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""Random bytes that make a session between two agents unique: 32 bytes."""
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""The key of a generation: 32 bytes."""
PublicKey: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""An Ed25519 public key: 32 bytes."""
