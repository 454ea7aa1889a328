"""Every message survives encoding and decoding. Decoding invalid bytes raises the codec's own error."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol import agent_messages, parity, peer_messages, plan, rank_messages, rounds
from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.codec import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Message,
    decode,
    encode,
    frame,
    frame_length,
    is_supported,
)
from everstep.protocol.errors import MalformedMessage, OversizedMessage, UnknownVersion
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.peer_messages import Accepted, PeerMessage, Refused
from everstep.protocol.rank_messages import UnkeptCause
from tests.newer_release import of_newer_release

MODULES = (agent_messages, peer_messages, parity, plan, rank_messages, rounds)
CLASSES: list[type[Message]] = sorted(
    {
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    },
    key=lambda kind: kind.__name__,
)


def sample(info: msgspec.inspect.Type, depth: int = 0) -> object:
    """Return a value of a field's type. It differs from the default, so that the test detects a lost field."""
    match info:
        case msgspec.inspect.Metadata(extra={"is_id": True}):
            return "i-1"
        case msgspec.inspect.Metadata():
            return sample(info.type, depth)
        case msgspec.inspect.IntType():
            return 1 << 40 if info.le is None else min(info.le, 1 << 40)
        case msgspec.inspect.FloatType():
            return 0.25
        case msgspec.inspect.StrType():
            return next(text for text in ("å", "a", "127.0.0.1") if re.search(info.pattern or "", text))
        case msgspec.inspect.BytesType():
            return b"\x00\xff" * ((info.min_length or 2) // 2)
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.EnumType():
            return list(info.cls)[-1]
        case msgspec.inspect.LiteralType():
            return info.values[-1]
        case msgspec.inspect.VarTupleType():
            return (sample(info.item_type, depth + 1),) * 2
        case msgspec.inspect.TupleType():
            return tuple(sample(item, depth + 1) for item in info.item_types)
        case msgspec.inspect.DictType():
            return {sample(info.key_type, depth + 1): sample(info.value_type, depth + 1)}
        case msgspec.inspect.UnionType():
            return sample(
                next(each for each in info.types if not isinstance(each, msgspec.inspect.NoneType)), depth + 1
            )
        case msgspec.inspect.StructType() | msgspec.inspect.DataclassType():
            return info.cls(**{field.name: sample(field.type, depth + 1) for field in info.fields})
    raise AssertionError(f"no sample of {info}")


def example(kind: type[Message]) -> Message:
    """Return one message of this class."""
    message = sample(msgspec.inspect.type_info(kind))
    assert isinstance(message, Message)
    return message


def test_all_messages_are_known_here() -> None:
    assert len(CLASSES) > 40


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[Message]) -> None:
    message = example(kind)
    assert decode(encode(message), kind) == message
    framed = frame(message)
    assert frame_length(framed[: LENGTH.size]) == len(framed) - LENGTH.size
    assert decode(memoryview(framed)[LENGTH.size :], kind) == message


UNKNOWN_FIELDS = st.dictionaries(
    st.text(min_size=1).map("later_".__add__),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
        max_leaves=5,
    ),
    min_size=1,
    max_size=3,
)


@given(st.sampled_from(CLASSES), UNKNOWN_FIELDS)
def test_fields_of_a_newer_release_are_ignored_at_every_depth(kind: type[Message], unknown: dict[str, object]) -> None:
    data = encode(example(kind))
    later = of_newer_release(data, kind, unknown)
    assert len(later) > len(data)
    assert decode(later, kind) == example(kind)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_field_of_a_newer_release_is_ignored(kind: type[Message]) -> None:
    data = encode(example(kind))
    assert decode(of_newer_release(data, kind), kind) == example(kind)


class LaterMessage(Message, frozen=True):
    """A message that a later minor version of the protocol, version 2, adds."""

    since_minor = 2


@pytest.mark.parametrize(("minor", "supported"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_message_needs_a_receiver_of_its_minor_version(minor: int, supported: bool) -> None:
    assert is_supported(LaterMessage(), minor) is supported
    assert is_supported(Accepted(), minor)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_field_of_the_wrong_type_is_refused(kind: type[Message]) -> None:
    data = encode(example(kind))
    fields = msgspec.msgpack.decode(data[2:])
    for name in set(fields) - {"type"}:
        broken = data[:2] + msgspec.msgpack.encode(
            {**fields, name: {"an": ["object"]} if not isinstance(fields[name], dict) else 1}
        )
        with pytest.raises(MalformedMessage):
            decode(broken, kind)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_missing_field_is_refused(kind: type[Message]) -> None:
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    data = encode(example(kind))
    fields = msgspec.msgpack.decode(data[2:])
    for name in required:
        with pytest.raises(MalformedMessage, match="missing required field"):
            decode(
                data[:2] + msgspec.msgpack.encode({key: value for key, value in fields.items() if key != name}), kind
            )


def byte_types(info: msgspec.inspect.Type) -> list[msgspec.inspect.BytesType]:
    """Return the types of the bytes in a field, without those in nested messages."""
    match info:
        case msgspec.inspect.BytesType():
            return [info]
        case msgspec.inspect.VarTupleType():
            return byte_types(info.item_type)
        case msgspec.inspect.TupleType():
            return [each for item in info.item_types for each in byte_types(item)]
        case msgspec.inspect.UnionType():
            return [each for item in info.types for each in byte_types(item)]
    return []


def byte_fields(kind: type[Message]) -> dict[str, msgspec.inspect.BytesType]:
    """Return the fields of a message class that contain bytes."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: found[0] for field in info.fields if (found := byte_types(field.type))}


OF_ANY_LENGTH = {
    "Captured": {"chunk_digests"},
    "CommandEnded": {"stdout", "stderr"},
    "ObjectHeader": {"data"},
    "Open": {"session"},
    "PeerCertificate": {"authority", "certificate"},
    "PrintedLines": {"lines"},
    "RunCommand": {"stdin"},
    "ShardDigests": {"chunk_digests"},
    "SnapshotBytes": {"data"},
    "UploadedShard": {"lists"},
}
"""By message class: the fields of bytes whose length may vary."""


def test_all_other_bytes_have_a_fixed_length() -> None:
    found = {
        kind.__name__: names
        for kind in CLASSES
        if (
            names := {
                name
                for name, info in byte_fields(kind).items()
                if info.min_length != info.max_length or not info.min_length
            }
        )
    }
    assert found == OF_ANY_LENGTH


def resized(value: object, change: int) -> object:
    """Return a decoded value whose bytes are longer by `change`."""
    if isinstance(value, list | tuple):
        return [resized(each, change) for each in value]
    return (value + bytes(1))[: len(value) + change] if isinstance(value, bytes) else value


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_bytes_of_another_length_are_refused(kind: type[Message], change: int) -> None:
    data = encode(example(kind))
    fields = msgspec.msgpack.decode(data[2:])
    for name in byte_fields(kind).keys() - OF_ANY_LENGTH.get(kind.__name__, set()):
        broken = {**fields, name: resized(fields[name], change)}
        with pytest.raises(MalformedMessage, match=r"Expected `bytes` of length"):
            decode(data[:2] + msgspec.msgpack.encode(broken), kind)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 0xFFFF])
def test_an_unknown_version_is_refused_before_anything_is_read(version: int) -> None:
    with pytest.raises(UnknownVersion, match=str(version)):
        decode(version.to_bytes(2, "big") + b"\xff not even msgpack", Accepted)


@pytest.mark.parametrize("data", [b"", b"\x00"])
def test_a_message_without_a_version_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data, Accepted)


@pytest.mark.parametrize("cut", range(2, len(encode(Refused(reason="because")))))
def test_a_truncated_message_is_refused(cut: int) -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(Refused(reason="because"))[:cut], Refused)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(Accepted()) + b"\x00", Accepted)


def test_a_message_of_another_line_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(agent_messages.Release(run=RunId("00" * 16))), PeerMessage)  # type: ignore[arg-type]


def test_an_untagged_map_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(b"\x00\x01\x80", PeerMessage)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", FaultCode)
def test_a_code_of_a_fault_is_a_plain_word_on_the_line(code: FaultCode) -> None:
    fault = NodeFault(code=code, message="", is_permanent=False)
    assert encode(fault) == encode(msgspec.structs.replace(fault, code=str(code.value)))
    read = decode(encode(fault), NodeFault)
    assert read == fault
    # A code must work as a member of a set, because the control plane looks up codes in sets.
    assert read.code in {code}


def test_an_oversized_message_is_neither_sent_nor_read() -> None:
    with pytest.raises(OversizedMessage, match=str(MAX_MESSAGE_BYTES)):
        encode(Refused(reason="x" * MAX_MESSAGE_BYTES))
    with pytest.raises(OversizedMessage):
        decode(bytes(MAX_MESSAGE_BYTES + 1), Accepted)


def test_an_announced_frame_beyond_the_limit_is_refused_unread() -> None:
    assert frame_length((10).to_bytes(4, "big"), limit=10) == 10
    with pytest.raises(OversizedMessage, match="11 bytes"):
        frame_length((11).to_bytes(4, "big"), limit=10)


@pytest.mark.parametrize(
    ("reported", "words", "known"),
    [
        (None, "late", UnkeptCause.LATE),
        (None, "w changed outside an optimizer step", UnkeptCause.CAPTURE),
        (UnkeptCause.CHANGED, "late", UnkeptCause.CHANGED),
        (UnkeptCause.LATE, "stopped", UnkeptCause.LATE),
    ],
)
def test_the_words_of_an_abandoned_step_count_only_from_an_earlier_release(
    reported: UnkeptCause | None, words: str, known: UnkeptCause
) -> None:
    message = rank_messages.Abandoned(generation=Generation(1), step=Step(2), reason=words, cause=reported)
    assert decode(encode(message), rank_messages.Abandoned).known_cause is known
