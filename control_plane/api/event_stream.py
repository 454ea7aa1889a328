"""Encodes AWS's event stream format (`application/vnd.amazon.eventstream`), which botocore decodes.

    bytes   content
    4       length of the whole message, big endian
    4       length of the headers
    4       CRC-32 of these eight bytes
    …       headers: length of the name (1), name, type 7 (text), length of the value (2), value
    …       payload: JSON
    4       CRC-32 of all preceding bytes

Source: https://smithy.io/2.0/aws/amazon-eventstream.html
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

MEDIA_TYPE: Final = "application/vnd.amazon.eventstream"
_TEXT: Final = 7


def message(event_type: str, payload: bytes) -> bytes:
    """Return the encoded message of an event with a JSON payload."""
    return _message({":message-type": "event", ":event-type": event_type, ":content-type": "application/json"}, payload)


def _message(headers: dict[str, str], payload: bytes) -> bytes:
    encoded = b"".join(
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", _TEXT, len(value.encode())) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    data = prelude + struct.pack(">I", zlib.crc32(prelude)) + encoded + payload
    return data + struct.pack(">I", zlib.crc32(data))
