"""A saved step loads into every other kind of training and number of ranks: all logical tensors keep their digests."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoints import open_checkpoint
from everstep.protocol.rank_messages import FetchShard
from tests.integration.training.conftest import Scenarios
from tests.integration.training.fake_agent import FakeAgent
from tests.unit.everstep.checkpoints.stored import store_payloads
from tests.warm_parent import Launch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@dataclass
class Saved:
    """Saved shards, by kind of training and number of ranks. All tests share them, and each is made only once."""

    scenarios: Scenarios
    folder: Path
    _made: dict[str, Path] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def of(self, world: int, **options: Any) -> Path:
        name = json.dumps([world, options], sort_keys=True)
        if name not in self._made:
            folder = self._folder()
            self._launch("save", world, folder, options).results()
            self._made[name] = folder
        return self._made[name]

    def load(self, saved: Path, world: int, **options: Any) -> tuple[Path, list[dict[str, Any]]]:
        folder = self._folder()
        return folder, self._launch("load", world, folder, options, str(saved)).results()

    def _folder(self) -> Path:
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        return folder

    def _launch(self, function: str, world: int, folder: Path, *arguments: Any) -> Launch:
        call = f"tests.integration.training.relayout_scripts:{function}"
        return self.scenarios.parent.fork(
            call, str(folder), *arguments, world=world, directory=folder, environment={}, result="result-{rank}.json"
        )


@pytest.fixture(scope="module")
def saved(scenarios: Scenarios, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(scenarios, tmp_path_factory.mktemp("relayout"))


def digests(folder: Path) -> dict[str, str]:
    """Return dtype, shape and digest of each logical tensor whose parts the ranks of a folder have saved."""
    payloads = [
        ((folder / f"payload-{rank}").read_bytes(), json.loads((folder / f"index-{rank}").read_text())[0])
        for rank in range(len(list(folder.glob("payload-*"))))
    ]
    bucket = folder / "bucket"
    manifest = bucket / "manifest"
    if not manifest.exists():
        bucket.mkdir()
        manifest.write_text(str(store_payloads(bucket, payloads)))
    with open_checkpoint(manifest.read_text()) as checkpoint:
        assert not checkpoint.incomplete
        return {
            name: f"{tensor.dtype}{list(tensor.shape)} {hashlib.sha256(checkpoint.read(tensor)).hexdigest()}"
            for name, tensor in checkpoint.tensors.items()
        }


@dataclass(frozen=True)
class Case:
    """One relayout: the kind of training and the number of ranks that save a step, and those that load it."""

    source: str
    before: int
    target: str
    after: int


def expect_equal_digests(saved: Saved, case: Case, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Load the source's state into the target, expect equal digests, and return each rank's result."""
    folder = saved.of(case.before, kind=case.source, **options)
    loaded, results = saved.load(folder, case.after, kind=case.target, **options)
    assert not [result["problem"] for result in results if "problem" in result]
    expected = digests(folder)
    assert any(name.startswith("optimizer/") for name in expected)
    assert digests(loaded) == expected
    for result in results:
        assert result["rates"] == pytest.approx([1e-2 * 0.98**4] * len(result["rates"])), "the scheduler has continued"
    return results


long = pytest.mark.long
PAIRS = [
    pytest.param("ddp", 4, "ddp", 3, {}, id="DDP 4 to 3"),
    pytest.param("ddp", 4, "zero3", 3, {}, id="DDP 4 to ZeRO-3 3", marks=long),
    pytest.param("ddp", 4, "mesh", 4, {}, id="DDP 4 to a mesh of 4"),
    pytest.param("fsdp", 4, "fsdp", 3, {}, id="FSDP2 4 to 3"),
    pytest.param("fsdp", 4, "fsdp", 6, {}, id="FSDP2 4 to 6"),
    pytest.param("fsdp", 2, "fsdp", 3, {"grows": True}, id="FSDP2 2 to 3 of an optimizer that has grown"),
    pytest.param("fsdp", 4, "zero1", 2, {}, id="FSDP2 4 to ZeRO-1 2", marks=long),
    pytest.param("mesh", 4, "fsdp", 3, {}, id="a mesh of 4 to FSDP2 3"),
    pytest.param("mesh", 4, "mesh", 2, {}, id="a mesh of 4 to 2", marks=long),
    pytest.param("zero3", 4, "zero3", 3, {}, id="ZeRO-3 4 to 3"),
    pytest.param("zero3", 4, "zero3", 6, {}, id="ZeRO-3 4 to 6"),
    pytest.param("zero3", 4, "fsdp", 4, {}, id="ZeRO-3 4 to FSDP2 4"),
    pytest.param("zero3", 4, "plain", 1, {}, id="ZeRO-3 4 to plain", marks=long),
    pytest.param("zero1", 2, "ddp", 1, {}, id="ZeRO-1 2 to DDP 1", marks=long),
    pytest.param("zero1", 2, "zero2", 3, {}, id="ZeRO-1 2 to ZeRO-2 3", marks=long),
    pytest.param("plain", 1, "zero2", 2, {}, id="plain to ZeRO-2 2"),
    pytest.param("zero2", 4, "zero3", 2, {"dtype": "bf16"}, id="ZeRO-2 4 to ZeRO-3 2 in bf16", marks=long),
    pytest.param("zero2", 4, "fsdp", 3, {"dtype": "bf16"}, id="ZeRO-2 4 to FSDP2 3 in bf16"),
    pytest.param("fsdp", 2, "ddp", 1, {"dtype": "bf16"}, id="FSDP2 2 to DDP 1 in bf16", marks=long),
    pytest.param("fsdp", 2, "ddp", 3, {"dtype": "pure_bf16"}, id="FSDP2 2 to DDP 3 with bf16 weights"),
    pytest.param("ddp", 2, "fsdp", 3, {"optimizer": "sgd"}, id="DDP 2 to FSDP2 3 with SGD", marks=long),
    pytest.param("fsdp", 3, "zero3", 2, {"optimizer": "sgd"}, id="FSDP2 3 to ZeRO-3 2 with SGD"),
    pytest.param("zero3", 2, "zero1", 3, {"optimizer": "adam"}, id="ZeRO-3 2 to ZeRO-1 3 with Adam", marks=long),
]


@pytest.mark.long(keep=4)
@pytest.mark.parametrize(("source", "before", "target", "after", "options"), PAIRS)
def test_every_logical_tensor_keeps_its_digest(
    saved: Saved, source: str, before: int, target: str, after: int, options: dict[str, Any]
) -> None:
    results = expect_equal_digests(saved, Case(source, before, target, after), options)
    needed = {("ddp", "ddp"): 1, ("ddp", "zero3"): 1, ("fsdp", "fsdp"): 3}.get((source, target), before)
    for result in results:
        # One more, to compare the copies of a rank that no rank needs.
        most = max(needed, -(-before // after))
        assert len(result["fetched"]) <= most, "no rank maps shards that it does not need"


KINDS = ("zero1", "fsdp", "mesh", "plain", "zero3", "ddp", "zero2")
SOURCE_RANKS = {"plain": 1, "ddp": 2, "fsdp": 3, "mesh": 4, "zero1": 2, "zero2": 3, "zero3": 4}
TARGET_RANKS = {"plain": 1, "ddp": 3, "fsdp": 2, "mesh": 4, "zero1": 3, "zero2": 2, "zero3": 3}
DTYPES, OPTIMIZERS = ("fp32", "bf16"), ("adamw", "sgd")
SAMPLE = {1: ("fp32", "sgd"), 2: ("bf16", "adamw")}
"""Dtype and optimizer of the cases that `make test` runs.

The key is the number of places by which the target follows the source in `KINDS`, whose end is followed by its start.
For each key, every kind is the source of one case and the target of another. The two entries together contain both
dtypes and both optimizers, so every kind occurs with each of them.
"""


def matrix() -> Iterator[tuple[Case, str, str, bool]]:
    """Yield each pair of kinds of training with each dtype and optimizer, and whether `make test` runs this case."""
    for place, source in enumerate(KINDS):
        for further in range(len(KINDS)):
            target = KINDS[(place + further) % len(KINDS)]
            after = 2 if source == target == "mesh" else TARGET_RANKS[target]
            for dtype in DTYPES:
                for optimizer in OPTIMIZERS:
                    case = Case(source, SOURCE_RANKS[source], target, after)
                    yield case, dtype, optimizer, SAMPLE.get(further) == (dtype, optimizer)


@pytest.mark.long(keep=4)
@pytest.mark.parametrize(
    ("case", "dtype", "optimizer"),
    [
        pytest.param(
            case,
            dtype,
            optimizer,
            id=f"{case.source} to {case.target}, {dtype}, {optimizer}",
            marks=() if is_run else long,
        )
        for case, dtype, optimizer, is_run in matrix()
    ],
)
def test_each_kind_loads_into_each_kind_in_each_dtype_and_with_each_optimizer(
    saved: Saved, case: Case, dtype: str, optimizer: str
) -> None:
    expect_equal_digests(saved, case, {"dtype": dtype, "optimizer": optimizer})


def test_make_test_has_each_kind_as_source_and_as_target_in_each_dtype_and_with_each_optimizer() -> None:
    run = [(case, dtype, optimizer) for case, dtype, optimizer, is_run in matrix() if is_run]
    for ends in ([case.source for case, *_ in run], [case.target for case, *_ in run]):
        for number, values in ((1, DTYPES), (2, OPTIMIZERS)):
            found = {(kind, each[number]) for kind, each in zip(ends, run, strict=True)}
            assert found == set(itertools.product(KINDS, values))


def launch(
    scenarios: Scenarios,
    directory: Path,
    world: int,
    until: int,
    agent: FakeAgent | None = None,
    function: str = "train",
    **options: Any,
) -> Launch:
    folder = directory / f"launch-{len(list(directory.glob('launch-*')))}"
    folder.mkdir()
    environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20", **(agent.environment if agent else {})}
    return scenarios.parent.fork(
        f"tests.integration.training.relayout_scripts:{function}",
        str(folder),
        options or {"kind": "fsdp"},
        until,
        world=world,
        directory=folder,
        environment=environment,
        result="result-{rank}.json",
    )


def samples_of(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the samples of every step, interleaved over the ranks.

    Of the batches that the ranks read at the same time, the first sample of every rank comes first, then the second one
    of every rank.
    """
    found: dict[int, list[int]] = {}
    for step in results[0]["steps"]:
        for batches in zip(*(result["steps"][step] for result in results), strict=True):
            found.setdefault(int(step), []).extend(sample for dealt in zip(*batches, strict=True) for sample in dealt)
    return found


def interrupted(
    scenarios: Scenarios, directory: Path, world: int, generation: int, first: int, **options: Any
) -> FakeAgent:
    """Train until a step is committed, then kill every rank. Return the agent."""
    with FakeAgent(directory, world, generation, first=first, **options) as agent:
        ranks = launch(scenarios, directory, world, 1_000_000, agent)
        try:
            assert agent.reached.wait(60), f"{agent.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            ranks.wait()
    return agent


def earlier(agent: FakeAgent, world: int) -> dict[str, Any]:
    slots = {rank: agent.sealed[rank, agent.committed] for rank in range(world)}
    return {"base_step": agent.committed, "earlier": slots}


def test_a_job_shrinks_and_grows_with_the_same_samples_in_every_step(scenarios: Scenarios, tmp_path: Path) -> None:
    four = interrupted(scenarios, tmp_path, 4, 1, first=3)
    three = interrupted(scenarios, tmp_path, 3, 2, first=four.committed + 2, **earlier(four, 4))
    until = three.committed + 3
    with FakeAgent(tmp_path, 4, 3, commit_target=0, **earlier(three, 3)) as agent:
        grown = launch(scenarios, tmp_path, 4, until, agent).results()
        fetched = {message.owner_rank for _, message in agent.of_kind(FetchShard)}  # type: ignore[attr-defined]
    assert fetched == {0, 1, 2}
    with FakeAgent(tmp_path, 3, 4, commit_target=0, **earlier(four, 4)) as agent:
        shrunk = launch(scenarios, tmp_path, 3, until, agent).results()
    undisturbed = samples_of(launch(scenarios, tmp_path, 4, until).results())
    for results, begun in ((grown, three.committed), (shrunk, four.committed)):
        assert [result["begun"] for result in results] == [begun] * len(results)
        assert samples_of(results) == {step: undisturbed[step] for step in range(begun + 1, until + 1)}


def trained(agent: FakeAgent, scenarios: Scenarios, directory: Path, world: int, **options: Any) -> FakeAgent:
    """Train with the Trainer until a step is committed, then kill every rank. Return the agent."""
    with agent:
        ranks = launch(scenarios, directory, world, 1_000, agent, "train_with_trainer", **options)
        try:
            assert agent.reached.wait(60), f"{agent.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            ranks.wait()
    return agent


def sets_of(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the sorted samples that all ranks use in each step."""
    found: dict[int, list[int]] = {}
    for result in results:
        for step, batches in result["steps"].items():
            found.setdefault(int(step), []).extend(sample for batch in batches for sample in batch)
    return {step: sorted(samples) for step, samples in found.items()}


def test_a_trainer_continues_on_fewer_and_on_more_ranks_with_the_same_samples_in_every_step(
    scenarios: Scenarios, tmp_path: Path
) -> None:
    one, options = "train_with_trainer", {"samples": 72}
    two = trained(FakeAgent(tmp_path, 2, 1, first=4), scenarios, tmp_path, 2, **options)
    three = FakeAgent(tmp_path, 3, 2, first=two.committed + 2, **earlier(two, 2))
    three = trained(three, scenarios, tmp_path, 3, **options)
    until = three.committed + 8
    with FakeAgent(tmp_path, 1, 3, commit_target=0, **earlier(three, 3)) as agent:
        results = launch(scenarios, tmp_path, 1, until, agent, one, **options).results()
    undisturbed = sets_of(launch(scenarios, tmp_path, 2, until, None, one, **options).results())
    assert results[0]["begun"] == three.committed
    found = sets_of(results)
    assert list(found) == list(range(three.committed + 1, until + 1))
    assert found == {step: undisturbed[step] for step in found}
    epoch = [sample for step in range(until - until % 3 - 2, until - until % 3 + 1) for sample in undisturbed[step]]
    assert sorted(epoch) == list(range(72)), "three steps make an epoch"


def test_a_trainer_that_does_not_keep_its_global_batch_is_refused(scenarios: Scenarios, tmp_path: Path) -> None:
    two = trained(FakeAgent(tmp_path, 2, 1, first=3), scenarios, tmp_path, 2, samples=48)
    with FakeAgent(tmp_path, 1, 2, commit_target=0, **earlier(two, 2)) as agent:
        ranks = launch(scenarios, tmp_path, 1, 100, agent, "train_with_trainer", samples=48, accumulate=3)
        assert ranks.wait() == [1]
        assert "an epoch had 2 optimizer steps and now has 4" in ranks.log(0)


def test_a_request_that_a_lost_connection_swallowed_is_repeated(scenarios: Scenarios, tmp_path: Path) -> None:
    agent = interrupted(scenarios, tmp_path, 2, 1, first=3)
    cut: list[int] = []

    def cut_once(other: FakeAgent, rank: int, message: object) -> None:
        if isinstance(message, FetchShard) and not cut:
            cut.append(rank)
            connection = other.lines[rank].connection
            assert connection is not None
            connection.shutdown(socket.SHUT_RDWR)

    with FakeAgent(tmp_path, 1, 2, commit_target=0, on_message=cut_once, **earlier(agent, 2)) as second:
        (result,) = launch(scenarios, tmp_path, 1, agent.committed + 1, second).results()
        requests = [message.owner_rank for _, message in second.of_kind(FetchShard)]  # type: ignore[attr-defined]
    assert result["begun"] == agent.committed
    assert requests == [0, 0, 1]


def test_a_shard_that_the_agent_cannot_load_stops_all_ranks(scenarios: Scenarios, tmp_path: Path) -> None:
    agent = interrupted(scenarios, tmp_path, 3, 1, first=3)
    options = earlier(agent, 3)
    del options["earlier"][1]
    with FakeAgent(tmp_path, 2, 2, **options) as second:
        ranks = launch(scenarios, tmp_path, 2, agent.committed + 1, second)
        assert ranks.wait(until_one_fails=False) == [1, 1]
        assert "the agent cannot load the shard of earlier rank 1: its node is lost" in ranks.log(1), ranks.logs()
        second.wait_for(lambda: len(second.faults()) == 2)
