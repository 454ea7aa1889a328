"""Provides a training script's environment: rank, hyperparameters, input and output directories.

Invariant: without Everstep, every function still returns a useful value. The same script therefore runs alone, under
torchrun and under an agent.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from everstep.protocol.ids import Generation, JobName, Rank, RunId
from everstep.protocol.plan import channel_variable
from everstep.training.errors import SessionMisuse

FINAL_ROUND_SECONDS = 30.0
"""Default of the limit within which `close()` waits for the commit of the last step."""
UNCROWDED_CORES = 4
"""Cores per rank with which training shares no core: the rank, its copier, the agent's digests and its transfers."""
WELCOME_SECONDS = 30.0
"""Default limit within which `init` must reach its agent."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The rank's environment variables, parsed once."""

    rank: Rank
    world_size: int
    agent_socket: Path | None
    job: JobName
    run: RunId
    generation: Generation
    final_round_seconds: float
    welcome_seconds: float
    local_rank: int = 0
    ranks_per_node: int = 1
    cores: float = 1.0
    """Cores of this node, divided by its number of ranks."""
    is_elastic: bool = False
    """False if the agent is older than this field."""

    @property
    def is_crowded(self) -> bool:
        """True when copier, digests and transfers of a rank must share cores with training."""
        return self.cores < UNCROWDED_CORES

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Parse the rank's environment variables. If all are unset, the rank runs alone and without an agent."""
        socket_path = variables.get("EVERSTEP_AGENT_SOCKET")
        ranks_per_node = max(1, int(variables.get("LOCAL_WORLD_SIZE", "1")))
        return cls(
            rank=Rank(int(variables.get("RANK", "0"))),
            world_size=int(variables.get("WORLD_SIZE", "1")),
            agent_socket=Path(socket_path) if socket_path else None,
            job=JobName(variables.get("EVERSTEP_JOB_NAME", "")),
            run=RunId(variables.get("EVERSTEP_RUN_ID", "")),
            generation=Generation(int(variables.get("EVERSTEP_GENERATION", "0"))),
            final_round_seconds=float(variables.get("EVERSTEP_FINAL_ROUND_SECONDS", str(FINAL_ROUND_SECONDS))),
            welcome_seconds=float(variables.get("EVERSTEP_WELCOME_SECONDS", str(WELCOME_SECONDS))),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            ranks_per_node=ranks_per_node,
            cores=len(os.sched_getaffinity(0)) / ranks_per_node,
            is_elastic=variables.get("EVERSTEP_IS_ELASTIC") == "1",
        )


def accumulation(
    global_batch: int, micro_batch: int, *, replicas: int | None = None, variables: Mapping[str, str] = os.environ
) -> int:
    """Return the number of micro-batches per optimizer step that keeps the global batch size.

    The job then keeps its global batch size when it continues with a different number of ranks. Pass the result to
    `batches(accumulate=…)` or to DeepSpeed as `gradient_accumulation_steps`, and divide the loss by it. A script may
    call this before `init`.

    Args:
        global_batch: samples per optimizer step, over all ranks.
        micro_batch: samples per batch of one rank.
        replicas: number of ranks that divide the samples. None means all ranks (`WORLD_SIZE`).
        variables: environment variables; read for WORLD_SIZE.

    Returns:
        At least 1.

    Raises:
        SessionMisuse: this number of ranks cannot keep the global batch size.
    """
    count = int(variables.get("WORLD_SIZE", "1")) if replicas is None else replicas
    steps, rest = divmod(global_batch, count * micro_batch)
    if global_batch > 0 and steps and not rest:
        return steps
    each, rest = divmod(global_batch, count)
    if rest or each < 1:
        advice = f"{count} ranks cannot share {global_batch} samples; choose a multiple of every number of ranks"
    else:
        fitting = max(size for size in range(1, min(each, micro_batch) + 1) if each % size == 0)
        advice = f"a micro-batch of {fitting} fits {count} ranks"
    raise SessionMisuse(
        f"a global batch of {global_batch} samples is no multiple of {count} ranks with {micro_batch} samples each: "
        f"{advice}"
    )


def hyperparameters(
    *,
    variables: Mapping[str, str] = os.environ,
    arguments: Sequence[str] | None = None,
    **defaults: bool | int | float | str,
) -> SimpleNamespace:
    """Return the job's hyperparameters merged over the script's defaults.

    Each value has the type of its default. Under Everstep, the values come from EVERSTEP_HYPERPARAMETERS, otherwise
    from `--key value` or `--key=value` arguments. `-` and `_` are equal in keys. A warning names each hyperparameter of
    the job that has no default, and the most similar default. Other keys are ignored.

    Args:
        variables: environment variables; read for EVERSTEP_HYPERPARAMETERS.
        arguments: command line arguments. None means `sys.argv[1:]`.
        **defaults: for example `steps=200, learning_rate=3e-4`.

    Returns:
        A namespace with one attribute per default: `.steps`, `.learning_rate` …

    Raises:
        SessionMisuse: a value cannot be converted to the type of its default.
    """
    given: dict[str, object] = dict(_pairs(sys.argv[1:] if arguments is None else arguments))
    of_job = json.loads(variables.get("EVERSTEP_HYPERPARAMETERS", "{}"))
    of_job = {key.replace("-", "_"): value for key, value in of_job.items()}
    for unknown in sorted(of_job.keys() - defaults.keys()):
        similar = difflib.get_close_matches(unknown, defaults, n=1)
        advice = f"; did you mean {similar[0]}?" if similar else ""
        warnings.warn(f"the script has no hyperparameter {unknown}{advice}", stacklevel=2)
    given |= of_job
    return SimpleNamespace(
        **{key: _cast(key, given[key], default) if key in given else default for key, default in defaults.items()}
    )


def output_dir(variables: Mapping[str, str] = os.environ) -> Path:
    """Return the directory whose content Everstep stores when the job ends. Creates the directory if it is missing.

    The path is EVERSTEP_OUTPUT_DIR, or `output` in the working directory.
    """
    path = Path(variables.get("EVERSTEP_OUTPUT_DIR", "output"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def input_dir(channel: str, variables: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of one input channel (`InputDataConfig`).

    The path is the same on every node.

    Args:
        channel: `ChannelName` of an entry of `InputDataConfig`.
        variables: environment variables. Outside Everstep the directory is SM_CHANNEL_<NAME>, or else `input/<name>` in
            the working directory.

    Returns:
        The directory. The script may read its content but must not write to it.

    Raises:
        SessionMisuse: the job has no channel of this name.
    """
    channels = json.loads(variables.get("EVERSTEP_INPUT_CHANNELS", "{}"))
    if channel in channels:
        return Path(channels[channel])
    if variables.get("EVERSTEP_AGENT_SOCKET"):
        raise SessionMisuse(
            f"the job has no input channel {channel!r}; its channels: {', '.join(sorted(channels)) or 'none'}"
        )
    return Path(variables.get(channel_variable(channel), f"input/{channel}"))


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for position, argument in enumerate(arguments):
        key, _, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and "=" in argument:
            pairs.append((key, value))
        elif argument.startswith("--") and position + 1 < len(arguments):
            pairs.append((key, arguments[position + 1]))
    return [(key.replace("-", "_"), value) for key, value in pairs]


def _cast(key: str, value: object, default: bool | int | float | str) -> bool | int | float | str:
    text = str(value)
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if isinstance(default, (int, float)):
            return type(default)(text)
    except (ValueError, KeyError) as error:
        raise SessionMisuse(f"hyperparameter {key}={text!r} is not a {type(default).__name__}") from error
    return text
