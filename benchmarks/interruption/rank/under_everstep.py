"""The training program under Everstep, which replicates every step to the other node."""

from __future__ import annotations

import torch.distributed as dist
import work
from torch.nn.parallel import DistributedDataParallel

import everstep.training

settings = everstep.training.hyperparameters(kind="ddp")
work.prepare()
if settings.kind == "zero3":
    import deepspeed

    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=work.DEEPSPEED):
        module = work.make_model()
    model, *_ = deepspeed.initialize(model=module, optimizer=work.make_optimizer(module), config=work.DEEPSPEED)
    session = everstep.training.init(engine=model)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(work.make_model())
    optimizer = work.make_optimizer(model)
    session = everstep.training.init(model=model, optimizer=optimizer)
trace = work.Trace(rank)
batches = work.Batches()
session.restore()
while True:
    loss = model(*batches.of(session.step, rank))
    if settings.kind == "zero3":
        model.backward(loss)
        model.step()
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    control = session.boundary()
    trace.finished(control.step)
    if control.stop:
        break
session.close()
