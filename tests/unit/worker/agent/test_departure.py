"""Tests how an agent removes a job's files from its node."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from everstep.protocol.ids import RunId
from worker.agent import departure
from worker.agent.departure import Departure
from worker.ranks.files import home_of


@pytest.mark.security
@pytest.mark.parametrize("failing", ["end_processes", "clear", "rank_outputs", "supervisor", "archives"])
async def test_a_failed_removal_ends_neither_the_agent_nor_the_other_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run = RunId("a" * 32)
    home_of(tmp_path, run).mkdir(parents=True)
    parts: dict[str, Any] = {
        "settings": MagicMock(state=tmp_path),
        "lifecycle": MagicMock(end_member=AsyncMock(), has_ended=AsyncMock(return_value=True)),
        "promise": MagicMock(run=run),
        "outputs": MagicMock(wait=AsyncMock(), is_pending=False),
        "store": MagicMock(release=AsyncMock()),
        "supervisor": MagicMock(),
        "supplies": MagicMock(forget=AsyncMock()),
        "rank_outputs": MagicMock(),
        "archives": MagicMock(),
    }
    calls = {"end_processes": MagicMock(return_value=""), "clear": MagicMock()}
    for name, call in calls.items():
        monkeypatch.setattr(departure, name, call)
    calls |= {"rank_outputs": parts["rank_outputs"].forget, "supervisor": parts["supervisor"].forget}
    calls["archives"] = parts["archives"].keep
    calls[failing].side_effect = RecursionError("maximum recursion depth exceeded")
    await Departure(**parts).release_other(RunId("b" * 32))
    assert all(call.called for call in calls.values())
    assert not home_of(tmp_path, run).exists()
    parts["promise"].drop.assert_called_once_with(run)
    parts["lifecycle"].forget.assert_called_once_with()
