"""What a rank sees: environment variables and arguments. Pure.

Torchrun's names where torchrun has them, so that a script needs no change; ours begin with EVERSTEP_. `LOCAL_SIZE` is
never set: with it DeepSpeed's shared-memory all-reduce on CPU would bypass the network (measured).

Invariant: what the user sets wins over the node's environment, and never over a reserved name.
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
from everstep.protocol.plan import GenerationPlan, PlanNode, ScriptPlan

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
"""Where AWS SDKs look for whose keys they are to use. Those of the node are the agent's alone."""
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
    """What of the node a rank has to know."""

    agent_socket: Path
    output_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """What was installed for a job beside the node's own packages."""

    path: str = ""
    """A folder that ranks see before the node's packages; empty: the node has everything."""
    modules: tuple[str, ...] = ()
    """What can be imported from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplied:
    """What every rank of a generation on this node is started with besides its job's own variables."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that win over the job's own; values of secrets among them."""
    packages: Packages = field(default_factory=Packages)


def is_reserved(name: str) -> bool:
    """Say whether a user may not set this variable."""
    return name in _RESERVED or name.startswith(_RESERVED_PREFIX)


def node_environment(environment: Mapping[str, str], card: str) -> dict[str, str]:
    """Choose what of the agent's own environment ranks inherit.

    Args:
        environment: the agent's. Whatever is Everstep's own (tokens among it) stays behind, and the node's AWS
            credentials.
        card: the network card with this node's address, empty if that is not known. gloo and NCCL are told: left to
            themselves, gloo takes the one that the machine's name leads to, which may be a bridge of containers or
            loopback, and NCCL all that it finds, over which routes may not lead (`network_cards`).

    Returns:
        It; also the environment of the shim and its template, which warm ranks are forked from.
    """
    hidden = _CREDENTIALS | {"PYTHONSAFEPATH"}
    inherited = {
        name: value
        for name, value in environment.items()
        if not (is_reserved(name) or name in hidden or name.startswith("AWS_BEARER_TOKEN"))
    }
    inherited |= _NO_CREDENTIALS
    # DeepSpeed compiles its operator with the `ninja` that stands beside this interpreter.
    cache = inherited.get("TORCH_EXTENSIONS_DIR") or _default_extensions(inherited)
    if cache:
        inherited["TORCH_EXTENSIONS_DIR"] = keyed_extensions(cache, _environment_key())
    programs = os.path.dirname(sys.executable)
    path = inherited.get("PATH", os.defpath).split(os.pathsep)
    inherited["PATH"] = os.pathsep.join([programs, *(folder for folder in path if folder != programs)])
    inherited.setdefault("OMP_NUM_THREADS", "1")
    inherited.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # torch's profiler tells stderr whenever it starts and stops; read once, when torch is imported
    if card:
        inherited.setdefault("GLOO_SOCKET_IFNAME", card)
        inherited.setdefault("NCCL_SOCKET_IFNAME", f"={card}")
    return inherited


def keyed_extensions(cache: str, key: str) -> str:
    """Return the folder for compiled extensions of one environment. Pure; again gives the same.

    torch compiles an extension anew whenever another environment has compiled it in the same folder, so environments
    that share a home would do it for each other by turns.

    Args:
        cache: the folder of all environments.
        key: of the environment.

    Returns:
        A folder below.
    """
    name = f"{_KEYED}{key}"
    return cache if os.path.basename(cache) == name else os.path.join(cache, name)


def with_packages(environment: Mapping[str, str], packages: str) -> dict[str, str]:
    """Return a rank's environment with a layer of packages, which may bring another torch: extensions are compiled for that layer. Pure.

    Args:
        environment: the rank's.
        packages: the folder of the layer; empty: there is none.

    Returns:
        It, with another folder for extensions, unless the job has chosen that folder itself.
    """
    cache = environment.get("TORCH_EXTENSIONS_DIR", "")
    if not packages or not os.path.basename(cache).startswith(_KEYED):
        return dict(environment)
    key = hashlib.sha256(packages.encode()).hexdigest()[:12]
    return {**environment, "TORCH_EXTENSIONS_DIR": keyed_extensions(os.path.dirname(cache), key)}


def _default_extensions(environment: Mapping[str, str]) -> str:
    """Return where torch keeps compiled extensions by default; empty without a home."""
    cache = environment.get("XDG_CACHE_HOME") or (
        os.path.join(environment["HOME"], ".cache") if environment.get("HOME") else ""
    )
    return os.path.join(cache, "torch_extensions") if cache else ""


@functools.cache
def _environment_key() -> str:
    """Return what names this Python and the libraries that extensions are compiled against."""
    facts = [sys.version, sys.prefix]
    for name in ("torch", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts.append(f"{name}=={metadata.version(name)}")
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def inherited_as(user: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks inherit that have another user than the agent.

    Args:
        user: HOME and names of that user; empty: ranks have the agent's.
        inherited: what `node_environment` returned.

    Returns:
        All of it, less what leads to folders of the agent's user that are written to: what is built there, root loads.
    """
    if not user:
        return dict(inherited)
    return {
        name: value for name, value in inherited.items() if name not in _OF_THE_AGENT and not name.startswith("XDG_")
    } | dict(user)


def job_environment(script: ScriptPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a job's own variables make of the node's."""
    return {**inherited, **{name: value for name, value in script.environment.items() if not is_reserved(name)}}


def rank_environment(
    plan: GenerationPlan,
    here: PlanNode,
    rank: Rank,
    paths: RankPaths,
    inherited: Mapping[str, str],
    supplied: Mapping[str, str],
) -> dict[str, str]:
    """Build the environment of one rank.

    Args:
        plan: the generation's.
        here: this node in it.
        rank: one of this node's.
        paths: of this rank on this node.
        inherited: what `node_environment` returned.
        supplied: what this launch alone brings (`worker.provisioning.supplies`); wins over what the user set.

    Returns:
        All of it: nothing else reaches the rank.
    """
    environment = job_environment(plan.script, inherited)
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
    }
    return environment


def source_folder(entry: Path, entry_point: str) -> Path:
    """Return the folder of the unpacked source tree.

    Args:
        entry: the script on this node.
        entry_point: its path below the tree.

    Returns:
        The tree's root, in which ranks start.
    """
    return entry.absolute().parents[len(PurePosixPath(entry_point).parts) - 1]


def rank_arguments(hyperparameters: Mapping[str, str]) -> tuple[str, ...]:
    """Return hyperparameters as the script's arguments: `--key value`, in the order in which they were given."""
    return tuple(word for name, value in hyperparameters.items() for word in (f"--{name}", value))
