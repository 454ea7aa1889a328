"""Shuffles a stream of samples in blocks, so that the order can be resumed exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import cast

from torch.utils.data import IterableDataset

from everstep.training import rng
from everstep.training.data.file_order import derive
from everstep.training.data.protocols import Stateful, set_epoch
from everstep.training.errors import SessionMisuse


class ShuffledBlocks(IterableDataset[object]):
    """An iterable dataset that reads another dataset in blocks of neighbouring samples and shuffles each block.

        data = load_dataset(…, streaming=True)
        loader = DataLoader(ShuffledBlocks(data, block_size=1000, seed=1), batch_size=8)

    A restart loses the content of a shuffle buffer of Hugging Face `datasets`. With this class, a resumed run reads the
    current block again, at most `block_size` samples, and continues in the middle of the block.

    Args:
        dataset: an iterable dataset with `state_dict` and `load_state_dict`, whose state is its position in the epoch.
        block_size: number of samples per block. A worker holds one block in memory.
        seed: seed of the permutations. They differ in each epoch.

    Raises:
        SessionMisuse: the dataset has no state, or the block size is below 1.
    """

    def __init__(self, dataset: Iterable[object], block_size: int, seed: int = 0) -> None:
        if not isinstance(dataset, Stateful) or block_size < 1:
            raise SessionMisuse(
                f"ShuffledBlocks got a {type(dataset).__name__} and block_size {block_size}. Pass an iterable dataset "
                "with state_dict and load_state_dict, and a block_size of 1 or more"
            )
        self.dataset = dataset
        self.block_size = block_size
        self.seed = seed
        self._epoch = 0
        self._block = 0
        self._yielded_count = 0
        self._before: dict[str, object] | None = None
        """The dataset's state at the beginning of the block; None: beginning of the epoch."""
        self._generators: rng.States | None = None
        self._is_loaded = False

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. The session calls this before each epoch."""
        self._epoch = epoch
        set_epoch(self.dataset, epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position: the block, its yielded samples, and the states before the block was read."""
        return {
            "dataset": self._before,
            "block": self._block,
            "yielded": self._yielded_count,
            "generators": self._generators,
        }

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Restore a position that `state_dict` returned."""
        self._before = cast("dict[str, object] | None", state_dict["dataset"])
        self._block, self._yielded_count = cast(int, state_dict["block"]), cast(int, state_dict["yielded"])
        self._generators = cast("rng.States | None", state_dict["generators"])
        if self._before is not None:
            cast(Stateful, self.dataset).load_state_dict(self._before)
        self._is_loaded = True

    def __iter__(self) -> Iterator[object]:
        if not self._is_loaded:
            self._before, self._block, self._yielded_count = None, 0, 0
        self._is_loaded = False
        generators = rng.find_generators([self.dataset])
        samples = iter(cast("Iterable[object]", self.dataset))
        while True:
            if self._yielded_count and self._generators is not None:
                # The process before the restart has yielded a part of this block of samples. Read the block with the
                # generators' earlier states, so that reading draws the same numbers again.
                with rng.kept(generators):
                    rng.set_states(generators, self._generators)
                    block = list(itertools.islice(samples, self.block_size))
            else:
                self._generators = rng.states(generators)
                block = list(itertools.islice(samples, self.block_size))
            random.Random(derive(self.seed, self._epoch, "block", self._block)).shuffle(block)
            for sample in block[self._yielded_count :]:
                self._yielded_count += 1
                yield sample
            if len(block) < self.block_size:
                return
            self._before = cast(Stateful, self.dataset).state_dict()
            self._block, self._yielded_count = self._block + 1, 0
