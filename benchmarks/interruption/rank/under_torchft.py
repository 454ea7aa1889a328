"""The training program under torchft: one replica group with one rank, which continues when the other group ends.

    under_torchft.py RANK           TORCHFT_LIGHTHOUSE names the lighthouse

It averages gradients with `Manager.allreduce`, because an assertion in torchft 0.2.0's DistributedDataParallel ends the
surviving group if the other one disappears during a collective.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta

import work
from torch.distributed import TCPStore
from torch.nn.utils import parameters_to_vector
from torchft import Manager, Optimizer, ProcessGroupGloo

rank = int(sys.argv[1])
logging.disable(logging.WARNING)
work.prepare()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = work.make_model()
inner = work.make_optimizer(model)


def state() -> dict[str, object]:
    """Return the state for a restarted group."""
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


def load(state: dict[str, dict[str, object]]) -> None:
    """Load the live group's state."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=1,
    replica_id=f"replica{rank}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timedelta(seconds=10),
    quorum_timeout=timedelta(seconds=30),
    use_async_quorum=False,
    hostname="127.0.0.1",
)
optimizer = Optimizer(manager, inner)
trace = work.Trace(rank)
batches = work.Batches()
while manager.current_step() < work.MANY_STEPS:
    optimizer.zero_grad()
    before = manager.current_step()
    model(*batches.of(before, rank)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    for gradient, averaged in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))
    optimizer.step()
    if manager.current_step() > before:
        trace.finished(manager.current_step())
