from __future__ import annotations

import pytest

from benchmarks.rounds import FLAT, measure


@pytest.mark.parametrize(("arity", "depth", "most_reports"), [(FLAT, 1, 7.0), (2, 3, 7.0)])
async def test_rounds_are_made_and_charged_to_their_agents(arity: int, depth: int, most_reports: float) -> None:
    row = await measure(8, arity)
    assert (row.agents, row.depth) == (8, depth)
    assert 0 < row.root_ms <= row.path_ms
    assert 1 <= row.root_messages <= most_reports
