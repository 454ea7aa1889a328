"""A state of a chosen size and slots for the state, as in a training session, but without an agent.

The measured code is Everstep's: `RankState` and its adapter, `CapturePlan`, `SlotMemory`, `read_snapshot`. Only the
slot's header is written here in place of the agent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import Welcome
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.agent_link import NullLink
from everstep.training.capture import CapturePlan, SlotMemory
from everstep.training.copier import Copies
from everstep.training.restore import Arrival, Expected, map_ahead, read_snapshot
from everstep.training.script import Environment
from everstep.training.state import Observed, RankState

RUN = "d" * 32
WIDTH = 2048
BLOCK = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), *((WIDTH,),) * 4)
SMALL = (16, 64, 256, 1024, 4096)
"""Elements of small parameters such as norms, biases and gates."""
SMALL_COUNT = 1000
BYTES_A_PARAMETER = 12
"""Its value and Adam's two moments, in fp32."""
SHARE_OF_SMALL = 0.05
"""Largest share of the state's bytes."""


def shapes(size: int) -> Iterator[tuple[int, ...]]:
    """Yield many small shapes and then whole transformer blocks, for at least `size` bytes."""
    elements = -(-size // BYTES_A_PARAMETER)
    small = 0
    for number in range(SMALL_COUNT):
        count = SMALL[number % len(SMALL)]
        if small + count > SHARE_OF_SMALL * elements:
            break
        yield (count,)
        small += count
    left, block = elements - small, sum(math.prod(shape) for shape in BLOCK)
    for _ in range(left // block):
        yield from BLOCK
    if rest := left % block:
        yield (-(-rest // WIDTH), WIDTH)


class State:
    """Parameters and an Adam optimizer after its first step, registered as a training session registers them.

    Adam's step counts are on the host. `size` is the minimum in bytes.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.ParameterList(torch.randn(shape, device=device) for shape in shapes(size))
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.99, 0.999))
        self.environment = Environment.read({"EVERSTEP_JOB_NAME": "device", "EVERSTEP_RUN_ID": RUN})
        self.advance()
        self.rank_state = RankState([PlainAdapter({"": self.model}, {"": self.optimizer})], {}, {}, self.environment)

    def advance(self) -> None:
        """Run one optimizer step, which changes every tensor."""
        self.optimizer.step()

    def observe(self) -> Observed:
        """Return Everstep's description of the state, from which it plans a capture."""
        return self.rank_state.observe()

    def forget(self) -> None:
        """Reset the state as a restart does: other values, and an optimizer without moments."""
        for parameter in self.model:
            parameter.grad = None
            with torch.no_grad():
                parameter.zero_()
        self.optimizer.state.clear()

    def live(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a slot."""
        return {item.name: item.tensor.detach() for items in self.observe().lists for item in items}


class Slot:
    """A slot file on tmpfs that holds one captured state. The created file has no allocated memory yet."""

    def __init__(self, path: Path, state: State) -> None:
        observed = state.observe()
        self.path = path
        self.state = state
        self.plan = CapturePlan.make(observed.tensors)
        capacity = self.plan.capacity_bytes(observed.values)
        with path.open("wb") as file:
            file.truncate(HEADER_BYTES + capacity)
        self.memory = SlotMemory(path, capacity)

    @property
    def mapped_bytes(self) -> int:
        """Including the header."""
        return self.memory.span[1]

    def copies(self) -> Copies:
        """Return the copy operations of a capture of the current state."""
        observed = self.state.observe()
        assert self.plan.fits(observed.tensors)
        return Copies([item.tensor.detach() for item in observed.tensors], self.memory.views(self.plan))

    def seal(self) -> None:
        """Write index and sealed header, as session and agent do in a job."""
        observed = self.state.observe()
        index_bytes = self.memory.write_values(self.plan, observed.values)
        environment = self.state.environment
        header = SlotHeader(
            job=environment.job,
            run=environment.run,
            owner_rank=environment.rank,
            origin_generation=Generation(1),
            step=Step(1),
            state=SlotState.SEALED,
            capacity_bytes=self.memory.capacity_bytes,
            payload_bytes=self.plan.index_offset + index_bytes,
            index_offset=self.plan.index_offset,
            index_bytes=index_bytes,
            layout_hash=self.state.rank_state.layout_hash,
        )
        with self.path.open("r+b") as file:
            file.write(pack_header(header))

    def is_equal(self) -> bool:
        """Compare the slot file with the live state, through a separate mapping and without the copier."""
        file = torch.from_file(
            str(self.path), shared=True, size=HEADER_BYTES + self.plan.index_offset, dtype=torch.uint8
        )
        places = {
            entry.name: (HEADER_BYTES + entry.offset, HEADER_BYTES + entry.offset + entry.bytes)
            for entry in self.plan.entries
        }
        live = self.state.live()
        return bool(live) and all(
            torch.equal(file[slice(*places[name])], bytes_of(tensor).cpu()) for name, tensor in live.items()
        )

    def restore(self) -> tuple[float, float]:
        """Restore the live state as a session does.

        Return the seconds, and those of its first part, which maps the slot.
        """
        environment = self.state.environment
        named = Welcome(generation=Generation(1), word_path="", base_step=Step(1), base_slot_path=str(self.path))
        arrival = Arrival(NullLink(), named)
        expected = Expected(environment.run, environment.rank, Step(1), self.state.rank_state.facts)
        begun = time.perf_counter()
        mapped = map_ahead(self.path, self.state.rank_state.expect_restore())
        mapping = time.perf_counter() - begun
        self.state.rank_state.load(read_snapshot(named, mapped, arrival, expected))
        return time.perf_counter() - begun, mapping


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, uint8[nbytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
