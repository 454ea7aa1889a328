"""The training state that every measured system protects, and synchronization of the two ranks.

fp32 parameters with the shapes of a transformer, and Adam's moments: the same shapes for every system. Every step
changes every byte.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH = 512
RANKS = 2
GRADIENT = 1e-3
"""Value of every element. Everstep's snapshots contain gradients that a step leaves uncleared to the next."""
BLOCK = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,))
BYTES_OF_BLOCK = 3 * 4 * sum(math.prod(shape) for shape in BLOCK)


class State:
    """Parameters with fixed gradients, and Adam after its first step.

    `mebibytes` is rounded to whole transformer blocks. `rank` is the seed of the values.
    """

    def __init__(self, mebibytes: int, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7 + rank)
        count = max(1, round(mebibytes * 1024**2 / BYTES_OF_BLOCK))
        self.module = torch.nn.ParameterList(torch.randn(shape) for _ in range(count) for shape in BLOCK)
        for parameter in self.module:
            parameter.grad = torch.full_like(parameter, GRADIENT)
        # With the first beta of 0.99, the first moment changes slowly. With the default beta of 0.9 and fixed
        # gradients, the moment would stop changing after 150 steps. A system could then skip the unchanged bytes.
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, betas=(0.99, 0.999), fused=True)
        self.steps = 0
        self.advance()

    def advance(self) -> None:
        """Clear and write the gradients, and run one optimizer step."""
        self.optimizer.zero_grad(set_to_none=False)
        for parameter in self.module:
            assert parameter.grad is not None
            parameter.grad.fill_(GRADIENT)
        self.optimizer.step()
        self.steps += 1

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a snapshot's tensors by name, in the same order in every process."""
        for number, parameter in enumerate(self.module):
            yield f"{number}", parameter.detach()
            kept = self.optimizer.state[parameter]
            yield f"{number}.exp_avg", kept["exp_avg"]
            yield f"{number}.exp_avg_sq", kept["exp_avg_sq"]

    @property
    def nbytes(self) -> int:
        """Bytes of all `tensors`."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tree(self) -> dict[str, object]:
        """Return the live tensors as a state dict for a checkpoint library."""
        named = dict(self.tensors())
        model = {name: tensor for name, tensor in named.items() if "." not in name}
        moments = {name: {kind: named[f"{name}.{kind}"] for kind in ("exp_avg", "exp_avg_sq")} for name in model}
        return {"model": model, "optim": moments, "step": self.steps}

    def load(self, tree: dict[str, object]) -> None:
        """Copy a state dict like `tree` into the live tensors."""
        for live, saved in zip(leaves(self.tree()), leaves(tree), strict=True):
            live.copy_(saved)

    def spoil(self) -> None:
        """Overwrite all tensors, and drop the gradients as a restart does, so that a restore without effect fails."""
        for _, tensor in self.tensors():
            tensor.zero_()
        for parameter in self.module:
            parameter.grad = None

    def dump(self, path: Path) -> None:
        """Write the bytes of all tensors in sequence, for `equals_dump`."""
        dump_tensors((tensor for _, tensor in self.tensors()), path)

    def equals_dump(self, path: Path) -> bool:
        """Return whether every byte equals the file of `dump`."""
        return equal_to_dump([tensor for _, tensor in self.tensors()], path)


def leaves(tree: object) -> Iterator[torch.Tensor]:
    """Yield a state dict's tensors in the order of `State.tree`: the model, then the optimizer."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)


def dump_tensors(tensors: Iterable[torch.Tensor], path: Path) -> None:
    """Write the bytes of all tensors in sequence."""
    with path.open("wb") as file:
        for tensor in tensors:
            tensor.numpy().tofile(file)


def equal_to_dump(tensors: list[torch.Tensor], path: Path) -> bool:
    """Compare tensors with a dump by bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    size = sum(tensor.nbytes for tensor in tensors)
    if path.stat().st_size != size:
        return False
    saved = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        if not torch.equal(tensor.contiguous().reshape(-1).view(torch.uint8), saved[offset : offset + tensor.nbytes]):
            return False
        offset += tensor.nbytes
    return True


class Meeting:
    """Synchronizes the two ranks through a torch store of rank 0, apart from the system's communication."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
        self._count = 0

    def wait(self) -> None:
        """Wait until both ranks have called this method."""
        self._count += 1
        if self.store.add(f"meeting/{self._count}", 1) == RANKS:
            self.store.set(f"met/{self._count}", "1")
        self.store.wait([f"met/{self._count}"])

    def largest(self, value: float) -> float:
        """Return the larger of the two ranks' values. Collective."""
        self.store.set(f"value/{self._count}/{self.rank}", repr(value))
        self.wait()
        return max(float(self.store.get(f"value/{self._count - 1}/{rank}")) for rank in range(RANKS))

    def leave(self) -> None:
        """Leave the store. Rank 0, which runs it, waits until rank 1 has left."""
        if self.rank:
            self.store.set("gone", "1")
        else:
            self.store.wait(["gone"])


def least(value: int) -> int:
    """Return the smallest of all ranks' values. Collective."""
    word = torch.tensor([value])
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return int(word)


def leave(path: Path, result: Mapping[str, object]) -> None:
    """Write a result file atomically."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(result))
    scratch.replace(path)


def pause(seconds: float) -> None:
    """Sleep in place of forward and backward. The CPU stays free."""
    threading.Event().wait(seconds)
