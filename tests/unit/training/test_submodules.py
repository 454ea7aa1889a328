"""A job's script gets submodules of torch that it has not imported, in a rank with any start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

USED = (
    "torch.distributed.checkpoint.save",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.tensor.parallel.parallelize_module",
    "torch.distributed.pipelining.Schedule1F1B",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.utils.cpp_extension.load",
    "torch.utils.flop_counter.FlopCounterMode",
    "torch.utils.benchmark.Timer",
    "torch.nn.attention.flex_attention.flex_attention",
    "torch.nn.utils.prune.l1_unstructured",
    "torch.onnx.operators.shape_as_tensor",
    "torch.optim.swa_utils.AveragedModel",
    "torch.export.export",
)
PROBE = """
import torch, everstep.training
for name in {names!r}:
    try:
        eval(name)
        print(name)
    except AttributeError as error:
        print(error)
"""


def probed(names: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(names=names)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_cold_rank_imports_a_submodule_at_its_first_use() -> None:
    assert probed(USED, {"EVERSTEP_AGENT_SOCKET": "/nowhere"}) == list(USED)


def test_a_warm_rank_does_the_same(tmp_path: Path) -> None:
    """The template imports everstep.training before it knows that its forks are ranks."""
    script = tmp_path / "train.py"
    script.write_text(PROBE.format(names=USED))
    template = f"""
import sys, torch, everstep.training
from everstep.protocol.ids import Generation, Rank
from worker.ranks.shim.launch import become
from worker.ranks.shim.messages import StartRank
become(StartRank(
    run="r", generation=Generation(1), rank=Rank(0), script={str(script)!r}, arguments=(), stdout_path="",
    working_directory={str(tmp_path)!r}, environment={{"EVERSTEP_AGENT_SOCKET": "/nowhere"}}, stderr_path=""
))
"""
    done = subprocess.run([sys.executable, "-c", template], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(USED)


def test_a_script_alone_is_that_of_torch() -> None:
    assert any("has no attribute" in line for line in probed(USED, {}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.distributed.nothing", "module 'torch.distributed' has no attribute 'nothing'"),
        ("torch.distributed._nothing", "module 'torch.distributed' has no attribute '_nothing'"),
    ],
)
def test_what_torch_lacks_is_an_attribute_error(name: str, words: str) -> None:
    assert probed((name,), {"EVERSTEP_AGENT_SOCKET": "/nowhere"}) == [words]
