"""Computes the order in which ranks and workers read the samples of many files. Pure.

In each epoch, the samples of all files form one *sequence*. Shuffling changes the order of the files. The sequence is
divided into *lanes* of equal length. The ranks read all lanes at the same time:

    sequence   | file 3        | file 0    | file 1              | file 2               |
    lanes      | lane 0              | lane 1              | lane 2              | rest |
    batches      0 3 6 …               1 4 7 …               2 5 8 …               …

Each batch consists of neighbouring samples of one lane. One numbering covers the batches of all ranks: batch 0 is the
first batch of lane 0, batch 1 is the first batch of lane 1, and so on. The rest of the sequence is shorter than one
batch per lane and is read at the end of the epoch. A *block* is a fixed number of neighbouring samples of a lane.
Shuffling also permutes the samples of each block.

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
    """The order of the samples of many files, and the number of ranks that divide it.

    The ranks receive the batches in turn: rank r of R ranks receives the batches r, r + R, r + 2 R, and so on.
    """

    files: str
    """Digest of the names and lengths of all files."""
    samples: int
    """Number of samples in all files together."""
    lanes: int
    """Number of lanes (equal parts of the epoch's samples), and thus of files that all ranks together read at once."""
    batch: int
    """Number of samples in one batch of one rank."""
    shuffle: bool
    """True if each epoch has a different order of files, and other permutations of the blocks."""
    block: int
    """Number of neighbouring samples that are shuffled with each other. With 1, the samples of a file keep their
    order."""
    seed: int
    drop_last: bool
    """True if an epoch leaves out its last batch when this batch has fewer samples than the other batches."""
    replicas: int
    """Number of ranks that divide the batches."""
    compared: ClassVar = ("samples", "lanes", "batch", "shuffle", "block", "seed", "drop_last")

    @property
    def batches(self) -> int:
        """Number of batches of all ranks together in one epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def batches_per_lane(self) -> int:
        """Batches of one lane (an equal part of the epoch's samples) in one epoch."""
        return self.samples // (self.lanes * self.batch)

    def differences(self, tree: dict[str, Tree]) -> str:
        """Return, as text, how this order differs from that of an earlier launch, apart from the number of ranks."""
        if (found := Order.differences(self, tree)) or tree["files"] == self.files:
            return found
        return "the files have other names or lengths"

    def position(self, begin: int, batch_count: int) -> int:
        """Return the number of the batch at which the ranks continue, in the numbering of all ranks together.

        Each rank has received `batch_count` batches before. `begin` is the number of the first of all these batches.
        """
        return min(begin + batch_count * self.replicas, max(begin, self.batches))

    def numbers(self, rank: int, begin: int) -> range:
        """Return the numbers of the batches that one rank receives in an epoch.

        All ranks receive the same number of batches. The last batches of an epoch, fewer than the number of ranks, may
        stay unread.

        Args:
            rank: index of the rank among the ranks that divide the batches.
            begin: number of the first batch that any rank receives.

        Returns:
            Batch numbers in ascending order. One numbering covers the batches of all ranks (see the module).
        """
        count = window_count(self.batches - begin, self.replicas, drop_last=True)
        return range(begin + rank, begin + count * self.replicas, self.replicas)

    def lane(self, number: int) -> int:
        """Return the index of the lane (part of the epoch's sequence) that contains a batch.

        The rest of the sequence, which is shorter than one batch per lane, has the index `lanes`.
        """
        return number % self.lanes if number < self.lanes * self.batches_per_lane else self.lanes

    def places(self, number: int) -> range:
        """Return a batch's positions within its lane (part of the epoch), counted from the lane's first sample."""
        in_lanes = self.lanes * self.batches_per_lane
        first = (number // self.lanes if number < in_lanes else number - in_lanes) * self.batch
        return range(first, min(first + self.batch, self.lane_length(self.lane(number))))

    def lane_begin(self, lane: int) -> int:
        """Return where a lane (part of the epoch) begins: the position of its first sample among all samples."""
        return lane * self.batches_per_lane * self.batch

    def lane_length(self, lane: int) -> int:
        """Return the number of samples of a lane (a part of the epoch's sequence of samples)."""
        length = self.batches_per_lane * self.batch
        return length if lane < self.lanes else self.samples - self.lanes * length

    def block_range(self, lane: int, block: int) -> range:
        """Return the positions of a block's samples within its lane (part of the epoch).

        A block consists of neighbouring samples that are shuffled together.
        """
        return range(block * self.block, min((block + 1) * self.block, self.lane_length(lane)))

    def permutation(self, epoch: int, lane: int, block: int) -> list[int]:
        """Return the order in which ranks read the samples of a block (neighbouring samples, shuffled together).

        Args:
            epoch: index of the epoch, from 0.
            lane: index of the lane (part of the epoch's sequence of samples), from 0.
            block: index of the block in its lane, from 0.

        Returns:
            Indices into the block, from 0.
        """
        indices = list(range(len(self.block_range(lane, block))))
        if self.shuffle:
            random.Random(derive(self.seed, epoch, "block", lane, block)).shuffle(indices)
        return indices


class FileSequence:
    """The files of one epoch in their order, with the position of each file's first sample in the epoch.

    Args:
        order: the order of the samples.
        lengths: samples per file, in the order of the user's list.
        epoch: index of the epoch, from 0.
    """

    def __init__(self, order: FileOrder, lengths: Sequence[int], epoch: int) -> None:
        self.files = [file for file, length in enumerate(lengths) if length > 0]
        """Indices into the user's list of files, in the order of the epoch. Files without samples are left out."""
        if order.shuffle:
            random.Random(derive(order.seed, epoch, "files")).shuffle(self.files)
        self._begins = list(itertools.accumulate((lengths[file] for file in self.files), initial=0))

    def find(self, number: int) -> tuple[int, int]:
        """Find the file that contains a sample.

        Args:
            number: position of the sample in the sequence, from 0.

        Returns:
            The index of its file in the user's list, and the sample's number in this file.
        """
        index = bisect.bisect_right(self._begins, number) - 1
        return self.files[index], number - self._begins[index]


def derive(*parts: int | str) -> int:
    """Return a 64-bit seed, computed from all arguments."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
