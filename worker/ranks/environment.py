"""Environment variables and arguments of a rank, with torchrun's names. Pure.

`LOCAL_SIZE` is never set: it would switch DeepSpeed's all-reduce on CPU from the network to shared memory (measured).
Invariant: a variable of the job replaces the node's variable of the same name, but never a reserved variable, except
EVERSTEP_CHECK_DETERMINISM.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath

from everstep.protocol.ids import Rank
from everstep.protocol.plan import CHECK_VARIABLE, GenerationPlan, PlanNode, ScriptPlan

_RESERVED = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "AWS_EC2_METADATA_DISABLED",
    }
)
_CREDENTIALS = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SECURITY_TOKEN",
        "AWS_CREDENTIAL_EXPIRATION",
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    }
)
"""Variables in which AWS SDKs find credentials. Ranks inherit none: the node's credentials are only for the agent."""
_NO_CREDENTIALS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_OF_THE_AGENT = frozenset({"TORCH_EXTENSIONS_DIR", "MAIL", "SUDO_USER", "SUDO_UID", "SUDO_GID", "SUDO_COMMAND"})
_RESERVED_PREFIX = "EVERSTEP_"
_KEYED = "everstep-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPaths:
    """Paths on the node that a rank receives in its environment."""

    agent_socket: Path
    output_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Packages that were installed for a job on top of the node's own packages."""

    path: str = ""
    """Folder from which ranks import first. Empty if the job needs no further packages."""
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplied:
    """Variables and packages that this node provides to every rank of a generation."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that take precedence over the job's own. Some values are secrets."""
    packages: Packages = field(default_factory=Packages)


def is_reserved(name: str) -> bool:
    """Return whether only Everstep may set this environment variable of ranks."""
    return name in _RESERVED or name.startswith(_RESERVED_PREFIX)


def node_environment(environment: Mapping[str, str], card: str) -> dict[str, str]:
    """Return the variables of the agent that ranks inherit, without tokens and AWS credentials; `card` may be empty."""
    hidden = _CREDENTIALS | {"PYTHONSAFEPATH"}
    inherited = {
        name: value
        for name, value in environment.items()
        if not (is_reserved(name) or name in hidden or name.startswith("AWS_BEARER_TOKEN"))
    }
    inherited |= _NO_CREDENTIALS
    cache = inherited.get("TORCH_EXTENSIONS_DIR") or _default_extensions(inherited)
    if cache:
        inherited["TORCH_EXTENSIONS_DIR"] = keyed_extensions(cache, environment_key())
    # A script with DeepSpeed compiles C++ extensions with `ninja`, which is in the folder of this interpreter.
    programs = os.path.dirname(sys.executable)
    path = inherited.get("PATH", os.defpath).split(os.pathsep)
    inherited["PATH"] = os.pathsep.join([programs, *(folder for folder in path if folder != programs)])
    inherited.setdefault("OMP_NUM_THREADS", "1")
    # Suppress the profiler's messages. torch reads this variable only at import, before a forked rank's script runs.
    inherited.setdefault("KINETO_LOG_LEVEL", "6")
    if card:
        # gloo might otherwise use a container bridge, and NCCL a card without a route to the other nodes.
        inherited.setdefault("GLOO_SOCKET_IFNAME", card)
        inherited.setdefault("NCCL_SOCKET_IFNAME", f"={card}")
    return inherited


def keyed_extensions(cache: str, key: str) -> str:
    """Return the folder below `cache` for compiled torch extensions of one Python environment. Pure and idempotent."""
    # In a shared folder, torch would compile an extension again whenever jobs change between environments.
    name = f"{_KEYED}{key}"
    return cache if os.path.basename(cache) == name else os.path.join(cache, name)


def with_packages(environment: Mapping[str, str], packages: str) -> dict[str, str]:
    """Return a rank's environment with a folder of compiled extensions for the job's packages, if it has any. Pure."""
    cache = environment.get("TORCH_EXTENSIONS_DIR", "")
    if not packages or not os.path.basename(cache).startswith(_KEYED):
        return dict(environment)
    # The job's packages may contain another version of torch, which needs its own compiled extensions.
    key = hashlib.sha256(packages.encode()).hexdigest()[:12]
    return {**environment, "TORCH_EXTENSIONS_DIR": keyed_extensions(os.path.dirname(cache), key)}


def _default_extensions(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME") or (
        os.path.join(environment["HOME"], ".cache") if environment.get("HOME") else ""
    )
    return os.path.join(cache, "torch_extensions") if cache else ""


@functools.cache
def environment_key() -> str:
    """Return a short hash of this Python and of the libraries that compiled extensions depend on."""
    facts = [sys.version, sys.prefix]
    for name in ("torch", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts.append(f"{name}=={metadata.version(name)}")
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def inherited_as(user: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment for ranks that run as another user; `user` has HOME and names, or is empty."""
    if not user:
        return dict(inherited)
    return {
        # Drop the names of the agent's writable folders, where a rank could store code that root later loads.
        name: value
        for name, value in inherited.items()
        if name not in _OF_THE_AGENT and not name.startswith("XDG_")
    } | dict(user)


def job_environment(script: ScriptPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment with the job's own variables, except reserved ones."""
    own = {name: value for name, value in script.environment.items() if name == CHECK_VARIABLE or not is_reserved(name)}
    return {**inherited, **own}


def rank_environment(
    plan: GenerationPlan,
    here: PlanNode,
    rank: Rank,
    paths: RankPaths,
    inherited: Mapping[str, str],
    supplied: Mapping[str, str],
) -> dict[str, str]:
    """Build the complete environment of one rank of this node. `supplied` variables replace the user's."""
    of_sagemaker = dict.fromkeys(("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"), str(paths.output_dir))
    environment = of_sagemaker | job_environment(plan.script, inherited)
    environment |= supplied
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(here.ranks.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here.ranks)),
        "GROUP_RANK": str(plan.nodes.index(here)),
        "GROUP_WORLD_SIZE": str(len(plan.nodes)),
        "MASTER_ADDR": plan.master_address,
        "MASTER_PORT": str(plan.master_port),
        "EVERSTEP_JOB_NAME": plan.job,
        "EVERSTEP_RUN_ID": plan.run,
        "EVERSTEP_GENERATION": str(plan.generation),
        "EVERSTEP_HYPERPARAMETERS": json.dumps(plan.script.hyperparameters),
        "EVERSTEP_OUTPUT_DIR": str(paths.output_dir),
        "EVERSTEP_AGENT_SOCKET": str(paths.agent_socket),
        "EVERSTEP_FINAL_ROUND_SECONDS": str(float(plan.timeouts.final_round_seconds)),
        "EVERSTEP_WELCOME_SECONDS": str(float(plan.timeouts.welcome_seconds)),
        "EVERSTEP_IS_ELASTIC": str(int(plan.is_elastic)),
    }
    return environment


def source_folder(entry: Path, entry_point: str) -> Path:
    """Return the root of the unpacked source tree, in which the script `entry` has the path `entry_point`."""
    return entry.absolute().parents[len(PurePosixPath(entry_point).parts) - 1]


def rank_arguments(script: ScriptPlan) -> tuple[str, ...]:
    """Return the script's arguments: hyperparameters as `--key=value` in order, then the other arguments."""
    # With `--key value`, argparse would take a value such as -1e-4 for an option.
    return (*(f"--{name}={value}" for name, value in script.hyperparameters.items()), *script.arguments)
