"""Sums a known tensor with another node: `python -P -m everstep.training.all_reduce NODE ADDRESS PORT ERROR`.

The agents of two idle nodes run it (`worker.node.burn_in`), on all GPUs or on the CPU. NODE is 0 or 1, ADDRESS is node
0's, and ERROR is added to this node's share. It prints `met` when all ranks are connected, and then `wrong`, or `rate`
with the bytes per second of the bus as nccl-tests define them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Final

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

LIMIT: Final = timedelta(seconds=100)  # For both agents to receive the order and import torch, and for each sum.
ROUNDS: Final = 10  # The best rate counts. In the first round, NCCL opens its connections.


def _run(local_rank: int, local_count: int, node: int, address: str, port: int, error: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG. A rank that waits for NCCL ignores other signals.
    rank, count, listener = node * local_count + local_rank, 2 * local_count, None
    if rank == 0:  # By itself, the store would listen on all cards.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family).detach()
    at = (address, port, count, rank == 0, LIMIT)
    store = distributed.TCPStore(*at, master_listen_fd=listener)  # type: ignore[attr-defined]
    if local_rank == 0:
        _say("met")
    distributed.init_process_group(store=store, rank=rank, world_size=count, timeout=LIMIT)
    device, size = (f"cuda:{local_rank}", 1 << 26) if torch.cuda.is_available() else ("cpu", 1 << 20)
    # Floats represent these integers and their sums exactly, in any order of additions.
    share, durations = (torch.arange(size, device=device) % 251).float(), []
    for _ in range(ROUNDS):
        total = share * (rank + 1) + error
        begun = time.perf_counter()
        distributed.all_reduce(total)
        if not torch.equal(total, share * (count * (count + 1) // 2)):  # Waits for the GPU.
            _say("wrong")
            os._exit(1)
        durations.append(time.perf_counter() - begun)
    if local_rank == 0:
        _say(f"rate {int(2 * (count - 1) / count * share.nbytes / min(durations))}")
    os._exit(0)  # Torch's own exit aborts the process if another rank has exited.


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.alarm(2 * LIMIT.seconds)
    gpu_count = torch.cuda.device_count()
    arguments = (max(1, gpu_count), int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if gpu_count > 1:
        spawn(_run, arguments, nprocs=gpu_count)  # type: ignore[no-untyped-call]
    else:
        _run(0, *arguments)
