"""Computes the order in which ranks and workers read the samples of many files. Pure.

In each epoch, the samples of all files form one *sequence*. Shuffling changes the order of the files. The sequence is
divided into *lanes* of equal length. The ranks read all lanes at the same time:

    sequence   | file 3        | file 0    | file 1              | file 2               |
    lanes      | lane 0              | lane 1              | lane 2              | rest |
    batches      0 3 6 …               1 4 7 …               2 5 8 …               …

Each batch consists of neighbouring samples of one lane. One numbering covers the batches of all ranks. The rest of the
sequence is shorter than one batch per lane and is read at the end of the epoch. A *block* is a fixed number of
neighbouring samples of a lane, which shuffling permutes.

Invariant: the order depends on neither the number of ranks nor the number of workers.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from everstep.training.data.protocols import Order
from everstep.training.data.shares import window_count
from everstep.training.state_tree import Tree


@dataclass(frozen=True, slots=True)
class FileOrder(Order):
    """The order of the samples of many files. Rank r of R ranks receives the batches r, r + R, r + 2 R, and so on."""

    files: str
    samples: int
    lanes: int
    """Number of lanes, and of files that all ranks together read at once."""
    batch: int
    shuffle: bool
    block: int
    """1 keeps the order of samples within files."""
    seed: int
    drop_last: bool
    replicas: int
    compared: ClassVar = ("samples", "lanes", "batch", "shuffle", "block", "seed", "drop_last")

    @property
    def batches(self) -> int:
        """Number of batches of all ranks in one epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def batches_per_lane(self) -> int:
        """Number of batches of one lane in one epoch."""
        return self.samples // (self.lanes * self.batch)

    def differences(self, tree: dict[str, Tree]) -> str:
        """Return how this order differs from an earlier one, apart from the number of ranks."""
        if (found := Order.differences(self, tree)) or tree["files"] == self.files:
            return found
        return "the files have other names or lengths"

    def position(self, begin: int, batch_count: int) -> int:
        """Return the batch number after each rank has received `batch_count` batches from number `begin` on."""
        return min(begin + batch_count * self.replicas, max(begin, self.batches))

    def numbers(self, rank: int, begin: int) -> range:
        """Return equally many batch numbers for each rank, from `begin` on. The last batches may stay unread."""
        count = window_count(self.batches - begin, self.replicas, drop_last=True)
        return range(begin + rank, begin + count * self.replicas, self.replicas)

    def lane(self, number: int) -> int:
        """Return the lane of a batch; `lanes` for the rest of the sequence."""
        return number % self.lanes if number < self.lanes * self.batches_per_lane else self.lanes

    def places(self, number: int) -> range:
        """Return a batch's positions within its lane."""
        in_lanes = self.lanes * self.batches_per_lane
        first = (number // self.lanes if number < in_lanes else number - in_lanes) * self.batch
        return range(first, min(first + self.batch, self.lane_length(self.lane(number))))

    def lane_begin(self, lane: int) -> int:
        """Return the position of a lane's first sample."""
        return lane * self.batches_per_lane * self.batch

    def lane_length(self, lane: int) -> int:
        """Return the number of samples of a lane."""
        length = self.batches_per_lane * self.batch
        return length if lane < self.lanes else self.samples - self.lanes * length

    def block_range(self, lane: int, block: int) -> range:
        """Return the positions of a block's samples within its lane."""
        return range(block * self.block, min((block + 1) * self.block, self.lane_length(lane)))

    def permutation(self, epoch: int, lane: int, block: int) -> list[int]:
        """Return the order of the samples of a block, as indices into the block."""
        indices = list(range(len(self.block_range(lane, block))))
        if self.shuffle:
            random.Random(derive(self.seed, epoch, "block", lane, block)).shuffle(indices)
        return indices


class FileSequence:
    """The files of one epoch in their order. `lengths` has the order of the user's list."""

    def __init__(self, order: FileOrder, lengths: Sequence[int], epoch: int) -> None:
        self.files = [file for file, length in enumerate(lengths) if length > 0]
        """Indices into the user's list, without files that have no samples."""
        if order.shuffle:
            random.Random(derive(order.seed, epoch, "files")).shuffle(self.files)
        self._begins = list(itertools.accumulate((lengths[file] for file in self.files), initial=0))

    def find(self, number: int) -> tuple[int, int]:
        """Return the file, in the user's list, of a sample's position in the sequence, and its number in the file."""
        index = bisect.bisect_right(self._begins, number) - 1
        return self.files[index], number - self._begins[index]


def derive(*parts: int | str) -> int:
    """Return a 64-bit seed, computed from all arguments."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
