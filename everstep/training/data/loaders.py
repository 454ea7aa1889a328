"""Chooses the wrapper (`Resumable`, also called source) that resumes a registered loader."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import cast

from torch.utils.data import DataLoader, IterableDataset

from everstep.training.adapters.base import qualified_name
from everstep.training.data import hugging_face
from everstep.training.data.files import FilesLoader, ShardedFiles
from everstep.training.data.iterables import OwnState, Replayed
from everstep.training.data.map_loaders import MapLoader, nested_samplers
from everstep.training.data.protocols import Resumable, Stateful, check_signatures, find_stateful, has_state
from everstep.training.data.stateful_datasets import StatefulDatasetLoader
from everstep.training.errors import CannotResume
from everstep.training.versions import check_version

logger = logging.getLogger("everstep.training")


def find_source(name: str, loader: Iterable[object], seed: int, *, is_traced: bool) -> Resumable:
    """Return the source of a loader, which yields its batches, at the beginning of the first epoch. `seed` is for the
    workers of loaders without a generator. Raises CannotResume if the loader cannot be resumed, and UnsupportedVersion
    if Everstep is not tested with the installed torchdata or `datasets`.
    """
    loader = _unwrap(loader)
    if any(qualified_name(kind) == _STATEFUL_LOADER for kind in type(loader).__mro__):
        check_version("torchdata")
    if isinstance(loader, Iterator) and not isinstance(loader, Stateful):
        raise CannotResume(
            name,
            f"{qualified_name(type(loader))} can be walked once only; give the loader or a list, not an iterator of it",
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise CannotResume(name, f"{qualified_name(type(loader))} cannot be iterated")
    if isinstance(loader, ShardedFiles):
        return FilesLoader(name, DataLoader(loader, batch_size=None))
    if _is_torch_loader(loader):
        return _torch_source(name, cast("DataLoader[object]", loader), seed, is_traced=is_traced)
    part = hugging_face.inexact_part(loader)
    if isinstance(loader, Stateful) and part is None:
        check_signatures(name, loader)
        return OwnState(loader)
    return _replayed(name, loader, part)


def _torch_source(name: str, loader: DataLoader[object], seed: int, *, is_traced: bool) -> Resumable:
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return _map_source(name, loader, seed, is_traced=is_traced)
    _check_collate(name, loader)
    if isinstance(dataset, ShardedFiles):
        return FilesLoader(name, loader)
    part = hugging_face.inexact_part(dataset)
    if isinstance(dataset, Stateful) and part is None:
        _check_workers(name, loader)
        check_signatures(name, dataset)
        return StatefulDatasetLoader(name, loader)
    return _replayed(name, loader, part)


def _map_source(name: str, loader: DataLoader[object], seed: int, *, is_traced: bool) -> Resumable:
    samplers = [each for each in nested_samplers(loader) if has_state(each) and not _is_of_torchdata(each)]
    if samplers:
        raise CannotResume(
            name,
            f"its sampler {qualified_name(type(samplers[0]))} has a state, which no snapshot contains. Everstep "
            "restores the position itself: compute the order in set_epoch(epoch), and remove the sampler's state_dict",
        )
    held = find_stateful([loader.dataset, loader.collate_fn])
    if isinstance(loader, Stateful) and [id(each) for each in held] == [id(loader.dataset)]:
        return OwnState(loader)  # The loader's state contains the states of its dataset, also in workers.
    if held and loader.num_workers:
        raise CannotResume(
            name,
            f"{qualified_name(type(held[0]))} has a state, and each worker changes a copy of its own. Use "
            "num_workers=0, or torchdata's StatefulDataLoader for the state of a dataset",
        )
    for each in (*nested_samplers(loader), loader.dataset, *held):
        check_signatures(name, each)
    return MapLoader(loader, seed, held, is_traced=is_traced)


def _is_of_torchdata(sampler: object) -> bool:
    """Return whether torchdata defines the sampler. Its state is its position, which `MapLoader` restores itself."""
    return type(sampler).__module__.startswith("torchdata.")


def _check_collate(name: str, loader: DataLoader[object]) -> None:
    if held := find_stateful([loader.collate_fn]):
        raise CannotResume(
            name,
            f"the collate function uses {qualified_name(type(held[0]))}, which has a state. The position of an "
            "IterableDataset does not contain it. Move the state into the dataset's state_dict",
        )


def _replayed(name: str, loader: Iterable[object], part: str | None) -> Replayed:
    _check_workers(name, loader)
    for each in (loader, getattr(loader, "dataset", None)):
        check_signatures(name, each)
    if not isinstance(loader, (list, tuple)):
        reason = "does not store its position" if part is None else f"has {part}"
        advice = "" if part is None else ". ShuffledBlocks or ShardedFiles resume without reading again"
        logger.warning(
            "%s (%s) %s: after a restart, the session replays the epoch up to this position%s",
            name,
            qualified_name(type(loader)),
            reason,
            advice,
        )
    return Replayed(name, loader)


def _check_workers(name: str, loader: object) -> None:
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers:
        raise CannotResume(
            name,
            "an IterableDataset with persistent_workers=True: its workers keep their random generators from epoch to "
            "epoch, and no snapshot contains them. Omit persistent_workers, or use ShardedFiles",
        )


def _unwrap(loader: Iterable[object]) -> Iterable[object]:
    if qualified_name(type(loader)) != "deepspeed.runtime.dataloader.DeepSpeedDataLoader":
        return loader
    if getattr(loader, "curriculum_learning_enabled", False):
        raise CannotResume(
            "data", "Everstep does not know whether DeepSpeed's curriculum learning resumes bit-identically"
        )
    # DeepSpeed creates its loader with this private method at each `iter`.
    create = getattr(loader, "_create_dataloader")  # noqa: B009
    create()
    return cast("Iterable[object]", getattr(loader, "dataloader"))  # noqa: B009


def _is_torch_loader(loader: object) -> bool:
    """Return whether the class is torch's or torchdata's. A subclass may read batches in a different way."""
    return isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or qualified_name(type(loader)) == _STATEFUL_LOADER
    )


_STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"
