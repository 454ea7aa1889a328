"""For every kind of training, the shards combine to the whole tensors that the framework itself gathers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.checkpoints import open_checkpoint
from tests.integration.training.conftest import Scenarios
from tests.unit.everstep.checkpoints.stored import store_payloads

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("ddp", 2, {}),
        ("fsdp", 3, {}),
        ("tensor_parallel", 2, {}),
        ("zero", 2, {"stage": 1}),
        ("zero", 3, {"stage": 2, "dtype": "bf16"}),
        ("zero", 3, {"stage": 3, "freeze": True}),
    ],
    ids=["DDP", "FSDP2", "tensor parallel", "ZeRO-1", "ZeRO-2 in bf16", "ZeRO-3 with frozen parameters"],
)
def test_shards_make_the_tensors_that_the_framework_gathers(
    scenarios: Scenarios, tmp_path: Path, name: str, world: int, options: dict[str, Any]
) -> None:
    scenarios.launch(name, world, tmp_path, until=4, options=options, keep=tmp_path).results()
    payloads = [
        (
            (tmp_path / f"payload-{rank}").read_bytes(),
            json.loads((tmp_path / f"index-{rank}").read_text())[0],
        )
        for rank in range(world)
    ]
    whole = {key.replace("|", "/"): value for key, value in np.load(tmp_path / "whole-0.npz").items()}
    assert any(key.startswith("optimizer/") for key in whole)
    with open_checkpoint(str(store_payloads(tmp_path / "bucket", payloads))) as checkpoint:
        for key, expected in whole.items():
            tensor = checkpoint.tensors[key]
            found = np.frombuffer(checkpoint.read(tensor), "<u2" if tensor.dtype == "bfloat16" else tensor.dtype)
            if tensor.dtype == "bfloat16":
                found = (found.astype("<u4") << 16).view("<f4")
            assert np.array_equal(found.reshape(tensor.shape), expected), key
        assert not [key for key in checkpoint.tensors if "master" in key]
