"""Ends a pass of a determinism check and starts the next pass in a new process image, by exec.

The script loses all its memory, as after a kill, but pid, user, cgroup and output streams stay the same. Two in-memory
files (memfd) survive the exec: the snapshot of the kept step, and the records of finished passes.

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
"""Python's hash seed by pass, unless the job sets PYTHONHASHSEED."""
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a determinism check, and the files that the passes share."""

    number: int
    last_step: int
    varies_hash: bool
    """Whether pass 3 has its own hash seed, because the job sets no PYTHONHASHSEED."""
    state: Path
    """A slot file, which pass 1 stores and passes 2 and 3 restore."""
    records: Path
    """One line per finished pass: its `Record` as JSON."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Pass | None:
        """Return this process's pass, from 1; None without a check. Raises SessionMisuse for an invalid step count."""
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
        """The step whose snapshot pass 1 stores, and passes 2 and 3 restore."""
        return max(1, self.last_step // 4)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process that runs this pass."""
        text = f"{self.number}:{self.varies_hash}:{self.state}:{self.records}"
        return {PASS_VARIABLE: text} | ({"PYTHONHASHSEED": HASH_SEEDS[self.number]} if self.varies_hash else {})

    def following(self) -> Pass:
        """Return the next pass."""
        return replace(self, number=self.number + 1)


def begin(new: Pass) -> NoReturn:
    """Replace this process by one that runs the script from its beginning, as the pass `new`. Collective."""
    restart(new.variables(), {new.state, new.records})


def restart(variables: Mapping[str, str], kept: Iterable[Path]) -> NoReturn:
    """Replace this process by one that runs the script from its beginning and inherits the files `kept`. Collective."""
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
    """Run the script in a child process, which this context ends. Collective, as `restart`. Drops its stdout."""
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
    """Return the variables for the next pass's process group. The old rendezvous may still answer at its port."""
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
