"""Runs a rank of the benchmark's training: timed waits in place of computation, and real gloo collectives.

python -m benchmarks.interleave.rank CASE.json NODE FD OUT.json
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.interleave.schemes import Scheme, program
from benchmarks.interleave.wire import Line, read_case
from everstep.protocol.rank_messages import IdleSpan
from everstep.training.profile import PROFILED_ITERATIONS, WARM_UP_ITERATIONS, NetworkProfiler, TorchTrace


class Training:
    def __init__(self, case_path: Path, node: int, agent: Line) -> None:
        self.case = read_case(case_path)
        self.agent = agent
        self.node = node
        self.number = 0
        self.records: list[dict[str, Any]] = []
        self.tensors = [torch.ones(self.case.collective_bytes // 4) for _ in self.case.idle_seconds]
        self.profiler = NetworkProfiler(self._spans, TorchTrace())
        self.is_profiled = False

    def _spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        found = [[span.begin_seconds, span.seconds, span.deviation_seconds] for span in spans]
        self.agent.send(kind="spans", iteration_seconds=iteration_seconds, spans=found)
        self.records.append({"spans": found, "iteration_seconds": iteration_seconds})
        self.is_profiled = True

    def run(self) -> None:
        dist.barrier()
        self.agent.ask(kind="probe")
        dist.barrier()
        for _ in range(WARM_UP_ITERATIONS + PROFILED_ITERATIONS + 2):
            self.profiler.boundary(time.monotonic())
            self.iterate(Scheme.NONE, is_measured=False)
        if not self.is_profiled:
            raise RuntimeError("the profiler found nothing to report")
        for block in program(self.case):
            for position in range(block.iterations):
                self.iterate(block.scheme, is_measured=block.is_measured and position > 0)
            self.agent.ask(kind="drain")
            dist.barrier()
        self.agent.ask(kind="finish")

    def iterate(self, scheme: Scheme, *, is_measured: bool) -> None:
        self.number += 1
        begin = time.monotonic()
        self.agent.send(kind="boundary", number=self.number, scheme=scheme, at=begin, is_measured=is_measured)
        if scheme is Scheme.BLOCKING:
            self.agent.wait_for(kind="sent", number=self.number)
        busy = 0.0
        for idle, tensor in zip(self.case.idle_seconds, self.tensors, strict=True):
            select.select([], [], [], idle)
            collective = time.monotonic()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            busy += time.monotonic() - collective
        if scheme.delays_update:
            self.agent.wait_for(kind="sent", number=self.number)
        dist.barrier()
        if is_measured or not self.is_profiled:
            record = {"scheme": scheme, "seconds": time.monotonic() - begin, "busy_seconds": busy}
            self.records.append(record | {"number": self.number, "is_measured": is_measured})


def main() -> None:
    case_path, node, descriptor, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    line = Line(socket.socket(fileno=descriptor))
    training = Training(case_path, node, line)
    try:
        training.run()
    finally:
        out.write_text(json.dumps(training.records))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
