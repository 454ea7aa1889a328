"""Training script of the GPU benchmark's job: rank 0 trains a GPT on the device, rank 1's node holds its shard.

    warm-up ─▶ blocks of steps, with snapshots (A) and without (B), ABBA…    timed by events on the training stream
            ─▶ steps with snapshots, each cloned at its boundary             compared with the holder's bytes

A block starts when the device and the holder have finished the previous one. Its first step is not counted, because the
host has not queued work ahead. No step reads a value from the device; torch's warnings about waits are recorded. Rank 0
announces each step to rank 1, which has a tiny state, over gloo without waiting.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import everstep.training
from benchmarks.data_plane.rank.everstep_job import CommitWatch, equals, header_of, held, leave
from benchmarks.device.rank.hardware import Hardware, hardware_of
from everstep.protocol.slot import HEADER_BYTES, SlotHeader
from everstep.training.session import TrainingSession

SETTLE_SECONDS = 5.0
"""Longest wait for a commit. A step without a snapshot is never committed."""
TAKE_SECONDS = 0.2
LOOK_SECONDS = 0.005
NO_BOUNDARY_SECONDS = 600.0
"""Declared limit for a block without boundaries, so that the rank does not count as stuck."""
VOCABULARY = 128
WORDS_KEPT = 8
SHARE_OF_MEMORY = 0.6
"""Share of free memory for the final comparison: clones on the device, copies of the holder's slots on the host."""

settings = everstep.training.hyperparameters(
    device="cuda",
    layers=16,
    width=1024,
    heads=16,
    context=1024,
    batch=32,
    accumulate=8,
    warm_up=10,
    order="ABBA",
    block_steps=7,
    verified_steps=12,
)
directory = Path(os.environ["BENCH_DIRECTORY"])
rank = int(os.environ["RANK"])

sys.path.insert(0, os.environ["BENCH_EXAMPLE"])
from model import GPT, GPTConfig  # noqa: E402  (the example's, as it is)


class Model:
    """The GPT and its batches, on the device."""

    def __init__(self, hardware: Hardware) -> None:
        torch.manual_seed(7)
        self._hardware = hardware
        with torch.device(hardware.device):
            self.net = GPT(
                GPTConfig(VOCABULARY, settings.layers, settings.width, settings.heads, settings.context, 0.0)
            )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-4, fused=True)
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
        self._text = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=VOCABULARY - 1).long().to(hardware.device)
        )
        self._offsets = torch.arange(settings.context + 1, device=hardware.device)

    def step(self) -> torch.Tensor:
        """Run an optimizer step; return the mean loss on the device."""
        losses = []
        for _ in range(settings.accumulate):
            starts = torch.randint(
                len(self._text) - settings.context - 1, (settings.batch, 1), device=self._hardware.device
            )
            windows = self._text[starts + self._offsets]
            with self._hardware.autocast():
                loss = self.net(windows[:, :-1], windows[:, 1:]) / settings.accumulate
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()


class Partner:
    """Sends rank 0's announcements of steps to rank 1, without waiting."""

    def __init__(self) -> None:
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def tell(self, word: int) -> None:
        """Send rank 1 a 1 for another step, or a 0 at the end."""
        tensor = torch.tensor([word])
        work = dist.isend(tensor, 1)
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > WORDS_KEPT:
            self._sent.popleft()[0].wait()

    def end(self) -> None:
        """Announce the end, and wait until rank 1 has received all announcements."""
        self.tell(0)
        for work, _ in self._sent:
            work.wait()


@dataclass
class Verified:
    """The comparison of the final steps with the holder's copy."""

    steps: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    """Committed steps whose slot was overwritten before it was read."""


class Holder:
    """Copies rank 0's slots in a thread, as a holder would, before later snapshots overwrite them."""

    def __init__(self, memory: Path, run: str, watch: CommitWatch) -> None:
        self._memory, self._run, self._watch = memory, run, watch
        self.payloads: dict[int, tuple[torch.Tensor, SlotHeader]] = {}
        self._wanted: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def want(self, step: int) -> None:
        """Request a copy of the slot of a step, after its commit."""
        with self._changed:
            self._wanted.append(step)
            self._changed.notify()

    def end(self) -> None:
        """Wait for every requested step, then end the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _take(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_over)
                if not self._wanted:
                    return
                step = self._wanted.popleft()
            while not self._watch.wait(step, TAKE_SECONDS) and not self._is_over:
                pass
            self._read(step)

    def _read(self, step: int) -> None:
        found = held(self._memory, self._run, step, rank)
        if found is None:
            return
        path, header = found
        file = torch.from_file(str(path), shared=True, size=HEADER_BYTES + header.payload_bytes, dtype=torch.uint8)
        payload = file[HEADER_BYTES:].clone()
        if header_of(path) == header:  # a changed header means that the slot was overwritten during the copy
            self.payloads[step] = payload, header


class Trainer:
    """The training loop of rank 0."""

    def __init__(self, hardware: Hardware, model: Model, session: TrainingSession, watch: CommitWatch) -> None:
        self._hardware, self._model, self._session, self._watch = hardware, model, session, watch
        self._partner = Partner()
        self._last = 0
        self._waits: list[str] = []
        self._counted: list[int] = []
        """Steps with snapshots whose duration counts."""

    def step(self, *, is_kept: bool) -> None:
        """Run one step. With `is_kept`, call `boundary` after it."""
        loss = self._model.step()
        if is_kept:
            self._session.log(loss=loss)
            self._boundary()

    def _boundary(self) -> None:
        self._partner.tell(1)
        self._last = self._session.boundary().step
        self._watch.expect(self._last)

    def settle(self) -> None:
        """Wait until the device is idle and the last step is committed, for at most `SETTLE_SECONDS`."""
        self._session.fence()
        self._hardware.synchronize()
        self._watch.wait(self._last, SETTLE_SECONDS)

    def block(self, kind: str) -> list[float]:
        """Run `block_steps` steps, and return the seconds of each on the training stream."""
        self.settle()
        timeline, is_kept = self._hardware.timeline(), kind == "A"
        with contextlib.nullcontext() if is_kept else self._session.phase("eval", limit_seconds=NO_BOUNDARY_SECONDS):
            with self._hardware.synchronizations() as said:
                for number in range(settings.block_steps):
                    self.step(is_kept=is_kept)
                    timeline.mark()
                    if is_kept and number:
                        self._counted.append(self._last)
            self._waits += said
            return timeline.seconds()

    def warm_up(self) -> None:
        """Run the first steps with snapshots, in which the driver pins the slots and Everstep audits snapshots."""
        for _ in range(settings.warm_up):
            self.step(is_kept=True)
        self.settle()

    def blocks(self) -> dict[str, object]:
        """Run blocks with (A) and without (B) snapshots, ABBA."""
        blocked = len(self._session.blocked_seconds)
        seconds = [self.block(kind) for kind in settings.order]
        self.settle()
        return {
            "order": settings.order,
            "step_seconds": seconds,
            "kept_steps": len(self._counted),
            "commits": sum(step in self._watch.at for step in self._counted),
            "blocked_seconds": list(self._session.blocked_seconds)[blocked:],
            "synchronizations": self._waits,
        }

    def verified(self, memory: Path, run: str, state_bytes: int) -> Verified:
        """Run as many steps with snapshots as memory permits, and compare all committed bytes with the holder's."""
        found, holder, clones = Verified(), Holder(memory, run, self._watch), {}
        room = int(SHARE_OF_MEMORY * min(self._hardware.free_bytes(), _available_bytes()) / state_bytes)
        for _ in range(max(1, min(settings.verified_steps, room))):
            self._model.step()
            clones[self._last + 1] = {name: tensor.clone() for name, tensor in self._session.state_tensors().items()}
            self._boundary()
            holder.want(self._last)
        self.settle()
        holder.end()
        found.steps = sorted(clones)
        found.committed = [step for step in found.steps if step in self._watch.at]
        for step in found.committed:
            if step not in holder.payloads:
                found.unseen.append(step)
            elif equals(*holder.payloads[step], clones[step]):
                found.equal.append(step)
            else:
                found.torn.append(step)
        return found

    def end(self) -> None:
        """Announce the end to rank 1."""
        self._partner.end()


def _available_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def train() -> None:
    """Run rank 0: train on the device, and write the measurements."""
    hardware = hardware_of(settings.device)
    model = Model(hardware)
    session = everstep.training.init(model=model.net, optimizer=model.optimizer)
    memory = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent
    run = os.environ["EVERSTEP_RUN_ID"]
    watch = CommitWatch(f"{run}/rank-{rank}.word", int(os.environ["EVERSTEP_GENERATION"]), LOOK_SECONDS)
    session.restore()
    trainer = Trainer(hardware, model, session, watch)
    begun = time.monotonic()
    trainer.warm_up()
    result: dict[str, object] = {
        "device": hardware.device.type,
        "parameters": sum(parameter.numel() for parameter in model.net.parameters()),
        "state_bytes": sum(tensor.nbytes for tensor in session.state_tensors().values()),
        "tokens": settings.batch * settings.accumulate * settings.context,
        "warm_up_seconds": time.monotonic() - begun,
    }
    result |= trainer.blocks()
    leave(directory / "rank0.json", result)  # write the measurements now, in case a later step fails
    result["verified"] = vars(trainer.verified(memory, run, int(str(result["state_bytes"]))))
    leave(directory / "rank0.json", result)
    trainer.end()
    session.close()


def keep_step() -> None:
    """Run rank 1: call `boundary` as often as rank 0."""
    torch.manual_seed(rank)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = everstep.training.init(model=net, optimizer=optimizer)
    session.restore()
    word = torch.ones(1, dtype=torch.int64)
    while True:
        dist.recv(word, 0)
        if not word.item():
            break
        net(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        session.boundary()
    session.close()


def main() -> None:
    """Run rank 0 or rank 1, as the environment variable RANK selects."""
    dist.init_process_group("gloo")
    if rank == 0:
        train()
    else:
        keep_step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
