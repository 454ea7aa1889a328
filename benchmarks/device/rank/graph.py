"""The part `graph`: captures a training step as a CUDA graph during the copy of a snapshot, then replays the graph.

copier: a copy starts and waits ──▶ continues once the graph's capture has started ──▶ ends, and another slot is
        registered, before the graph's capture ends
graph:  replays with a snapshot after each; every snapshot is compared with a clone of the state, and the final
        weights with the weights after the same steps without a graph
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from benchmarks.device.rank.hardware import Hardware, Registration
from benchmarks.device.rank.state import Slot, State, bytes_of
from everstep.protocol.slot import HEADER_BYTES
from everstep.training.capture import CapturePlan, SlotMemory, StateTensor
from everstep.training.copier import Copies
from everstep.training.cuda_copier import CudaCopier

WIDTH = 512
LAYERS = 4
BATCH = 64
WARM_UP = 3
PATIENCE_SECONDS = 60.0
TOLERANCE = 1e-2
"""Difference between weights with and without a graph, relative to the largest weight. A graph can sum in another
order; a missing step would differ by more.
"""


class Model:
    """A few layers whose step can be captured. All state is on the device, with the optimizer's step count."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(11)
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        self._net = torch.nn.Sequential(*layers).to(device)
        self._inputs, self._targets = (torch.randn(BATCH, WIDTH, device=device) for _ in range(2))
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3, capturable=device.type == "cuda")

    def step(self) -> None:
        """Run one training step, which is captured as a graph."""
        self._optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.mse_loss(self._net(self._inputs), self._targets).backward()
        self._optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state by name."""
        named = {name: parameter.detach() for name, parameter in self._net.named_parameters()}
        for name, parameter in self._net.named_parameters():
            named |= {f"{name}/{key}": value for key, value in self._optimizer.state[parameter].items()}
        return named

    def weights(self) -> torch.Tensor:
        """Return all weights as float32[n]."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._net.parameters()])


def survives(hardware: Hardware, size: int, replays: int, folder: Path) -> dict[str, object]:
    """Capture a graph during a snapshot's copy of `size` bytes. Then replay it, with a snapshot after each replay.

    `folder` is on tmpfs. Returns what `rows.of_graph` reads.
    """
    gate, registration = threading.Event(), Registration()
    state = State(hardware.device, size)
    slot, other = Slot(folder / "slot-0", state), Slot(folder / "slot-1", state)
    copier = hardware.copier(registration, lambda: gate.wait(PATIENCE_SECONDS))
    model, eager = Model(hardware.device), Model(hardware.device)
    errors: list[BaseException | None] = []
    was_held: list[bool] = []
    ticket = copier.start(slot.copies(), errors.append)
    copier.prepare(other.memory)

    def during() -> None:
        was_held.append(not errors)
        gate.set()
        ticket.wait()
        ticket.join()
        if isinstance(copier, CudaCopier):
            registration.wait(other.mapped_bytes)

    try:
        replay = hardware.graph(model.step, during, warm_up=WARM_UP)
        result: dict[str, object] = {
            "was_in_flight": was_held == [True],
            "copy_error": "" if errors == [None] else str(errors),
            "slot_equal": slot.is_equal(),
            "registered_bytes": registration.registered_bytes,
        }
        kept = _Kept(model, folder / "slot-2")
        # Let the GPU driver pin the slot first. Copies into an unpinned slot make the host wait, so that no copy would
        # overlap a replay of the graph, and this benchmark would not test the overlap.
        copier.prepare(kept.memory)
        if isinstance(copier, CudaCopier):
            registration.wait(other.mapped_bytes + kept.memory.span[1])
        torn = 0
        for _ in range(replays):
            replay()
            clones = {name: bytes_of(tensor).clone() for name, tensor in model.tensors().items()}
            between = copier.start(kept.copies(), errors.append)
            # Make the next replay of the CUDA graph wait on the device until the snapshot is copied.
            hardware.fence(between)
            replay()
            between.join()
            torn += not kept.is_equal(clones)
        hardware.synchronize()
    finally:
        gate.set()
        copier.close()
    made = 2 * replays
    for _ in range(WARM_UP + made):
        eager.step()
    difference = float((model.weights() - eager.weights()).abs().max())
    scale = float(eager.weights().abs().max())
    return result | {
        "replays": made,
        "kept": replays,
        "torn": torn,
        "weights_differ": difference / scale,
        "tolerance": TOLERANCE,
    }


class _Kept:
    """A slot file for the model's snapshots, with its copies."""

    def __init__(self, model: Model, path: Path) -> None:
        tensors = [StateTensor(name, tensor, True) for name, tensor in model.tensors().items()]
        self._plan = CapturePlan.make(tensors)
        capacity = self._plan.capacity_bytes(b"")
        with path.open("wb") as file:
            file.truncate(HEADER_BYTES + capacity)
        self.memory = SlotMemory(path, capacity)
        self._sources = [state.tensor for state in tensors]

    def copies(self) -> Copies:
        return Copies(self._sources, self.memory.views(self._plan))

    def is_equal(self, clones: dict[str, torch.Tensor]) -> bool:
        views = self.memory.views(self._plan)
        return all(
            torch.equal(bytes_of(view), clones[entry.name].cpu())
            for entry, view in zip(self._plan.entries, views, strict=True)
        )
