"""Tests streaming datasets of Hugging Face `datasets`. Every dataset resumes exactly.

Some datasets resume from their own state. For the others, a resumed run replays the batches up to its position.
"""

from __future__ import annotations

import importlib.metadata
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from datasets import (
    Dataset,
    IterableDataset,
    concatenate_datasets,
    interleave_datasets,
)
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.training.data import DataStream, ShuffledBlocks
from everstep.training.errors import CannotResume, UnsupportedVersion
from tests.unit.training.data.runs import Run, check, check_each_step


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(4):
            yield {"value": 10 * shard + number, "noise": random.random()}


def generated(shards: int = 3) -> Any:
    return IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(shards))})


def table(count: int = 12) -> Any:
    return Dataset.from_dict({"value": list(range(count))}).to_iterable_dataset(num_shards=3)


def untyped(count: int = 12) -> Any:
    """Return a dataset like that of text files, whose columns have no declared types."""
    return IterableDataset(table(count)._ex_iterable)


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"value": row["value"], "noise": random.random()}


def noisy_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"value": batch["value"], "noise": [random.random() for _ in batch["value"]]}


EXACT: dict[str, Callable[[], Any]] = {
    "table": table,
    "torch format": lambda: table().with_format("torch"),
    "mapped": lambda: untyped().map(noisy),
    "filtered": lambda: untyped().filter(lambda row: row["value"] % 3 > 0),
    "filtered by noise": lambda: untyped(24).filter(lambda _: random.random() > 0.3).map(noisy),
    "taken and skipped": lambda: table().skip(2).take(7),
    "taken and skipped, mapped": lambda: untyped().map(noisy).skip(2).take(7),
    "repeated": lambda: table(4).repeat(2),
    "columns": lambda: table().select_columns(["value"]),
    "columns of a map": lambda: untyped().map(noisy).select_columns(["noise"]),
    "of one node": lambda: split_dataset_by_node(table(), rank=1, world_size=3),
    "of one node, by rows": lambda: split_dataset_by_node(table(), rank=1, world_size=2),
}
REPLAYED: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (lambda: untyped().shuffle(seed=3, buffer_size=5), "a shuffle buffer"),
    "shuffled generator": (lambda: generated().shuffle(seed=3, buffer_size=5), "a shuffle buffer"),
    "shuffled inside": (lambda: untyped().shuffle(seed=3, buffer_size=4).map(noisy), "a shuffle buffer"),
    "mapped in batches": (lambda: untyped().map(noisy_batch, batched=True, batch_size=3), "a batched map"),
    "mapped table": (lambda: table().map(noisy), "a map or filter over tables"),
    "generated": (generated, "a Python generator"),
    "concatenated": (
        lambda: concatenate_datasets([untyped().map(noisy), untyped(5).map(noisy)]),
        "several datasets in one",
    ),
    "interleaved": (lambda: interleave_datasets([untyped().map(noisy), untyped(5)]), "several datasets in one"),
    "interleaved at random": (
        lambda: interleave_datasets([untyped().map(noisy), table(5)], probabilities=[0.4, 0.6], seed=3),
        "several datasets in one",
    ),
}


def loader(dataset: Any, workers: int = 0, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=list)


@pytest.mark.parametrize("name", EXACT)
def test_the_state_of_a_dataset_continues_exactly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    batches = check(lambda: loader(EXACT[name]()), range(14), behind=7)
    assert len(batches) == 20
    assert "replays" not in caplog.text


@pytest.mark.parametrize("name", EXACT)
def test_a_run_that_is_killed_after_every_step_reads_the_same(name: str) -> None:
    check_each_step(lambda: loader(EXACT[name](), batch_size=3), 9)


@pytest.mark.parametrize("name", REPLAYED)
def test_other_datasets_are_replayed_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = REPLAYED[name]
    with caplog.at_level(logging.WARNING):
        check(lambda: loader(make()), range(14), behind=7)
    assert f"has {reason}" in caplog.text
    assert "ShuffledBlocks or ShardedFiles" in caplog.text


@pytest.mark.integration
@pytest.mark.parametrize("name", ["table", "mapped", "of one node"])
def test_workers_continue_exactly(name: str) -> None:
    check(lambda: loader(EXACT[name](), workers=2), [1, 2, 5, 6, 8])


@pytest.mark.integration
def test_workers_replay_a_shuffle_buffer() -> None:
    check(lambda: loader(REPLAYED["shuffled"][0](), workers=2), [1, 5, 8])


@pytest.mark.parametrize("name", ["table", "mapped"])
def test_shuffled_blocks_replace_a_shuffle_buffer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check(lambda: loader(ShuffledBlocks(EXACT[name](), 5)), range(14), behind=7)
    check_each_step(lambda: loader(ShuffledBlocks(EXACT[name](), 5)), 14)
    assert "replays" not in caplog.text


def test_a_buffer_inside_of_shuffled_blocks_is_found(caplog: pytest.LogCaptureFixture) -> None:
    check(lambda: loader(ShuffledBlocks(REPLAYED["shuffled"][0](), 3)), range(8))
    assert "has a shuffle buffer" in caplog.text


@pytest.mark.parametrize("name", ["table", "mapped", "filtered by noise"])
def test_a_dataset_without_a_loader_is_resumed(name: str) -> None:
    check(EXACT[name], range(0, 26, 3))


def test_a_shuffled_dataset_without_a_loader_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    check(REPLAYED["shuffled"][0], range(0, 26, 3))
    assert "has a shuffle buffer" in caplog.text


def test_epochs_have_other_orders() -> None:
    stream = DataStream("data", loader(REPLAYED["shuffled"][0]()), 1)
    epochs = [[[row["value"] for row in batch] for batch in stream] for _ in range(2)]  # type: ignore[attr-defined]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: generated().shuffle(buffer_size=5),
        lambda: generated().shuffle(buffer_size=5).map(noisy),
        lambda: interleave_datasets([generated(), generated()], probabilities=[0.5, 0.5]),
    ],
)
def test_shuffling_without_a_seed_is_refused_after_a_restart(make: Callable[[], Any]) -> None:
    run = Run(loader(make()))
    run.steps(2)
    with pytest.raises(CannotResume, match=r"data: .* Pass a seed"):
        Run(loader(make())).load(run.save())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("package", "installed"), [("datasets", "5.0.0"), ("torchdata", "0.12.0")])
def test_an_untested_version_of_a_library_is_refused(
    package: str, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = table() if package == "datasets" else range(3)
    kind = DataLoader if package == "datasets" else StatefulDataLoader
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed if name == package else real(name))
    with pytest.raises(UnsupportedVersion, match=rf"{package} {installed} is installed"):
        DataStream("data", kind(data), seed=1)
