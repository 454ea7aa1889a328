"""The job's script.

Rank 0 trains a GPT on the device; rank 1, on the node that holds its shard, only keeps step, on the host.

    warm-up ─▶ blocks of steps, with snapshots (A) and without (B), ABBA… ─▶ steps with snapshots, each cloned at its boundary
               timed by events on the training stream                       and compared with the bytes that the holder had of it

In a B block nothing of the session is called; the one before it is over, on the device and on the holder, when a block
begins. The first step of each block is not counted: the host is not ahead of the device yet, and a step that nobody
expected to come is not proposed. No step reads a number off the
device: torch's own watch says whether any call waited.

Two ranks, because a holder is another node of the job; one device, so the other rank leaves it to the one that is
measured. Rank 0 tells it of each step by a word over gloo that it does not wait for.
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
"""For which a commit is waited for that may not come: a step that is not kept."""
TAKE_SECONDS = 0.2
LOOK_SECONDS = 0.005
NO_BOUNDARY_SECONDS = 600.0
"""For which nobody takes a rank for stuck that passes no boundaries."""
VOCABULARY = 128
WORDS_KEPT = 8
SHARE_OF_MEMORY = 0.6
"""Of the device's free memory and of the host's, what clones and their counterparts may take."""

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
    """The GPT and one batch after another, all on the device.

    Args:
        hardware: where.
    """

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
        """Make an optimizer step and return the mean loss, on the device."""
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
    """Tells rank 1 of steps, and does not wait for it."""

    def __init__(self) -> None:
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def tell(self, word: int) -> None:
        """1: make a step; 0: end."""
        tensor = torch.tensor([word])
        work = dist.isend(tensor, 1)
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > WORDS_KEPT:
            self._sent.popleft()[0].wait()

    def end(self) -> None:
        """Say the last word, and see that all have come."""
        self.tell(0)
        for work, _ in self._sent:
            work.wait()


@dataclass
class Verified:
    """What became of the steps of which every byte is compared."""

    steps: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    """Committed, but written over before they could be read."""


class Holder:
    """Takes away what the other node holds of each step, while it holds it. In a thread of its own.

    Args:
        memory: this node's folder.
        page: of the rank.
        watch: of its commits.
    """

    def __init__(self, memory: Path, page: Path, watch: CommitWatch) -> None:
        self._memory, self._page, self._watch = memory, page, watch
        self.payloads: dict[int, tuple[torch.Tensor, SlotHeader]] = {}
        self._wanted: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def want(self, step: int) -> None:
        """Take this step when it is committed."""
        with self._changed:
            self._wanted.append(step)
            self._changed.notify()

    def end(self) -> None:
        """Return when all that can be had has been taken."""
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
        found = held(self._memory, self._page, step, rank)
        if found is None:
            return
        path, header = found
        file = torch.from_file(str(path), shared=True, size=HEADER_BYTES + header.payload_bytes, dtype=torch.uint8)
        payload = file[HEADER_BYTES:].clone()
        if header_of(path) == header:  # else it was written over meanwhile
            self.payloads[step] = payload, header


class Trainer:
    """Rank 0.

    Args:
        hardware: what it trains on.
        model: on it.
        session: restored.
        watch: of its commits.
    """

    def __init__(self, hardware: Hardware, model: Model, session: TrainingSession, watch: CommitWatch) -> None:
        self._hardware, self._model, self._session, self._watch = hardware, model, session, watch
        self._partner = Partner()
        self._last = 0
        self._waits: list[str] = []
        self._counted: list[int] = []
        """Steps with snapshots whose time is counted."""

    def step(self, *, is_kept: bool) -> None:
        """Make one step, with a boundary behind it or without."""
        loss = self._model.step()
        if is_kept:
            self._session.log(loss=loss)
            self._boundary()

    def _boundary(self) -> None:
        self._partner.tell(1)
        self._last = self._session.boundary().step
        self._watch.expect(self._last)

    def settle(self) -> None:
        """Return when nothing is under way, on the device or on the holder."""
        self._session.fence()
        self._hardware.synchronize()
        self._watch.wait(self._last, SETTLE_SECONDS)

    def block(self, kind: str) -> list[float]:
        """Return the seconds of a block's steps, by the training stream's clock."""
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
        """Make the first steps: audited ones among them, and slots are registered meanwhile."""
        for _ in range(settings.warm_up):
            self.step(is_kept=True)
        self.settle()

    def blocks(self) -> dict[str, object]:
        """Make all blocks."""
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

    def verified(self, memory: Path, page: Path, state_bytes: int) -> Verified:
        """Make steps of which every byte is compared: of as many as there is memory for."""
        found, holder, clones = Verified(), Holder(memory, page, self._watch), {}
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
        """Let the other rank go."""
        self._partner.end()


def _available_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def train() -> None:
    """Run rank 0."""
    hardware = hardware_of(settings.device)
    model = Model(hardware)
    session = everstep.training.init(model=model.net, optimizer=model.optimizer)
    memory = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent
    page = memory / os.environ["EVERSTEP_RUN_ID"] / f"rank-{rank}.word"
    watch = CommitWatch(page, int(os.environ["EVERSTEP_GENERATION"]), LOOK_SECONDS)
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
    leave(directory / "rank0.json", result)  # what was measured stays, should the rest fail
    result["verified"] = vars(trainer.verified(memory, page, int(str(result["state_bytes"]))))
    leave(directory / "rank0.json", result)
    trainer.end()
    session.close()


def keep_step() -> None:
    """Run rank 1: as many boundaries as rank 0 passes, and a state of next to nothing."""
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
    """Run one rank."""
    dist.init_process_group("gloo")
    if rank == 0:
        train()
    else:
        keep_step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
