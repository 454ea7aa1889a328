"""Runs a process that imports torch and DeepSpeed once, and forks ranks for tests.

The imports take longer than most tests. Requests and answers are JSON, one line each:

    {"function": "module:name", "arguments": […], "world": 3, "directory": …, …}  →  {"pids": […]}
    {"wait": [pid, …], "until_one_fails": …}                                      →  {"codes": […]}

Requests and answers have a number, so that the next test does not read the answer to an interrupted test.

Each rank calls the function. The function's return value is the rank's exit code; None means 0. When the standard input
of the process closes, the process ends together with its ranks.

Each rank leads a process group. The group is killed once the rank has been waited for, because a DataLoader worker can
wait forever for a lock that a killed rank held.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import ReservedPort
from worker.ranks.build_locks import remove_stale
from worker.ranks.environment import node_environment

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "deepspeed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed.runtime.zero.muon.original_muon",
    "everstep.training",
)
READY_SECONDS = 600.0
_COMPILING = {name: node_environment(os.environ, "")[name] for name in ("PATH", "TORCH_EXTENSIONS_DIR")}
"""The variables of a node's environment that decide where DeepSpeed's operator is compiled."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Launch:
    """The rank processes that one call of `WarmParent.fork` has started."""

    parent: WarmParent
    directory: Path
    pids: list[int]
    port: ReservedPort
    """Port of the rendezvous at which these ranks form their process group."""
    result: str
    """Path of each rank's JSON result, relative to the directory. The rank's number replaces `{rank}`."""

    def kill(self) -> None:
        """Kill all ranks together.

        Each rank is first stopped by a signal, so that no rank notices the death of another.
        """
        for strike in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, strike)

    def wait(self, *, until_one_fails: bool = True) -> list[int]:
        """Wait until all ranks have ended and return their exit codes.

        The code of a killed rank is the negative signal number.

        Args:
            until_one_fails: True kills the other ranks after the first failure, because they could wait for the failed rank
                forever. Use False where every rank is expected to fail.
        """
        try:
            codes = self.parent.ask({"wait": self.pids, "until_one_fails": until_one_fails})["codes"]
        finally:
            # Without this call, the garbage collector would close the socket during a later test.
            self.port.close()
        self.pids = []
        return list(codes)

    def results(self) -> list[dict[str, Any]]:
        """Wait until all ranks have ended successfully and return the result of each rank."""
        count = len(self.pids)
        codes = self.wait()
        assert codes == [0] * count, f"{codes}\n{self.logs()}"
        return [json.loads((self.directory / self.result.format(rank=rank)).read_text()) for rank in range(count)]

    def log(self, rank: int) -> str:
        """Return the printed output of one rank."""
        return (self.directory / f"rank{rank}.log").read_text()

    def logs(self) -> str:
        """Return the end of each rank's printed output."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.directory.glob("rank*.log"))
        )


class WarmParent:
    """The tests' connection to the process that forks ranks.

    The process starts immediately. It is ready some seconds later, or about a minute later on a fresh machine.
    """

    def __init__(self) -> None:
        # The ranks of jobs find what this process compiles, because both use the folder of a node's environment. Its
        # PATH contains ninja, which DeepSpeed calls by name. A killed DataLoader worker leaves a socket in the
        # temporary folder, so the process has a temporary folder of its own.
        self._temporary = tempfile.TemporaryDirectory(prefix="everstep-")
        environment = {
            **os.environ,
            **_COMPILING,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": self._temporary.name,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.warm_parent"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self._count = 0

    def wait_until_ready(self) -> None:
        """Wait until the process has imported its modules and compiled DeepSpeed's operator.

        The process is killed after `READY_SECONDS`, because no time limit of a test covers this wait.
        """
        limit = threading.Timer(READY_SECONDS, self._process.kill)
        limit.start()
        try:
            self.ask({"wait": [], "until_one_fails": False})
        except json.JSONDecodeError as error:
            raise RuntimeError(f"{self._process.args} ended, or was not ready after {READY_SECONDS:.0f} s") from error
        finally:
            limit.cancel()

    def fork(
        self,
        function: str,
        *arguments: object,
        world: int,
        directory: Path,
        environment: Mapping[str, str],
        result: str,
        imports: Sequence[str] = (),
    ) -> Launch:
        """Start `world` ranks of a function. Rank r prints to `rank<r>.log` in the directory.

        The process first imports the modules `imports`, so that its later ranks need not import them.
        """
        port = ReservedPort()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), **environment}
        request = {
            "function": function,
            "arguments": arguments,
            "world": world,
            "directory": str(directory),
            "environment": environment,
            "imports": imports,
        }
        try:
            return Launch(self, directory, self.ask(request)["pids"], port, result)
        except BaseException:
            port.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._count += 1
            self._process.stdin.write(json.dumps({**request, "number": self._count}) + "\n")
            self._process.stdin.flush()
            while True:
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
                if answer["number"] == self._count:
                    return answer

    def close(self) -> None:
        """End the process and all its ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._temporary.cleanup()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries also print to the original standard output

    remove_stale(os.environ, None)  # A lock file that a killed run has left behind would block this run forever.
    _import(IMPORTS)
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    sys.modules["deepspeed"].utils.logger.setLevel("ERROR")
    ended: dict[int, int] = {}
    for text in sys.stdin:
        request = json.loads(text)
        if "wait" in request:
            answer: dict[str, Any] = {
                "codes": _codes(request["wait"], ended, until_one_fails=request["until_one_fails"])
            }
        else:
            _import(request["imports"])
            answer = {"pids": [_fork(request, rank) for rank in range(request["world"])]}
        answers.write(json.dumps({**answer, "number": request["number"]}) + "\n")
        answers.flush()


def _import(modules: Sequence[str]) -> None:
    """Import modules, and exclude their objects from the garbage collection of the forked ranks."""
    if all(module in sys.modules for module in modules):
        return
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _codes(pids: list[int], ended: dict[int, int], *, until_one_fails: bool) -> list[int]:
    """Wait until all ranks of a launch have ended.

    Args:
        pids: the ranks of one launch.
        ended: exit codes of ranks that ended before this call; codes of other launches stay in the mapping.
        until_one_fails: True kills the other ranks after the first failure.

    Returns:
        The exit codes, in the order of `pids`.
    """
    while missing := set(pids) - ended.keys():
        if until_one_fails and any(ended.get(pid, 0) > 0 for pid in pids):
            for pid in missing:
                os.kill(pid, signal.SIGKILL)
        one = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert one is not None
        _end_group(one.si_pid)  # no other process can get this pid before the wait
        _, status = os.waitpid(one.si_pid, 0)
        ended[one.si_pid] = os.waitstatus_to_exitcode(status)
    return [ended.pop(pid) for pid in pids]


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(f"{request['directory']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # `kill -USR1` makes a hanging process print its stacks
        world = str(request["world"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, GLOO_SOCKET_IFNAME="lo", **request["environment"]
        )
        module, _, function = request["function"].partition(":")
        code = getattr(importlib.import_module(module), function)(*request["arguments"]) or 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
