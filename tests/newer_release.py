"""Rewrites an encoded message as a later release of Everstep would send it: with fields that this release ignores."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

VERSION_BYTES = 2
UNKNOWN: Mapping[str, object] = {"later_field": {"values": [1, "å", None]}}


def of_newer_release(data: bytes, kind: object, unknown: Mapping[str, object] = UNKNOWN) -> bytes:
    """Return the encoded message with unknown fields in the message and in every message that it contains.

    Args:
        data: what `everstep.protocol.codec.encode` returned.
        kind: the message's class, or a union that contains it.
        unknown: the fields to add. No message may have a field of these names.

    Returns:
        The encoded message of the later release.
    """
    body = msgspec.msgpack.decode(data[VERSION_BYTES:])
    return data[:VERSION_BYTES] + msgspec.msgpack.encode(_extended(body, msgspec.inspect.type_info(kind), unknown))


def _extended(value: object, info: msgspec.inspect.Type, unknown: Mapping[str, object]) -> object:
    match info, value:
        case msgspec.inspect.StructType(array_like=False) | msgspec.inspect.DataclassType(), dict():
            types = {field.encode_name: field.type for field in info.fields}
            known = {
                name: _extended(each, types[name], unknown) if name in types else each for name, each in value.items()
            }
            return {**known, **unknown}
        case msgspec.inspect.VarTupleType(), list():
            return [_extended(each, info.item_type, unknown) for each in value]
        case msgspec.inspect.TupleType(), list():
            return [_extended(each, item, unknown) for each, item in zip(value, info.item_types, strict=True)]
        case msgspec.inspect.DictType(), dict():
            return {key: _extended(each, info.value_type, unknown) for key, each in value.items()}
        case msgspec.inspect.UnionType(), _:
            return _extended(value, _member(value, info), unknown)
    return value


def _member(value: object, info: msgspec.inspect.UnionType) -> msgspec.inspect.Type:
    """Return the member of a union that a value belongs to, or the union's first member if the value has no fields."""
    structs = [
        each for each in info.types if isinstance(each, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    ]
    if isinstance(value, dict) and structs:
        return next((each for each in structs if each.cls.__name__ == value.get("type")), structs[0])
    if isinstance(value, list):
        return next(each for each in info.types if isinstance(each, msgspec.inspect.VarTupleType))
    return info.types[0]
