"""Encoding of messages: a two-byte version, then msgpack of one tagged struct.

    offset  size  field
    0       2     protocol version, big endian
    2       …     msgpack map of the struct, its type under the key "type"

On a byte stream each message is preceded by its length as an unsigned 32-bit big-endian integer.

Invariant: `decode` returns a value of the given union or raises a `ProtocolError`; it never returns a partly checked
value.
"""

from __future__ import annotations

import struct
import threading
from typing import TypeVar

import msgspec

from everstep.protocol.errors import MalformedMessage, OversizedMessage, UnknownVersion

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""No control message is longer; shard bytes travel as chunks, not as messages."""
LENGTH = struct.Struct(">I")
_VERSION = struct.Struct(">H")

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type", kw_only=True):
    """Base of every message: immutable, tagged with its class name, unknown fields refused."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}
_resolving = threading.Lock()


def encode(message: Message) -> bytes:
    """Return the bytes of one message, version included and length prefix not.

    Args:
        message: a struct built on `Message`.

    Returns:
        At most `MAX_MESSAGE_BYTES` bytes; `decode` gives an equal message back.

    Raises:
        OversizedMessage: the message is longer than `MAX_MESSAGE_BYTES`.
    """
    data = _VERSION.pack(PROTOCOL_VERSION) + _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"{type(message).__name__} is {len(data)} bytes long; the limit is {MAX_MESSAGE_BYTES}")
    return data


def resolve(kind: object) -> msgspec.msgpack.Decoder[object]:
    """Let msgspec read the annotations of a type, once.

    Called when a module is imported, for every type that it gives to `msgspec.convert`.

    msgspec reads a class at its first use, and lets other threads see it before it is complete: two first uses at once
    crash the process (seen as a fault at address 0 in its `_core`). So decoders are made, and converted types resolved,
    when modules are imported (`tests/tidy/test_decoders.py`).

    Args:
        kind: a message class, a dataclass, or a union of such.

    Returns:
        A decoder of it.
    """
    with _resolving:
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return decoder


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the message in `data`.

    Args:
        data: what `encode` returned on the other side.
        kind: a message class or a union of message classes; anything else in `data` is refused.

    Returns:
        The message, every field of it checked.

    Raises:
        OversizedMessage: longer than `MAX_MESSAGE_BYTES`.
        UnknownVersion: the sender speaks another version.
        MalformedMessage: not msgpack, an unknown type, a field missing, unknown or of the wrong type.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    if len(data) < _VERSION.size:
        raise MalformedMessage("a message without a version")
    (version,) = _VERSION.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise UnknownVersion(f"a message of protocol version {version}; this process speaks {PROTOCOL_VERSION}")
    decoder = _decoders.get(kind) or resolve(kind)
    try:
        return decoder.decode(memoryview(data)[_VERSION.size :])  # type: ignore[return-value]
    except (
        msgspec.ValidationError,
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:  # the last: a key that is no text
        raise MalformedMessage(str(error)) from error


def frame(message: Message) -> bytes:
    """Return the message with its length before it, as it travels on a byte stream."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data


def frame_length(prefix: bytes, limit: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length that a four-byte prefix announces.

    Args:
        prefix: the first four bytes of a frame.
        limit: the longest frame, bytes, that this line carries.

    Returns:
        Bytes that follow the prefix.

    Raises:
        OversizedMessage: more than `limit` bytes are announced; nothing after the prefix may be read.
    """
    (length,) = LENGTH.unpack(prefix)
    if length > limit:
        raise OversizedMessage(f"a frame of {length} bytes announced; the limit is {limit}")
    return int(length)
