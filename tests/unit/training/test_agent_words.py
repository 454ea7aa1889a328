"""Messages that a rank sends reach its agent. The test reads them at the agent's end of the socket."""

from __future__ import annotations

import socket
from pathlib import Path

from everstep.protocol.codec import LENGTH, decode, frame_length
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.rank_messages import (
    MAX_RANK_MESSAGE_BYTES,
    PERMANENT_RANK_FAULTS,
    Abandoned,
    RankFault,
    RankHello,
    RankToAgent,
)
from everstep.training.agent_link import MAX_REASON_CHARACTERS, UnixAgentLink
from everstep.training.errors import CannotRelayout, CannotResume

HELLO = RankHello(job=JobName("job"), run=RunId("ab" * 16), generation=Generation(1), rank=Rank(0), pid=1)


def said(data: bytes) -> list[object]:
    """Return the messages from the socket, each in the form in which an agent decodes it."""
    found: list[object] = []
    while data:
        end = LENGTH.size + frame_length(data[: LENGTH.size], MAX_RANK_MESSAGE_BYTES)
        found.append(decode(data[LENGTH.size : end], RankToAgent))  # type: ignore[arg-type]
        data = data[end:]
    return found


def test_what_an_exception_says_is_told_whatever_its_length_and_its_characters(tmp_path: Path) -> None:
    words = "\ud800 " + "é" * MAX_RANK_MESSAGE_BYTES
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.listen()
        link = UnixAgentLink(tmp_path / "agent", HELLO, 1.0)
        link.poll()
        line, _ = listening.accept()
        link.send(Abandoned(generation=Generation(1), step=Step(7), reason=words))
        link.send(RankFault(generation=Generation(1), code="cannot_resume", message=words))
        link.close()
        with line, line.makefile("rb") as stream:
            hello, abandoned, fault = said(stream.read())
    assert hello == HELLO
    told = "\\ud800 " + "é" * (MAX_REASON_CHARACTERS - 8) + "…"
    assert abandoned == Abandoned(generation=Generation(1), step=Step(7), reason=told)
    assert fault == RankFault(generation=Generation(1), code="cannot_resume", message=told)


def test_the_permanent_errors_are_errors_of_the_training_hooks() -> None:
    codes = {error.code for error in (CannotResume, CannotRelayout)}
    assert codes == PERMANENT_RANK_FAULTS
