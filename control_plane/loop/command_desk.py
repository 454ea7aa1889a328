"""Programs that people run beside ranks: each is asked of one agent once, and answered to whoever waits.

    run(node, command) ──▶ RunCommand ──▶ agent
                       ◀── CommandEnded ──      ended(node, answer)

A command whose answer was lost on its way to the caller is asked for again with the same id: it waits for the same
answer, or is given it. Nothing is repeated to an agent: running something twice is not the same as once.

Invariant: an answer counts only from the node that was asked. What is kept has limits. All methods run on the server's
event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from everstep.protocol.agent_messages import CommandEnded, RunCommand
from everstep.protocol.ids import NodeId

MAX_WAITING: Final = 32
"""Commands under way at one time."""
MAX_KEPT: Final = 64
"""Commands whose answers are kept for who asks again; none is let go before it has one."""
ANSWER_SECONDS: Final = 5.0
"""How much longer than the command itself its answer may take."""


class CommandFailed(Exception):
    """There is no answer."""


class TooManyCommands(CommandFailed):
    """As many are under way as may be."""


class NotAsked(CommandFailed):
    """The agent is not connected here: nothing was run."""


class NotAnswered(CommandFailed):
    """The agent has not answered in time: it may have been run."""


class AnotherCommand(CommandFailed):
    """The id is that of another command."""


@dataclass(frozen=True, slots=True)
class _Asked:
    node_id: NodeId
    command: RunCommand
    answer: asyncio.Future[CommandEnded]
    ends_at: float
    """Monotonic seconds; nothing is expected any more then."""

    def is_waited_for(self, now: float) -> bool:
        """Say whether its answer may still come."""
        return not self.answer.done() and now < self.ends_at


class CommandDesk:
    """One per server, kept by the registry of agents.

    Args:
        send: queues a message for an agent that is connected; says whether it is.
        monotonic: seconds of a clock that never jumps.
    """

    def __init__(self, send: Callable[[NodeId, RunCommand], bool], monotonic: Callable[[], float]) -> None:
        self._send = send
        self._monotonic = monotonic
        self._asked: OrderedDict[str, _Asked] = OrderedDict()

    def is_known(self, command_id: str) -> bool:
        """Say whether this id was asked for before, as far as that is remembered."""
        return command_id in self._asked

    async def run(self, node_id: NodeId, command: RunCommand) -> CommandEnded:
        """Have an agent run a command, and wait for what comes of it.

        Args:
            node_id: where.
            command: what; one whose id was asked for before waits for the same answer.

        Returns:
            The agent's answer.

        Raises:
            TooManyCommands: as many are under way as may be.
            NotAsked: the agent is not connected here.
            NotAnswered: it has not answered in time.
            AnotherCommand: the id was asked for with another command.
        """
        asked = self._asked.get(command.command_id)
        if asked is None:
            asked = self._ask(node_id, command)
        elif (asked.command.rank, asked.command.argv, asked.command.stdin) != (
            command.rank,
            command.argv,
            command.stdin,
        ):
            raise AnotherCommand
        try:
            async with asyncio.timeout(max(asked.ends_at - self._monotonic(), 0.0)):
                return await asyncio.shield(asked.answer)
        except TimeoutError:
            raise NotAnswered from None

    def ended(self, node_id: NodeId, answer: CommandEnded) -> None:
        """Take an agent's answer; one that nobody has asked this agent for is dropped."""
        asked = self._asked.get(answer.command_id)
        if asked is not None and asked.node_id == node_id and not asked.answer.done():
            asked.answer.set_result(answer)

    def _ask(self, node_id: NodeId, command: RunCommand) -> _Asked:
        now = self._monotonic()
        if sum(asked.is_waited_for(now) for asked in self._asked.values()) >= MAX_WAITING:
            raise TooManyCommands
        if not self._send(node_id, command):
            raise NotAsked
        answer: asyncio.Future[CommandEnded] = asyncio.get_running_loop().create_future()
        asked = _Asked(node_id, command, answer, now + command.timeout_seconds + ANSWER_SECONDS)
        self._asked[command.command_id] = asked
        while len(self._asked) > MAX_KEPT:
            del self._asked[next(command_id for command_id, kept in self._asked.items() if not kept.is_waited_for(now))]
        return asked
