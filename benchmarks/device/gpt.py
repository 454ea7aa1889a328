"""The part `gpt` of the device benchmark: a job trains a GPT on the GPU, with and without a copy on another node.

Two copies need a second node, whose rank 1 has a tiny state and no device (`rank/train.py`). Both nodes are on one
machine, so the values include no real network.
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
"""Variables through which a rank may find the GPU driver. The local cloud passes none by itself."""
HYPERPARAMETERS = (
    "layers", "width", "heads", "context", "batch", "accumulate", "warm_up", "order", "block_steps", "verified_steps"
)  # fmt: skip


def measure(home: Path, sizes: Sizes, *, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the job once, and return what `rows.of_gpt` reads, with the message of a failure.

    `device` `cpu` tests the benchmark's own code. Raises BenchmarkFailed with the log's path if nothing was measured.
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
    """Return the variables of the job's nodes: the GPU driver's, and the import path of this benchmark."""
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
