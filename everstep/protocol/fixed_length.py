"""Defines byte strings of fixed length. `codec.decode` raises MalformedMessage for any other length."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""An xxh3-128 digest (`everstep.protocol.slot`), or a layout hash."""
StateDigest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
"""`everstep.protocol.slot.state_digest`."""
Sha256: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A SHA-256 digest, or an HMAC-SHA256 proof of a key."""
Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""Random bytes that make a session between two agents unique."""
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
PublicKey: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
