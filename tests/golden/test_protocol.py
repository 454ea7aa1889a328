"""Messages of earlier releases decode, and none of their fields changes its meaning or its type.

A *line* is a sender and a receiver, such as `agent-to-rank`.
`tests/golden/protocol/<protocol version>.<minor version>/<line>.frames` has one frame per message of a line, as the
last release of that minor version sends it. The files of a released minor version never change. After an intended
change of a message:

- If a release has the present minor version, raise `PROTOCOL_MINOR` in `everstep/protocol/codec.py` first.
- Write the newest files with EVERSTEP_UPDATE_GOLDEN=1.

Exception: when the messages got limits (`everstep.protocol.limits`), impossible values in the files, such as rank
2**40, became possible ones.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.agent_messages import AgentToControl, ControlToAgent, Hello
from everstep.protocol.codec import LENGTH, PROTOCOL_MINOR, PROTOCOL_VERSION, Message, decode, encode, frame
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.peer_messages import PeerMessage
from everstep.protocol.rank_messages import AgentToRank, RankToAgent
from tests.newer_release import VERSION_BYTES
from tests.unit.protocol.test_codec import example
from worker.ranks.shim.messages import FromShim, ToShim
from worker.ranks.shim.template import FromTemplate

LINES = {
    "agent-to-control-plane": Hello | AgentToControl,
    "control-plane-to-agent": ControlToAgent,
    "agent-to-agent": PeerMessage,
    "rank-to-agent": RankToAgent,
    "agent-to-rank": AgentToRank,
    "agent-to-shim": ToShim,
    "shim-to-agent": FromShim,
    "template-to-shim": FromTemplate,
}
FOLDER = Path(__file__).parent / "protocol"
NEWEST = FOLDER / f"{PROTOCOL_VERSION}.{PROTOCOL_MINOR}"


def sent(line: str) -> bytes:
    """Return one frame of each message of a line (such as `agent-to-rank`), as this release sends it."""
    kinds = sorted(typing.get_args(LINES[line]), key=lambda kind: kind.__name__)
    return b"".join(frame(example(kind)) for kind in kinds)


def frames(path: Path) -> Iterator[bytes]:
    """Yield the encoded messages in a `.frames` file."""
    data = path.read_bytes()
    while data:
        (length,) = LENGTH.unpack_from(data)
        yield data[LENGTH.size : LENGTH.size + length]
        data = data[LENGTH.size + length :]


def lost(before: object, after: object) -> bool:
    """Return whether a value of the stored message is missing or different in the decoded message."""
    if isinstance(before, dict):
        return not isinstance(after, dict) or any(lost(each, after.get(key)) for key, each in before.items())
    if isinstance(before, list):
        return not isinstance(after, list) or len(before) != len(after) or any(map(lost, before, after))
    return before != after


@pytest.mark.parametrize("line", LINES)
def test_the_newest_file_has_the_messages_of_this_release(line: str) -> None:
    path = NEWEST / f"{line}.frames"
    if os.environ.get("EVERSTEP_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sent(line))
    assert path.read_bytes() == sent(line), "a message changed; the head of this module says what to do"


@pytest.mark.parametrize(
    "path",
    sorted(FOLDER.glob(f"{PROTOCOL_VERSION}.*/*.frames")),
    ids=lambda path: f"{path.parent.name} {path.stem}",
)
def test_messages_of_a_minor_version_decode_without_loss(path: Path) -> None:
    messages = list(frames(path))
    assert len(messages) > 3
    for data in messages:
        message: Message = decode(data, LINES[path.stem])  # type: ignore[arg-type]  # msgspec accepts a union as type
        stored, read = (msgspec.msgpack.decode(each[VERSION_BYTES:]) for each in (data, encode(message)))
        assert not lost(stored, read), f"{stored['type']} loses a value"


@pytest.mark.parametrize(
    ("before", "after"),
    [({"a": 1}, {}), ({"a": [1, 2]}, {"a": [1]}), ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}), ({"a": {}}, {"a": 1})],
)
def test_a_lost_value_is_noticed(before: object, after: object) -> None:
    assert lost(before, after)
    assert not lost(before, before)


def test_garbage_is_refused_on_every_line() -> None:
    for line in LINES.values():
        for body in (b"", b"\xff", b"\x80", msgspec.msgpack.encode({"type": "Nothing"})):
            with pytest.raises(MalformedMessage):
                decode(PROTOCOL_VERSION.to_bytes(VERSION_BYTES, "big") + body, line)  # type: ignore[arg-type]
