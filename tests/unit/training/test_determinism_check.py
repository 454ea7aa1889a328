"""A determinism check records the optimizer steps of one pass."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
from torch import nn

from everstep.determinism import Kind, Record
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.determinism import passes
from everstep.training.determinism.passes import Pass
from everstep.training.determinism_check import DeterminismCheck
from everstep.training.script import Environment
from everstep.training.state import RankState


def test_an_optimizer_step_inside_a_graph_capture_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a gradient would invalidate a capture of a CUDA graph."""

    def end(_new: Pass) -> NoReturn:
        raise SystemExit

    monkeypatch.setattr(passes, "begin", end)
    environment, model = Environment.read({}), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    current = Pass(2, 4, varies_hash=False, state=tmp_path / "state", records=tmp_path / "records")
    check = DeterminismCheck(current, environment)
    check.attach(RankState([PlainAdapter({"": model}, {"": optimizer})], {}, {}, environment))
    model(torch.ones(1, 2)).sum().backward()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        optimizer.step()
    optimizer.step()
    with pytest.raises(SystemExit):
        check.end()
    (entries,) = msgspec.json.decode(current.records.read_bytes(), type=Record).steps.values()
    assert [entry.name for entry in entries if entry.kind is Kind.GRADIENT] == ["model/weight"]
