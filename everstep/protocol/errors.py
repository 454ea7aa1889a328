"""Errors of the wire format.

    ProtocolError
    ├── UnknownVersion      the sender uses a version that this process does not support
    ├── OversizedMessage    longer than the limit for its kind
    ├── MalformedMessage    does not decode to the declared type: wrong field, type or value, trailing bytes
    ├── CorruptSlot         a slot header or index with a wrong digest or invalid bounds
    └── CorruptObject       a checkpoint object whose header is not Everstep's, or contradicts itself

The process that rejects the input counts the error, and continues to run.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes of another process, including text that is not UTF-8, and deep nesting."""


class ProtocolError(Exception):
    """Base of the errors about rejected input from another process."""


class UnknownVersion(ProtocolError):
    """The message or layout has a version that this process does not support."""


class OversizedMessage(ProtocolError):
    """The message is longer than the limit for its class of messages."""


class MalformedMessage(ProtocolError):
    """The message does not decode to any declared type."""


class CorruptSlot(ProtocolError):
    """The digest or the bounds of a slot's header or index are invalid."""


class CorruptObject(ProtocolError):
    """The header of a checkpoint object is invalid."""
