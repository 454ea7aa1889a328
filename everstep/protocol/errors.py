"""Errors of the wire.

    ProtocolError
    ├── UnknownVersion      the other side speaks a version that this one does not
    ├── OversizedMessage    longer than the limit for its kind
    ├── MalformedMessage    not the declared type: wrong field, wrong type, trailing bytes
    ├── CorruptSlot         a slot header or index whose digest or bounds do not hold
    └── CorruptObject       a checkpoint's object whose header is not ours, or contradicts itself

All are refusals of input: the receiver counts them, closes that one line where needed, and lives on.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Input from another process that is refused."""


class UnknownVersion(ProtocolError):
    """The message or layout has a version that this process does not speak."""


class OversizedMessage(ProtocolError):
    """The message is longer than the limit for its kind."""


class MalformedMessage(ProtocolError):
    """The message does not decode to any declared type."""


class CorruptSlot(ProtocolError):
    """A slot's header or index is not what its digest or its bounds say."""


class CorruptObject(ProtocolError):
    """The header of a checkpoint's object is not one of ours, or contradicts itself or the object's size."""
