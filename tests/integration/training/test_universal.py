"""DeepSpeed's `load_universal` opens an exported checkpoint with another ZeRO stage and another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.universal import export_universal
from tests.integration.training.conftest import Scenarios
from tests.unit.everstep.checkpoints.stored import store_payloads

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def whole(scenarios: Scenarios, folder: Path, name: str, world: int, until: int, **options: Any) -> dict[str, Any]:
    """Run a scenario, and return the tensors that the framework itself gathers after its last step."""
    folder.mkdir()
    scenarios.launch(name, world, folder, until=until, options=options, keep=folder).results()
    return dict(np.load(folder / "whole-0.npz"))


@pytest.mark.parametrize(
    ("name", "options", "stage"),
    [("zero", {"stage": 3}, 2), ("zero", {"stage": 2, "dtype": "bf16"}, 3), ("ddp", {"depth": 3}, 1)],
    ids=["ZeRO-3 into ZeRO-2", "ZeRO-2 in bf16 into ZeRO-3", "DDP into ZeRO-1"],
)
def test_deepspeed_loads_an_export_into_another_layout(
    scenarios: Scenarios, tmp_path: Path, name: str, options: dict[str, Any], stage: int
) -> None:
    trained = whole(scenarios, tmp_path / "trained", name, 3, 3, **options)
    payloads = [
        (
            (tmp_path / "trained" / f"payload-{rank}").read_bytes(),
            json.loads((tmp_path / "trained" / f"index-{rank}").read_text())[0],
        )
        for rank in range(3)
    ]
    to = str(tmp_path / "universal")
    with open_checkpoint(str(store_payloads(tmp_path / "bucket", payloads))) as checkpoint:
        export_universal(checkpoint, to)
    loaded = whole(scenarios, tmp_path / "loaded", "zero", 2, 0, stage=stage, universal=to)
    assert {key for key in loaded if key.startswith("optimizer|")}
    for key, value in loaded.items():
        assert np.array_equal(value, trained[key]), key
