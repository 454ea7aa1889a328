"""Runs one case: starts its network and nodes, and removes them afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.interleave.figures import Figure, evaluate
from benchmarks.interleave.network import Network
from benchmarks.interleave.schemes import Case, program
from benchmarks.interleave.wire import write_case
from benchmarks.machine import ROOT

START_SECONDS = 60.0


def patience_seconds(case: Case) -> float:
    """Return a case's time limit: three times its undisturbed duration."""
    iteration = sum(case.idle_seconds) + len(case.idle_seconds) * case.collective_seconds
    return START_SECONDS + 3 * iteration * (40 + sum(block.iterations for block in program(case)))


def run_case(case: Case, directory: Path) -> Figure:
    """Run one case in a new folder. Raises BenchmarkFailed, with the log's path, if a node failed or took too long."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "case.json"
    write_case(path, case)
    with Network(case.nodes, case.link_megabits) as network, contextlib.ExitStack() as stack:
        nodes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, nodes)
        for index in range(case.nodes):
            log = stack.enter_context((directory / f"node-{index}.log").open("wb"))
            command = [
                "ip",
                "netns",
                "exec",
                network.namespace(index),
                sys.executable,
                "-m",
                "benchmarks.interleave.node",
            ]
            nodes.append(
                subprocess.Popen(
                    [*command, path, str(index), directory],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        patience = patience_seconds(case)
        for index, node in enumerate(nodes):
            try:
                code = node.wait(timeout=patience)
            except subprocess.TimeoutExpired as error:
                raise BenchmarkFailed(
                    f"case {case.name}: node {index} did not end in time; see {directory}/node-{index}.log"
                ) from error
            if code:
                raise BenchmarkFailed(
                    f"case {case.name}: node {index} ended with {code}; see {directory}/node-{index}.log"
                )
    ranks = [json.loads((directory / f"rank-{index}.json").read_text()) for index in range(case.nodes)]
    agents = [json.loads((directory / f"node-{index}.json").read_text()) for index in range(case.nodes)]
    return evaluate(case, ranks, agents)


def _end(nodes: list[subprocess.Popen[bytes]]) -> None:
    """Kill every node's agent and rank, one process session each."""
    for node in nodes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
