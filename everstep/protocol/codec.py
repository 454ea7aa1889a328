"""Encodes and decodes messages: a two-byte version, then one tagged struct in msgpack.

    offset  size  field
    0       2     protocol version, big endian
    2       …     msgpack map of the struct, its type under the key "type"

On a byte stream, an unsigned 32-bit big-endian length precedes each message.

Two processes can exchange messages if they have the same protocol version. Within it, a newer release may only add
fields, messages and enum values, which the minor version counts:

    added                        rule
    field                        has a default, which stands for the behaviour before the addition
    message, enum value          the sender checks with `is_supported` that the receiver's minor version has it
    anything else                needs a new protocol version

A receiver ignores unknown fields, and checks all others. `tests/golden/protocol` has the bytes of each message per
minor version, and every later release must decode them.

Invariant: `decode` returns a fully checked value of the given union, or raises a `ProtocolError`.
"""

from __future__ import annotations

import struct
import threading
from typing import ClassVar, TypeVar

import msgspec

from everstep.protocol.errors import UNDECODABLE, MalformedMessage, OversizedMessage, UnknownVersion

PROTOCOL_VERSION = 1
"""Processes with different versions refuse each other's messages."""
PROTOCOL_MINOR = 3
"""The number of additions so far. Agent and control plane exchange it in their first messages."""
UPDATE_ADVICE = "see docs/operating.md#updates"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Senders divide larger data, such as shards, into chunks."""
LENGTH = struct.Struct(">I")
_VERSION = struct.Struct(">H")

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", kw_only=True):
    """Base of every message: immutable, and tagged with its class name."""

    since_minor: ClassVar[int] = 0


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}
_resolving = threading.Lock()


def encode(message: Message) -> bytes:
    """Return a message without length prefix. Raises OversizedMessage above `MAX_MESSAGE_BYTES`."""
    data = _VERSION.pack(PROTOCOL_VERSION) + _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"{type(message).__name__} is {len(data)} bytes long; the limit is {MAX_MESSAGE_BYTES}")
    return data


def is_supported(message: Message, receiver_minor: int) -> bool:
    """Return whether a receiver can decode a message. `receiver_minor` is 0 if the receiver did not report one."""
    return type(message).since_minor <= receiver_minor


def resolve(kind: object) -> msgspec.msgpack.Decoder[object]:
    """Return a decoder of a type, the same one for repeated calls. Makes msgspec analyse the type's annotations now.
    Modules call it at import time for every type that they pass to `msgspec.convert`. msgspec exposes an unfinished
    analysis to other threads, and two simultaneous first uses of a class crash the process in msgspec's `_core`.
    """
    with _resolving:
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return decoder


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the message that is encoded in `data`. `kind` is the accepted class, or a union of the accepted classes.
    Raises OversizedMessage for more than `MAX_MESSAGE_BYTES`, UnknownVersion, and MalformedMessage for a missing,
    mistyped or unknown type or field, or one beyond its limit (`everstep.protocol.limits`).
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    if len(data) < _VERSION.size:
        raise MalformedMessage("a message without a protocol version")
    (version,) = _VERSION.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise UnknownVersion(
            f"a message has protocol version {version}; this process supports {PROTOCOL_VERSION}: {UPDATE_ADVICE}"
        )
    decoder = _decoders.get(kind) or resolve(kind)
    try:
        return decoder.decode(memoryview(data)[_VERSION.size :])  # type: ignore[return-value]
    except UNDECODABLE as error:
        raise MalformedMessage(str(error)) from error


def frame(message: Message) -> bytes:
    """Return the encoded message with its length prefix, for a byte stream."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data


def frame_length(prefix: bytes, limit: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length in a frame's first four bytes. Raises OversizedMessage if it is above `limit`."""
    (length,) = LENGTH.unpack(prefix)
    if length > limit:
        raise OversizedMessage(f"a frame announces {length} bytes; the limit is {limit}")
    return int(length)
