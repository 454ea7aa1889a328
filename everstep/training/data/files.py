"""Streams samples from many files, in an order that any number of ranks and workers can continue at any position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import PurePath
from typing import cast

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from everstep.training import rng
from everstep.training.data.file_order import FileOrder, FileSequence, derive
from everstep.training.data.protocols import END, Order, place_in_world
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.state_tree import Tree

logger = logging.getLogger("everstep.training")


class ShardedFiles(IterableDataset[object]):
    """A dataset that streams batches from many files, for a DataLoader with `batch_size=None`.

        files = ShardedFiles(paths, read, lengths, batch_size=8, shuffle=True, block_size=4096)
        loader = DataLoader(files, batch_size=None, num_workers=4)

    The ranks divide the batches of each epoch. Which samples a batch contains does not depend on the number of ranks,
    the number of workers or the position at which a run resumes. Before `read` loads a sample and before `collate_fn`
    combines a batch, the dataset seeds the process's CPU generators for this sample or batch. Random augmentation in
    `read` is therefore repeatable too.

    An epoch reads `open_files` files at the same time. If `open_files` is a multiple of the ranks times the workers,
    each worker reads its own files. Otherwise several workers read the same file, each only up to the last sample that
    it needs.

    Args:
        files: the files: paths, addresses, or other objects that `read` accepts. All ranks pass the same files.
        read: reads one file from its beginning. Returns its samples, in the same order at each call.
        lengths: samples per file, in the order of `files`. The position of a sample follows from them.
        batch_size: samples per batch of one rank.
        collate_fn: combines a list of samples into a batch.
        shuffle: shuffle the files of each epoch, and the samples of each block.
        block_size: neighbouring samples that are shuffled with each other. A worker holds this many samples in memory
            for each file that it reads, and reads at most this many samples again when it resumes. 1 keeps the order
            of samples within files.
        seed: seed of the shuffling and of the randomness in `read` and `collate_fn`.
        drop_last: leave out the last batch of an epoch if it has fewer than `batch_size` samples.
        open_files: number of files that all ranks together read at the same time.
        num_replicas: number of ranks that divide the batches. None stands for the world size.
        rank: index of this rank among the `num_replicas` ranks. None stands for the rank in the world.

    Raises:
        SessionMisuse: an argument is out of range, or the numbers of files and lengths differ.
    """

    def __init__(
        self,
        files: Sequence[object],
        read: Callable[..., Iterable[object]],
        lengths: Sequence[int],
        *,
        batch_size: int,
        collate_fn: Callable[[list[object]], object] = default_collate,
        shuffle: bool = False,
        block_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        open_files: int = 48,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.files, self.read, self.lengths = list(files), read, [int(length) for length in lengths]
        self.collate_fn = collate_fn
        world_rank, world_size = place_in_world()
        replicas = world_size if num_replicas is None else num_replicas
        self.rank = world_rank if rank is None else rank
        if len(self.files) != len(self.lengths) or min(self.lengths, default=0) < 0:
            raise SessionMisuse(
                f"ShardedFiles got {len(self.files)} files and {len(self.lengths)} lengths. Pass the number of samples "
                "of each file, 0 or more"
            )
        if not 0 <= self.rank < replicas or min(batch_size, block_size, open_files) < 1:
            raise SessionMisuse(
                f"ShardedFiles got rank {self.rank} of {replicas}, batch_size {batch_size}, block_size {block_size}, "
                f"open_files {open_files}. Ranks count from 0, and the other values from 1"
            )
        self.order = FileOrder(
            files=_digest(self.files, self.lengths),
            samples=sum(self.lengths),
            lanes=max(1, min(open_files, sum(length > 0 for length in self.lengths))),
            batch=batch_size,
            shuffle=shuffle,
            block=block_size,
            seed=seed,
            drop_last=drop_last,
            replicas=replicas,
        )
        # Use shared memory, from which persistent workers read the epoch and the number of its first batch.
        self._begin = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int, begin: int = 0) -> None:
        """Make the next `iter` start an epoch. The session calls this.

        Args:
            epoch: index of the epoch, from 0. The order of the samples differs between epochs if `shuffle` is set.
            begin: number of the first batch that any rank receives.
        """
        self._begin.copy_(torch.tensor([epoch, begin]))

    def __len__(self) -> int:
        """Return the number of batches of this rank in one epoch."""
        return len(self.order.numbers(self.rank, 0))

    def __iter__(self) -> Iterator[object]:
        epoch, begin = (int(value) for value in self._begin)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _EpochReader(self, epoch)
        return map(reader.batch, self.order.numbers(self.rank, begin)[worker::workers])


def _digest(files: Sequence[object], lengths: Sequence[int]) -> str:
    names = (PurePath(str(file)).name for file in files)
    lines = (f"{name} {length}" for name, length in zip(names, lengths, strict=True))
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


@dataclass(slots=True)
class _OpenFile:
    file: int
    samples: Iterator[object]
    read_count: int = 0


class _EpochReader:
    """Reads batches of one epoch by their numbers, and opens each file once if they ascend within a lane."""

    def __init__(self, files: ShardedFiles, epoch: int) -> None:
        self._files = files
        self._order = files.order
        self._epoch = epoch
        self._sequence = FileSequence(files.order, files.lengths, epoch)
        self._generators = rng.find_generators([files.read, files.collate_fn])
        self._open: dict[int, _OpenFile] = {}
        self._blocks: dict[int, tuple[int, list[object]]] = {}
        """The block's index, and its samples in the order in which they are yielded, by lane."""

    def batch(self, number: int) -> object:
        """Read a batch. Raises SessionMisuse if a file does not have its given number of samples."""
        lane, places = self._order.lane(number), self._order.places(number)
        with rng.kept(self._generators):
            samples = [self._sample(lane, place) for place in places]
            self._seed("batch", number)
            return self._files.collate_fn(samples)

    def _sample(self, lane: int, place: int) -> object:
        index, within = divmod(place, self._order.block)
        if lane not in self._blocks or self._blocks[lane][0] != index:
            self._blocks.pop(lane, None)  # Free the previous block of samples before reading the next one.
            begin = self._order.lane_begin(lane)
            samples = [self._read(lane, begin + each) for each in self._order.block_range(lane, index)]
            permutation = self._order.permutation(self._epoch, lane, index)
            self._blocks[lane] = index, [samples[each] for each in permutation]
        return self._blocks[lane][1][within]

    def _read(self, lane: int, number: int) -> object:
        file, in_file = self._sequence.find(number)
        opened = self._open.get(lane)
        if opened is None or opened.file != file or opened.read_count > in_file:
            self._seed("open", file)
            opened = self._open[lane] = _OpenFile(file, iter(self._files.read(self._files.files[file])))
        while opened.read_count < in_file:
            self._next(opened)
        sample = self._next(opened)
        length = self._files.lengths[file]
        if opened.read_count == length:
            del self._open[lane]
            if next(opened.samples, END) is not END:
                raise self._wrong_length(file, f"more than {length}")
        return sample

    def _next(self, opened: _OpenFile) -> object:
        # Seed before skipped samples too, because `read` may draw a number for one sample and use it for a later
        # sample.
        self._seed("sample", opened.file, opened.read_count)
        sample = next(opened.samples, END)
        if sample is END:
            raise self._wrong_length(opened.file, f"only {opened.read_count}")
        opened.read_count += 1
        return sample

    def _seed(self, *parts: int | str) -> None:
        rng.seed_on_host(derive(self._order.seed, self._epoch, *parts), self._generators)

    def _wrong_length(self, file: int, found: str) -> SessionMisuse:
        return SessionMisuse(
            f"ShardedFiles: {self._files.files[file]} has {found} samples, but its length is given as "
            f"{self._files.lengths[file]}. Pass the number of samples that read() returns"
        )


class FilesLoader:
    """Resumes a DataLoader over `ShardedFiles`, by the number of the next batch. Raises CannotResume if the DataLoader
    combines the dataset's batches into larger batches, or reorders them.
    """

    def __init__(self, name: str, loader: DataLoader[object]) -> None:
        if loader.batch_size is not None:
            raise CannotResume(
                name, "ShardedFiles makes the batches. Use DataLoader(files, batch_size=None), without a batch size"
            )
        if not loader.in_order:
            raise CannotResume(name, "in_order=False: the order of batches depends on time. Use in_order=True")
        self._name = name
        self._loader = loader
        self._files = cast(ShardedFiles, loader.dataset)
        self.order: Order = self._files.order
        self.generators = rng.find_generators([loader.generator])
        self._begin = 0
        """First batch of the epoch in this launch; above 0 if the number of ranks changed during the epoch."""
        self._skip_count = 0
        self._is_open = False
        self._has_begun = False
        readers = self.order.replicas * max(1, loader.num_workers)
        if self.order.lanes % readers:
            logger.info(
                "%s: %d open files for %d workers of all ranks: several workers read the same files. A multiple of %d "
                "as open_files avoids this",
                name,
                self.order.lanes,
                readers,
                readers,
            )

    def begin(self, epoch: int) -> Iterator[object]:
        self._files.set_epoch(epoch, self._begin + self._skip_count * self.order.replicas)
        # `iter` draws a base seed when it starts workers. An uninterrupted run starts no workers at this point if it is
        # inside an epoch, or if its workers persist. In these cases, restore the generators' states from before `iter`.
        has_drawn = self._is_open or (not self._has_begun and epoch > 0 and self._loader.persistent_workers)
        self._skip_count, self._is_open, self._has_begun = 0, True, True
        with rng.kept(self.generators) if has_drawn else nullcontext():
            return iter(self._loader)

    def end(self) -> None:
        self._begin, self._skip_count, self._is_open = 0, 0, False

    def state_dict(self) -> dict[str, Tree]:
        return {
            "begin": self._begin,
            "is_open": self._is_open,
            "order": self.order.tree(),
            "present": rng.generator_states(self.generators),
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        if differences := self.order.differences(cast("dict[str, Tree]", state["order"])):
            raise CannotResume(
                self._name, f"{differences}, so the samples have another order. Use the earlier files and options"
            )
        self._begin, self._skip_count = cast(int, state["begin"]), consumed_count
        self._is_open = cast(bool, state["is_open"])
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))
