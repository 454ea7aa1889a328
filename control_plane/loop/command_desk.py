"""Sends users' commands (ExecuteCommand) to the agents that run them, and returns the agents' answers.

    run(node, command) ──▶ RunCommand ──▶ agent
                       ◀── CommandEnded ──      ended(node, answer)

A caller that lost the answer repeats its call with the same command id and receives the same answer. The agent receives
each command only once, because commands need not be idempotent.

Invariant: only the node that received a command may answer it. All methods run on the server's event loop.
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
MAX_KEPT: Final = 64
"""Limit of commands that the server remembers, with their answers, for repeated calls."""
ANSWER_SECONDS: Final = 5.0
"""Seconds for which callers wait in addition to the command's own timeout."""


class CommandFailed(Exception):
    """Base class of the errors that a caller receives if no agent answers the user's command."""


class TooManyCommands(CommandFailed):
    """This server already waits for the results of `MAX_WAITING` commands."""


class NotAsked(CommandFailed):
    """The agent is not connected to this server. The command did not run."""


class NotAnswered(CommandFailed):
    """The agent did not answer in time. The command may have run."""


class AnotherCommand(CommandFailed):
    """The server remembers a different command with the same id, which another call sent."""


@dataclass(frozen=True, slots=True)
class _Asked:
    node_id: NodeId
    command: RunCommand
    answer: asyncio.Future[CommandEnded]
    ends_at: float
    """Monotonic seconds at which callers stop waiting for the answer."""

    def is_waited_for(self, now: float) -> bool:
        return not self.answer.done() and now < self.ends_at


class CommandDesk:
    """Users' commands that one server has sent to agents. `send` returns whether the agent is connected."""

    def __init__(self, send: Callable[[NodeId, RunCommand], bool], monotonic: Callable[[], float]) -> None:
        self._send = send
        self._monotonic = monotonic
        self._asked: OrderedDict[str, _Asked] = OrderedDict()

    def is_known(self, command_id: str) -> bool:
        """Return whether the server remembers a command with this id."""
        return command_id in self._asked

    async def run(self, node_id: NodeId, command: RunCommand) -> CommandEnded:
        """Send a command to an agent and wait for its answer.

        Raises:
            TooManyCommands: `MAX_WAITING` commands are running already.
            NotAsked: the agent is not connected to this server, so the command did not run.
            NotAnswered: the agent did not answer in time. The command may have run.
            AnotherCommand: the server remembers a different command with the same id.
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
        """Accept an agent's answer. It is ignored if this server sent the command to another agent."""
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
