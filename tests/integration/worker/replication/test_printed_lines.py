"""A holder acknowledges a step only after it has received the lines that the owner's ranks printed before that step."""

from __future__ import annotations

import asyncio

import pytest

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId
from everstep.protocol.peer_messages import PrintedLines
from tests.integration.worker.replication.pair import HOLDER, OWNER, Pair, content
from worker.core.line_tails import Tail

pytestmark = pytest.mark.integration


class Printing:
    """Printed lines of the owner's ranks, and the lines that the holder keeps."""

    def __init__(self, pair: Pair) -> None:
        self.rows: list[bytes] = []
        self.kept = Tail()
        self.asked: list[int] = []
        self._pair = pair
        pair.take_lines = self.take

    async def printed(self, number: int) -> Tail:
        self.asked.append(number)
        return Tail.of(0, self.rows).since(number)

    async def take(self, peer: NodeId, message: PrintedLines) -> None:
        assert peer == OWNER
        self.kept = self.kept.extended(message.first, message.lines.splitlines(keepends=True), limit_bytes=10_000)

    async def acknowledged(self, step: int) -> None:
        """Wait until the holder acknowledges a step.

        Check that it has all lines that were printed before the capture.
        """
        before = list(self.rows)
        await self._pair.until(lambda: (HOLDER, step) in self._pair.shard.core.held)
        assert list(self.kept.rows) == before


async def test_every_acknowledged_step_has_its_lines_on_the_holder(pair: Pair) -> None:
    printing = Printing(pair)
    pair.send(printed=printing.printed)
    pair.apply_announcement(-1, 1)
    for step in (1, 2, 3):
        printing.rows.append(b"line of step %d\n" % step)
        await pair.capture(step)
        await printing.acknowledged(step)
        pair.apply_announcement(step, step + 1)
    assert printing.asked == [0, 1, 2], "each line travels once in a session"


async def test_a_new_session_gives_the_lines_again(pair: Pair) -> None:
    printing = Printing(pair)
    pair.send(printed=printing.printed)
    pair.apply_announcement(-1, 1)
    printing.rows.append(b"one\n")
    await pair.capture(1)
    await printing.acknowledged(1)
    await pair.stop_sending()
    printing.kept = Tail()  # the holder's disk is lost at the same time as the owner
    pair.apply_announcement(1, 2)
    pair.send(printed=printing.printed)
    printing.rows.append(b"two\n")
    await pair.capture(2)
    await printing.acknowledged(2)


async def test_lines_that_a_holder_does_not_take_cost_its_word(pair: Pair) -> None:
    """A holder cannot store printed lines, so it acknowledges no further step."""
    printing = Printing(pair)
    refused = asyncio.Event()

    async def refuse(peer: NodeId, message: PrintedLines) -> None:
        refused.set()
        raise MalformedMessage("no lines")

    pair.take_lines = refuse
    pair.send(printed=printing.printed)
    pair.apply_announcement(-1, 1)
    printing.rows.append(b"one\n")
    await pair.capture(1)
    await refused.wait()
    assert pair.holder_store.sealed(pair.shard.rank, content(1)) is None
    pair.take_lines = printing.take
    await printing.acknowledged(1)
