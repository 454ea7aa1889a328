"""Every field of every message that an agent, a rank or a peer sends has a limit, which `decode` enforces.

The tests find the fields by reflection, so they cover new messages and new fields. A field without a limit fails.
"""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Iterator

import msgspec
import pytest

from everstep.protocol.agent_messages import AgentReport, AgentToControl, Hello, RankStacks
from everstep.protocol.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Message, decode, encode
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.limits import MAX_LONG_TEXT_CHARACTERS, MAX_TEXT_CHARACTERS, cut
from everstep.protocol.peer_messages import PeerMessage
from everstep.protocol.rank_messages import MAX_METRIC_NAME_LENGTH, RankToAgent
from tests.newer_release import VERSION_BYTES
from tests.unit.protocol.test_codec import example

STORED = (Hello, AgentReport)
"""The messages whose ids the control plane stores. Receivers only compare the ids of all others with known ids."""
KINDS: list[type[Message]] = sorted(
    {Hello, *typing.get_args(AgentToControl), *typing.get_args(RankToAgent), *typing.get_args(PeerMessage)},
    key=lambda kind: kind.__name__,
)
Leaf = tuple[tuple[object, ...], msgspec.inspect.Type, dict[str, object]]
KEY = object()
"""Last step of the path to the key of a map that has one entry."""
HOSTILE_NAMES = ("\0", "a\0b", "a\nb", "\x1b[31m", "a\u202eb", "\u2066", "a\u200b", "é\x85")
HALF = "\uffee"
"""A character that `encoded` replaces by half of a surrogate pair, which has as many bytes."""


def leaves(info: msgspec.inspect.Type, path: tuple[object, ...] = ()) -> Iterator[Leaf]:
    """Yield path, type and marks of all fields, list items and map keys and values in a message's encoded form."""
    match info:
        case msgspec.inspect.Metadata():
            for at, kind, marks in leaves(info.type, path):
                yield at, kind, {**marks, **(info.extra or {})}
        case msgspec.inspect.StructType():
            for position, field in enumerate(info.fields):
                yield from leaves(field.type, (*path, position if info.array_like else field.encode_name))
        case msgspec.inspect.UnionType():
            for each in info.types:
                yield from () if isinstance(each, msgspec.inspect.NoneType) else leaves(each, path)
        case msgspec.inspect.VarTupleType():
            yield path, info, {}
            yield from leaves(info.item_type, (*path, 0))
        case msgspec.inspect.TupleType():
            for position, item in enumerate(info.item_types):
                yield from leaves(item, (*path, position))
        case msgspec.inspect.DictType():
            yield path, info, {}
            yield from leaves(info.key_type, (*path, KEY))
            yield from leaves(info.value_type, (*path, None))
        case msgspec.inspect.BoolType() | msgspec.inspect.EnumType() | msgspec.inspect.LiteralType():
            pass
        case _:
            yield path, info, {}


def with_value(body: object, path: tuple[object, ...], value: object) -> object:
    """Return a copy of a decoded body with another value at the path."""
    if not path:
        return value
    step, *rest = path
    body = copy.copy(body)
    if step is KEY or step is None:
        ((key, held),) = typing.cast("dict[object, object]", body).items()
        return {value: held} if step is KEY else {key: with_value(held, tuple(rest), value)}
    holder = typing.cast("dict[object, object]", body)
    holder[step] = with_value(holder[step], tuple(rest), value)
    return holder


def encoded(kind: type[Message], path: tuple[object, ...], value: object) -> bytes:
    """Return an encoded message of this class with the value at the path, and valid values everywhere else."""
    body = msgspec.msgpack.decode(encode(example(kind))[VERSION_BYTES:])
    data = msgspec.msgpack.encode(with_value(body, path, value))
    return PROTOCOL_VERSION.to_bytes(VERSION_BYTES, "big") + data.replace(HALF.encode(), b"\xed\xa0\x80")


def longest(info: msgspec.inspect.StrType) -> int:
    return info.max_length or MAX_METRIC_NAME_LENGTH  # Reports check the length of metric names without a type.


def bad(kind: type[Message], info: msgspec.inspect.Type, marks: dict[str, object]) -> list[object]:
    """Return values that a field must refuse."""
    match info:
        case msgspec.inspect.IntType():
            assert info.ge is not None
            return [info.ge - 1, -(2**63), *([] if "is_word" in marks else [(info.le or 0) + 1, 2**63, 2**64 - 1])]
        case msgspec.inspect.FloatType():
            is_any = "is_any" in marks
            return ["1"] if is_any else [math.nan, math.inf, -math.inf, 1e300, -1.0, -1, 2**64 - 1, (info.le or 0) * 2]
        case msgspec.inspect.StrType():
            is_name = info.pattern is not None or ("is_id" in marks and kind in STORED)
            assert is_name or marks or info.max_length is None, "a text needs a class"
            return ["a" * (longest(info) + 1), HALF, *(HOSTILE_NAMES if is_name else ())]
        case msgspec.inspect.BytesType():
            return [bytes((info.max_length or 0) + 1), *([bytes(info.min_length - 1)] if info.min_length else [])]
        case msgspec.inspect.VarTupleType():
            return [[None] * ((info.max_length or 0) + 1)]
        case msgspec.inspect.DictType():
            return [{f"{number}": None for number in range((info.max_length or 0) + 1)}]
    raise AssertionError(f"no limit of {info} is known")


def extremes(info: msgspec.inspect.Type, marks: dict[str, object], held: object) -> list[object]:
    """Return values at the limits of a field. `held` is a valid value of the field."""
    match info:
        case msgspec.inspect.IntType():
            return [info.ge, 2**64 - 1 if "is_word" in marks else info.le]
        case msgspec.inspect.FloatType():
            return [math.nan, math.inf] if "is_any" in marks else [info.ge, info.le]
        case msgspec.inspect.StrType():
            if held == "127.0.0.1":
                return ["255.255.255.255", "::1", "fe80:0000:0000:0000:0000:0000:255.255.255.255"]
            return ["a" * (63 if "{1,63}" in (info.pattern or "") else longest(info))]
        case msgspec.inspect.BytesType():
            return [bytes(info.max_length or 0)]
        case msgspec.inspect.VarTupleType():
            items = [*typing.cast("list[object]", held)[:1]] * (info.max_length or 0)
            return [items] if len(msgspec.msgpack.encode(items)) < MAX_MESSAGE_BYTES // 2 else []
        case msgspec.inspect.DictType():
            if isinstance(info.key_type, msgspec.inspect.LiteralType):
                return []
            (value,) = typing.cast("dict[object, object]", held).values()
            return [{f"{number}": value for number in range(info.max_length or 0)}]
    raise AssertionError(f"no limit of {info} is known")


def value_at(body: object, path: tuple[object, ...]) -> object:
    for step in path:
        if step is KEY:
            return next(iter(typing.cast("dict[object, object]", body)))
        held = typing.cast("dict[object, object]", body)
        body = next(iter(held.values())) if step is None else held[step]
    return body


def is_settled(info: msgspec.inspect.Type) -> bool:
    """Return whether the type of a field has a lower and an upper limit, as far as its kind needs them."""
    match info:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return info.ge is not None and info.le is not None
        case _:
            return getattr(info, "max_length", None) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_limit(kind: type[Message]) -> None:
    for path, info, marks in leaves(msgspec.inspect.type_info(kind)):
        is_metric_name = kind is AgentReport and path[-1] is KEY
        assert is_settled(info) or "is_word" in marks or "is_any" in marks or is_metric_name, (path, info)


def refusal(data: bytes, kind: type[Message]) -> str:
    """Return why `decode` refuses a message, or an empty string if it accepts the message."""
    try:
        decode(data, kind)
    except MalformedMessage as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_value_beyond_a_limit_is_refused(kind: type[Message]) -> None:
    for path, info, marks in leaves(msgspec.inspect.type_info(kind)):
        is_list = isinstance(info, msgspec.inspect.VarTupleType | msgspec.inspect.DictType)
        for value in bad(kind, info, marks):
            reason = refusal(encoded(kind, path, value), kind)
            assert "of length <=" in reason if is_list else reason, (path, str(value)[:50])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_value_at_a_limit_is_accepted(kind: type[Message]) -> None:
    body = msgspec.msgpack.decode(encode(example(kind))[VERSION_BYTES:])
    for path, info, marks in leaves(msgspec.inspect.type_info(kind)):
        for value in extremes(info, marks, value_at(body, path)):
            assert isinstance(decode(encoded(kind, path, value), kind), kind), (path, value)


@pytest.mark.parametrize(
    "address", ["", "example.org", "256.0.0.1", "1.2.3", "1.2.3.4.", "01.2.3.4", "fe80::1%eth0", ":"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(MalformedMessage):
        decode(encoded(Hello, ("address",), address), Hello)


@pytest.mark.parametrize("text", ["", "short", "x" * 100_000, "\udc80" * 20_000, "\ud800", "\0\u202e", "å" * 9000])
@pytest.mark.parametrize("limit", [MAX_TEXT_CHARACTERS, MAX_LONG_TEXT_CHARACTERS])
def test_cut_text_can_be_sent(text: str, limit: int) -> None:
    found = cut(text, limit)
    stacks = encoded(RankStacks, ("text" if limit > MAX_TEXT_CHARACTERS else "error",), found)
    assert isinstance(decode(stacks, RankStacks), RankStacks)
    assert found == text or found.startswith("\\ud") or found.endswith("…")
