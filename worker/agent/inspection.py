"""Runs the commands and samples the stacks that users request for the ranks of the running generation.

Invariant: no command and no sample outlives the generation of its rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from everstep.protocol.agent_messages import CommandEnded, RankStacks, RunCommand
from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan, PlanNode
from worker.agent.settings import AgentSettings
from worker.agent.usage import Usage
from worker.node.network_cards import card_of
from worker.node.rank_user import RankUser, user_of
from worker.ranks.commands import RankCommands
from worker.ranks.environment import inherited_as, node_environment
from worker.ranks.files import make_home
from worker.ranks.shim.messages import RankRecord
from worker.ranks.stacks import StackWatch
from worker.ranks.supervisor import Supervisor


@dataclass(eq=False, repr=False)
class RankInspection:
    """Runs users' commands next to ranks, and samples their stacks. `on_change` is called after each sample."""

    settings: AgentSettings
    supervisor: Supervisor
    usage: Usage
    _: KW_ONLY
    answer: Callable[[CommandEnded], None]
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._commands = RankCommands(self._environment, self.answer, self._user)
        self._stacks: StackWatch | None = None

    def run_command(self, command: RunCommand, *, is_current: bool) -> None:
        """Run a user's command next to the process of a rank. Refuse it unless `is_current` and the rank runs here."""
        key = (command.run, command.generation, command.rank)
        living = (
            record
            for record in (self.supervisor.records if is_current else ())
            if record.key == key and record.end is None
        )
        self._commands.take(command, next(living, None))

    def sample_stacks(self, plan: GenerationPlan, here: PlanNode, number: int) -> None:
        """Sample the stacks of the ranks, once per request number. The next reports contain the result."""

        def known() -> list[RankRecord]:
            key = (plan.run, plan.generation)
            return [record for record in self.supervisor.records if (record.run, record.generation) == key]

        self._stacks = self._stacks or StackWatch(
            lambda: [record for record in known() if record.end is None],
            on_change=self.on_change,
            monotonic=time.monotonic,
            gpu_percent=partial(self.usage.gpu_percent, here),
            unborn=lambda: set(here.ranks) - {record.rank for record in known()},
        )
        self._stacks.ask(number)

    @property
    def stacks(self) -> tuple[RankStacks, ...]:
        """The newest stack samples of this node's ranks, for reports."""
        return self._stacks.shown() if self._stacks is not None else ()

    async def close(self) -> None:
        """End the commands next to ranks, and stop sampling stacks, because the generation ends."""
        await self._commands.close()
        stacks, self._stacks = self._stacks, None
        if stacks is not None:
            await stacks.close()

    def _environment(self, run: RunId) -> dict[str, str]:
        user, inherited = self._user(run), node_environment(os.environ, card_of(self.settings.address))
        return inherited_as(make_home(self.settings.state, run, user) if user is not None else {}, inherited)

    def _user(self, run: RunId) -> RankUser | None:
        return user_of(run, self.settings.state, self.settings.rank_user)
