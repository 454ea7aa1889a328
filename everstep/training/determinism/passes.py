"""Ends a pass of a determinism check and starts the next pass in a new process image.

The rank calls exec, which replaces the program in its process. Pid, user, cgroup and output streams stay the same. The
script loses all its memory, as after a kill. Two in-memory files (memfd) survive the exec. One holds the snapshot of
the kept step (`everstep.determinism`), the other holds the records of finished passes. The kernel deletes both files
when the process ends, so a failed check leaves nothing behind.

    pass 0     the process that the launcher started; only creates the files
    pass 1     trains from step 0 to the last step, and stores a snapshot of the kept step
    pass 2, 3  restore the kept step and train to the last step; pass 3 has a different hash seed of Python
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from everstep.protocol.plan import CHECK_VARIABLE, check_steps
from everstep.training.errors import SessionMisuse

PASS_VARIABLE = "EVERSTEP_CHECK_PASS"
PASS_COUNT = 3
HASH_SEEDS = {1: "1", 2: "1", 3: "2"}
"""Hash seed of Python by pass (run of the same steps) of the check, unless the job sets PYTHONHASHSEED."""
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a determinism check (one of three runs of the same steps), and the files that the passes share."""

    number: int
    last_step: int
    """Number of the step after which the pass ends."""
    varies_hash: bool
    """True if pass 3 has a different hash seed than passes 1 and 2. False if the job sets PYTHONHASHSEED."""
    state: Path
    """File in the format of a slot, with the snapshot that pass 1 stores and passes 2 and 3 restore."""
    records: Path
    """File with one line per finished pass: the `Record` of the pass as JSON."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Pass | None:
        """Return the pass of the check that this process runs, or None if the job is no determinism check.

        Args:
            variables: the environment variables of the rank.

        Returns:
            The pass, numbered from 1.

        Raises:
            SessionMisuse: the number of steps is not valid.
        """
        if CHECK_VARIABLE not in variables:
            return None
        last_step = check_steps(variables[CHECK_VARIABLE])
        if last_step is None:
            raise SessionMisuse(f"{CHECK_VARIABLE}={variables[CHECK_VARIABLE]!r} is no number of steps from 2 to 1000")
        if PASS_VARIABLE not in variables:
            varies = variables.get("PYTHONHASHSEED", "random") == "random"
            return cls(0, last_step, varies, create_file("state"), create_file("records"))
        number, varies_hash, state, records = variables[PASS_VARIABLE].split(":")
        return cls(int(number), last_step, varies_hash == "True", Path(state), Path(records))

    @property
    def kept_step(self) -> int:
        """The step whose snapshot the check's first run (pass 1) stores, and its second and third run restore."""
        return max(1, self.last_step // 4)

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a process that runs this pass of the determinism check."""
        text = f"{self.number}:{self.varies_hash}:{self.state}:{self.records}"
        return {PASS_VARIABLE: text} | ({"PYTHONHASHSEED": HASH_SEEDS[self.number]} if self.varies_hash else {})

    def following(self) -> Pass:
        """Return the pass (run of the check's steps) that follows this pass."""
        return replace(self, number=self.number + 1)


def begin(new: Pass) -> NoReturn:
    """Replace this process by one that runs the script from its beginning, as the next pass. Every rank calls it.

    Args:
        new: the pass that the new process runs.
    """
    restart(new.variables(), {new.state, new.records})


def restart(variables: Mapping[str, str], kept: Iterable[Path]) -> NoReturn:
    """Replace this process by one that runs the script from its beginning.

    Collective: every rank calls it at the same step. The new process group uses a different port, because the
    rendezvous of the old process group may still answer at its port.

    Args:
        variables: added to the environment of the new process.
        kept: the files in memory (`create_file`) that the new process inherits.
    """
    variables = {**os.environ, **variables, **new_rendezvous()}
    end_children()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    names = {path.name for path in kept if path.parent == _DESCRIPTORS}
    for name in os.listdir(_DESCRIPTORS):
        # Close all other descriptors at the exec. Libraries mark sockets and devices as inheritable, and an inherited
        # GPU device would keep its memory allocated.
        if int(name) > 2 and (_DESCRIPTORS / name).is_symlink():
            os.set_inheritable(int(name), name in names)
    os.execve(sys.executable, _command(), variables)


@contextmanager
def beside(variables: Mapping[str, str], kept: Iterable[Path]) -> Generator[None]:
    """Run the script from its beginning in a child process, which is killed at the end of this context.

    Collective, with the arguments of `restart`. The child's stdout is dropped.
    """
    variables = {**os.environ, **variables, **new_rendezvous()}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    inherited = [int(path.name) for path in kept]
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(_command(), env=variables, pass_fds=inherited, stdin=nothing, stdout=nothing)
    try:
        yield
    finally:
        child.kill()
        child.wait()


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def end_children() -> None:
    """Kill the DataLoader workers, because child processes would survive an exec."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def has_peers() -> bool:
    """Return whether this rank belongs to a process group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def create_file(name: str) -> Path:
    """Create a file in memory. The kernel deletes it when the process ends."""
    return _DESCRIPTORS / str(os.memfd_create(f"everstep-check-{name}"))


def new_rendezvous() -> dict[str, str]:
    """Return the environment variables with which the ranks of the next pass form a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    with closing(socket.create_server(("", 0))) as free:
        port = torch.tensor([free.getsockname()[1] if dist.get_rank() == 0 else 0], dtype=torch.int64, device=_device())
        dist.all_reduce(port, op=dist.ReduceOp.MAX)
        number = int(port.item())
    # The store of torchrun's agent still holds the addresses that the ranks registered in this pass (run of the check's
    # steps). Rank 0 of the next pass therefore serves a new store.
    return {"MASTER_PORT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _device() -> torch.device:
    backend = dist.get_backend()  # The backend may have a device prefix, as in "cuda:nccl".
    is_on_gpu = "nccl" in backend and "cpu" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
