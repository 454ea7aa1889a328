"""Lists options and classes of frameworks that the integrations refuse, and finds them in a source before its upload.

The integrations read the tables when training begins. `find` reads the source without running it, so it finds only what
the source names: its result is a warning, never a refusal. This module imports no framework.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple


class RefusedUse(NamedTuple):
    """The reason why a job cannot resume with an option or class, and what to do instead."""

    reason: str
    alternative: str


OPTIONS: Final[Mapping[str, RefusedUse]] = {
    "auto_find_batch_size": RefusedUse(
        "a restart of the loop with another batch size changes the steps",
        "Set per_device_train_batch_size to a size that fits.",
    ),
    "ignore_data_skip": RefusedUse(
        "a resumed run would repeat samples",
        "Remove the option: Everstep continues at the next sample without reading the earlier ones.",
    ),
    "enable_jit_checkpoint": RefusedUse(
        "its signal handler replaces the agreed stop of all ranks",
        "Remove the option: Everstep stores a checkpoint before an instance is reclaimed.",
    ),
    "dispatch_batches": RefusedUse(
        "rank 0 reads the batches of all ranks", "Set it to False: each rank then reads its own batches."
    ),
    "enable_cpu_offload": RefusedUse("no test resumes parameters in host memory", "Set it to False."),
    "max_time": RefusedUse("a resumed run would end at another step", "Set max_steps or max_epochs."),
    "reload_dataloaders_every_n_epochs": RefusedUse(
        "no snapshot contains the position in a loader that is created during training",
        "Change the data in a sampler or a dataset with set_epoch.",
    ),
}
"""Options that prevent an exact resume unless their value is false, by name."""
_GENERATING: Final = RefusedUse(
    "it trains several steps on samples that it has generated, and no snapshot contains them",
    "Use a trainer that reads its samples from a dataset, such as SFTTrainer or DPOTrainer.",
)
_SEARCHING: Final = "it trains before the training"
CLASSES: Final[Mapping[str, RefusedUse]] = {
    "GRPOTrainer": _GENERATING,
    "RLOOTrainer": _GENERATING,
    "BaseFinetuning": RefusedUse(
        "it adds parameters to the optimizer during training", "Freeze the parameters in the module."
    ),
    "BatchSizeFinder": RefusedUse(_SEARCHING, "Set the batch size that a separate run has found."),
    "LearningRateFinder": RefusedUse(_SEARCHING, "Set the learning rate that a separate run has found."),
    "ModelPruning": RefusedUse("it replaces parameters during training", "Prune the model before the training."),
    "OnExceptionCheckpoint": RefusedUse(
        "it makes fit() load its checkpoint, and Everstep names the step from which all ranks continue",
        "Remove the callback: Everstep keeps every step.",
    ),
    "StochasticWeightAveraging": RefusedUse("it replaces the schedule during training", "Use EMAWeightAveraging."),
    "FSDPStrategy": RefusedUse(
        "FSDP1 flattens parameters", "Use ModelParallelStrategy with fully_shard in configure_model."
    ),
    "FullyShardedDataParallel": RefusedUse(
        "FSDP1 flattens parameters", "Use torch.distributed.fsdp.fully_shard or DDP."
    ),
    "DataParallel": RefusedUse("one process trains on all GPUs", "Use DDP: Everstep starts one process per GPU."),
}
"""Classes whose objects prevent an exact resume, by name."""


class Found(NamedTuple):
    """An option or class that a source or a command line names."""

    place: str
    """`file:line`, or `arguments`."""
    name: str
    refusal: RefusedUse


def find(directory: Path, files: Iterable[str], arguments: Iterable[str] = ()) -> Iterator[Found]:
    """Yield refused options and classes that a source names, if a file of the source imports Everstep.

    Args:
        directory: the source, whose files `files` names.
        files: relative paths. Other files than readable Python are skipped.
        arguments: the script's command line: `--name`, `--name value` or `--name=value`.

    Yields:
        Each place once, in the order of the files.
    """
    trees = {path: tree for path in files if path.endswith(".py") and (tree := _parsed(directory / path)) is not None}
    if not any(_imports_everstep(tree) for tree in trees.values()):
        return
    for path, tree in trees.items():
        for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called in CLASSES:
                yield Found(f"{path}:{call.lineno}", called, CLASSES[called])
            for keyword in call.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg is not None and keyword.arg in OPTIONS and value:
                    yield Found(f"{path}:{keyword.value.lineno}", keyword.arg, OPTIONS[keyword.arg])
    for argument, following in pairwise([*arguments, ""]):
        name, is_joined, value = argument.removeprefix("--").replace("-", "_").partition("=")
        value = value if is_joined else "" if following.startswith("-") else following
        if argument.startswith("--") and name in OPTIONS and value.lower() not in ("false", "0", "no"):
            yield Found("arguments", name, OPTIONS[name])


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports_everstep(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Import) and any(each.name.split(".")[0] == "everstep" for each in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "everstep")
        for node in ast.walk(tree)
    )
