"""The part `gpt` of the device benchmark: a job trains a GPT on the GPU, with and without a copy on another node.

The job has two nodes on loopback with one rank each, because two copies need a second node. Only rank 0 uses the
device. Rank 1 finishes the same number of steps with a tiny state (`rank/train.py`). Both nodes are on one machine, so
the values include no real network.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cluster_jobs import CONNECT_SECONDS, EVERY_STEP, Bench, started_bench
from benchmarks.device.parts import MIB, Sizes
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import ClusterOptions

NODES, COPIES = 2, 2
SCRIPT = Path(__file__).parent / "rank" / "train.py"
PASSED_ON = (
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_HOME",
)
"""Environment variables through which a rank may find the GPU driver.

The local cloud passes no variables of this process to its nodes, so the benchmark adds these variables explicitly.
"""
HYPERPARAMETERS = (
    "layers", "width", "heads", "context", "batch", "accumulate", "warm_up", "order", "block_steps", "verified_steps"
)  # fmt: skip


def measure(home: Path, sizes: Sizes, *, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the job once, and return what its ranks measured.

    Args:
        home: folder for logs and the script's output.
        sizes: sizes of model and run.
        device: `cuda`; `cpu` tests the benchmark's own code without a GPU.
        say: receives progress messages.

    Returns:
        The measurements that the job has written, in the form that `rows.of_gpt` reads. If the job failed, they include
        the failure's message.

    Raises:
        BenchmarkFailed: nothing was measured; the message has the reason and the path of the log.
    """
    slots_bytes = 2 * NODES * sizes.model_bytes * 5 // 4 + 256 * MIB
    options = ClusterOptions(
        nodes=NODES, spares=0, node_memory_bytes=slots_bytes, environment=environment_of(os.environ)
    )
    try:
        with started_bench(home, say, options) as bench:
            # Do not wait until the nodes have warm processes: the counted steps begin long after all imports.
            bench.cluster.wait_for_nodes(NODES, timeout_seconds=CONNECT_SECONDS)
            return _run(bench, sizes, device)
    except (LocalCloudError, EverstepError, OSError) as error:
        raise BenchmarkFailed(f"{error}; logs: {home}/cluster") from error


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the local cloud passes to the job's nodes.

    The environment contains the GPU driver's variables and the import path of this benchmark's modules.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    return {**{name: variables[name] for name in PASSED_ON if name in variables}, "PYTHONPATH": path}


def _run(bench: Bench, sizes: Sizes, device: str) -> dict[str, Any]:
    source = bench.directory / "source"
    source.mkdir()
    shutil.copy(SCRIPT, source / "train.py")
    job = bench.submit(
        "device-gpt",
        source,
        "train.py",
        nodes=NODES,
        copies=COPIES,
        hyperparameters={"device": device, **{name: getattr(sizes, name) for name in HYPERPARAMETERS}},
        max_slowdown=EVERY_STEP,
        Environment={"BENCH_DIRECTORY": str(bench.directory), "BENCH_EXAMPLE": str(ROOT / "examples" / "char_gpt")},
        RetryStrategy={"MaxAttempts": 1},
    )
    failure = ""
    try:
        job.completed()
    except BenchmarkFailed as error:
        failure = f"{error}; logs: {bench.cluster.nodes_directory}/*/"
    result = bench.directory / "rank0.json"
    if not result.exists():
        raise BenchmarkFailed(failure or f"job {job.name} did not write {result}")
    return {**json.loads(result.read_text()), **({"failure": failure} if failure else {})}
