"""Ranks of the adapter tests, forked from the warm parent, and the fake agent that serves them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.fake_agent import FakeAgent
from tests.warm_parent import Launch, WarmParent


@dataclass(frozen=True)
class Scenarios:
    """Starts ranks that run a scenario of `scripts.SCENARIOS`."""

    parent: WarmParent
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def launch(
        self,
        name: str,
        world: int,
        directory: Path,
        *,
        until: int,
        options: dict[str, Any] | None = None,
        agent: FakeAgent | None = None,
        keep: Path | None = None,
    ) -> Launch:
        own = directory / f"launch-{next(self._numbers)}"
        own.mkdir()
        environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20"}
        if agent is not None:
            environment |= agent.environment
        arguments: dict[str, Any] = {"until": until, "options": options or {}}
        if keep is not None:
            arguments["keep"] = str(keep)
        call = ("tests.integration.training.scripts:run", name, str(own), arguments)
        return self.parent.fork(*call, world=world, directory=own, environment=environment, result="result-{rank}.json")


@pytest.fixture(scope="session")
def scenarios(warm_parent: WarmParent) -> Scenarios:
    return Scenarios(warm_parent)
