"""Frameworks resume bit for bit, with every pair of parallelism, precision, accumulation, evaluation and fault.

`make test` runs a few combinations, `make test-rest` all others.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.faults import FAULTS, UNTIL, Training, check_equal
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WORLD = 2
STRATEGIES = {"ddp": "MULTI_CPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}
"""accelerate's name of the strategy that a run must use, by kind of parallelism."""
OF_LIGHTNING = {"ddp": "DDPStrategy", "fsdp": "ModelParallelStrategy", "zero": "CpuDeepSpeedStrategy"}
"""Class of the strategy that Lightning must use, by kind of parallelism."""
OF_TORCHTITAN: dict[str, dict[str, int]] = {"fsdp": {}, "tensor": {"tensor_parallel_degree": 2}}
"""torchtitan's options for each kind of parallelism. Without options, torchtitan divides parameters among all ranks."""
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}

UNTIL_OF_LIGHTNING = 10
"""Number of steps of a run with Lightning, as Lightning counts them.

With DeepSpeed and four batches per step, Lightning counts two steps in each epoch of 11 batches, and no step for the
last three batches. DeepSpeed's engine ends a step after every fourth batch, across epochs. Lightning's step 10 ends
with batch 52, which ends a step of the engine. Step 12 would end with batch 63, in the middle of a step of the engine.
"""

Undisturbed = Callable[[str, dict[str, Any], int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def undisturbed(warm_parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that runs a script without fault. Runs with equal options are run once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(script: str, options: dict[str, Any], until: int) -> list[dict[str, Any]]:
        key = json.dumps([script, options, until])
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            known[key] = Training(warm_parent, directory, script, WORLD, options, until=until).undisturbed()
        return known[key]

    return run


def zero(accumulate: int, is_bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration of ZeRO-3."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations that contain every pair of values of two options.

    Args:
        choices: the values of each option.
    """
    options = itertools.combinations(range(len(choices)), 2)
    left = {((i, a), (j, b)) for i, j in options for a in choices[i] for b in choices[j]}

    def added(row: tuple[Any, ...]) -> set[Any]:
        return left & set(itertools.combinations(enumerate(row), 2))

    rows = []
    while left:
        rows.append(max(itertools.product(*choices), key=lambda row: len(added(row))))
        left -= added(rows[-1])
    return rows


def combinations(test: Callable[..., None], kinds: Sequence[str] = tuple(STRATEGIES)) -> Callable[..., None]:
    """Run a test with every pair of options, kinds of parallelism and faults. `make test` runs two combinations."""
    names = {False: "fp32", True: "bf16"}, {1: "batch", 4: "batches"}, {False: "no_evaluation", True: "evaluation"}
    rows = [
        pytest.param(
            *row, id="-".join((row[0], *(of[value] for of, value in zip(names, row[1:4], strict=True)), row[4]))
        )
        for row in pairwise(kinds, *map(tuple, names), FAULTS)
    ]
    test = pytest.mark.parametrize(("kind", "is_bf16", "accumulate", "evaluates", "fault"), rows)(test)
    return pytest.mark.long(keep=2)(test)


@combinations
def test_a_trainer_of_transformers(
    warm_parent: WarmParent,
    tmp_path: Path,
    undisturbed: Undisturbed,
    kind: str,
    is_bf16: bool,
    accumulate: int,
    evaluates: bool,
    fault: str,
) -> None:
    arguments = {"ddp": {}, "fsdp": FSDP, "zero": {"deepspeed": zero(accumulate, is_bf16)}}[kind]
    options = {"arguments": arguments, "bf16": is_bf16, "accumulate": accumulate, "evaluates": evaluates}
    check(warm_parent, tmp_path, undisturbed, "trainer_scripts", options, fault, STRATEGIES[kind])


@combinations
def test_a_script_with_accelerate(
    warm_parent: WarmParent,
    tmp_path: Path,
    undisturbed: Undisturbed,
    kind: str,
    is_bf16: bool,
    accumulate: int,
    evaluates: bool,
    fault: str,
) -> None:
    options = {"kind": kind, "bf16": is_bf16, "accumulate": accumulate, "evaluates": evaluates}
    check(warm_parent, tmp_path, undisturbed, "accelerate_scripts", options, fault, STRATEGIES[kind])


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("DEEPSPEED", {"kind": "zero", "stage": 1}, id="zero1"),
        pytest.param("DEEPSPEED", {"kind": "zero", "stage": 2}, id="zero2"),
        pytest.param("DEEPSPEED", {"kind": "zero", "zero": OFFLOAD}, id="zero3_offload"),
        pytest.param("MULTI_CPU", {"kind": "ddp", "fp16": True}, id="fp16"),
    ],
)
def test_other_options_of_accelerate(
    warm_parent: WarmParent,
    tmp_path: Path,
    undisturbed: Undisturbed,
    strategy: str,
    options: dict[str, Any],
    fault: str,
) -> None:
    check(warm_parent, tmp_path, undisturbed, "accelerate_scripts", options, fault, strategy)


@combinations
def test_a_trainer_of_lightning(
    warm_parent: WarmParent,
    tmp_path: Path,
    undisturbed: Undisturbed,
    kind: str,
    is_bf16: bool,
    accumulate: int,
    evaluates: bool,
    fault: str,
) -> None:
    precision = "bf16-mixed" if is_bf16 else "32-true"
    options = {"kind": kind, "stage": 3, "precision": precision, "accumulate": accumulate, "validates": evaluates}
    check(
        warm_parent, tmp_path, undisturbed, "lightning_scripts", options, fault, OF_LIGHTNING[kind], UNTIL_OF_LIGHTNING
    )


@pytest.mark.long
@functools.partial(combinations, kinds=tuple(OF_TORCHTITAN))
def test_a_trainer_of_torchtitan(
    warm_parent: WarmParent,
    tmp_path: Path,
    undisturbed: Undisturbed,
    kind: str,
    is_bf16: bool,
    accumulate: int,
    evaluates: bool,
    fault: str,
) -> None:
    ranks = WORLD if kind == "fsdp" else 1
    options = {
        "parallelism": OF_TORCHTITAN[kind],
        "dtype": "bfloat16" if is_bf16 else "float32",
        "global_batch": 2 * ranks * accumulate,
        "validates": evaluates,
    }
    check(warm_parent, tmp_path, undisturbed, "torchtitan_scripts", options, fault, None)


def check(
    parent: WarmParent,
    directory: Path,
    undisturbed: Undisturbed,
    script: str,
    options: dict[str, Any],
    fault: str,
    strategy: str | None,
    until: int = UNTIL,
) -> None:
    found = Training(parent, directory, script, WORLD, options, until=until).resumed(fault)
    check_equal(found, undisturbed(script, options, until))
    assert {each.get("strategy") for each in found} == {strategy}
