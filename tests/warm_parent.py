"""A process that has imported torch and DeepSpeed once and forks ranks on request: importing takes longer than most
tests.

One JSON line in, one out:

    {"function": "module:name", "arguments": […], "world": 3, "directory": …, "environment": {…}}  →  {"pids": […]}
    {"wait": [pid, …], "until_one_fails": …}                                                      →  {"codes": […]}

Both carry a number: a test that was cut off leaves its answer behind, which is not the next one's.

Each rank calls the function; its exit code is what that returns, 0 for None. The process ends, and its ranks with it,
when its standard input does.

A rank leads a process group, which is ended when it is waited for: the workers of a DataLoader wait for ever for a lock
that a killed rank held.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import ReservedPort
from worker.ranks.build_locks import remove_stale

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "deepspeed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed.runtime.zero.muon.original_muon",
    "everstep.training",
)
_PR_SET_PDEATHSIG = 1


@dataclass
class Launch:
    """The ranks of one launch."""

    parent: WarmParent
    directory: Path
    pids: list[int]
    port: ReservedPort
    """Where they meet."""
    result: str
    """Where each rank leaves its result below the directory, as JSON; `{rank}` stands for its number."""

    def kill(self) -> None:
        """Kill all at once: stopped first, none of them sees that another has gone."""
        for strike in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, strike)

    def wait(self, *, until_one_fails: bool = True) -> list[int]:
        """Return the exit codes once all have ended; minus the signal's number for a killed one.

        Args:
            until_one_fails: once one has failed, the others are killed: they may wait for it for ever. Where each is to
                fail, they are not.
        """
        try:
            codes = self.parent.ask({"wait": self.pids, "until_one_fails": until_one_fails})["codes"]
        finally:
            self.port.close()  # a test that is cut off here would leave the socket to the next one's garbage collection
        self.pids = []
        return list(codes)

    def results(self) -> list[dict[str, Any]]:
        """Wait for a good end and return what each rank left."""
        count = len(self.pids)
        codes = self.wait()
        assert codes == [0] * count, f"{codes}\n{self.logs()}"
        return [json.loads((self.directory / self.result.format(rank=rank)).read_text()) for rank in range(count)]

    def log(self, rank: int) -> str:
        """What one rank has printed."""
        return (self.directory / f"rank{rank}.log").read_text()

    def logs(self) -> str:
        """The end of what each rank has printed."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.directory.glob("rank*.log"))
        )


class WarmParent:
    """The process, seen from the tests. Started at once, ready some seconds later."""

    def __init__(self) -> None:
        # The environment's bin on PATH: DeepSpeed calls ninja by name.
        # Workers of DataLoaders that are ended leave sockets behind.
        self._temporary = tempfile.TemporaryDirectory(prefix="everstep-")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": self._temporary.name,
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

    def fork(
        self,
        function: str,
        *arguments: object,
        world: int,
        directory: Path,
        environment: Mapping[str, str],
        result: str,
    ) -> Launch:
        """Start `world` ranks of a function; what they print is in `rank<r>.log` in the directory."""
        port = ReservedPort()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), **environment}
        request = {
            "function": function,
            "arguments": arguments,
            "world": world,
            "directory": str(directory),
            "environment": environment,
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
        """End the process and every rank of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._temporary.cleanup()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    remove_stale(os.environ, None)  # of a run that was killed: this one would wait for ever
    for module in IMPORTS:
        importlib.import_module(module)
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    sys.modules["deepspeed"].utils.logger.setLevel("ERROR")
    gc.collect()
    gc.freeze()
    ended: dict[int, int] = {}
    for text in sys.stdin:
        request = json.loads(text)
        if "wait" in request:
            answer: dict[str, Any] = {
                "codes": _codes(request["wait"], ended, until_one_fails=request["until_one_fails"])
            }
        else:
            answer = {"pids": [_fork(request, rank) for rank in range(request["world"])]}
        answers.write(json.dumps({**answer, "number": request["number"]}) + "\n")
        answers.flush()


def _codes(pids: list[int], ended: dict[int, int], *, until_one_fails: bool) -> list[int]:
    """Wait for all.

    Args:
        pids: of one launch.
        ended: exit codes of ranks that ended before anybody asked; other launches' are left there.
        until_one_fails: kill the others then.

    Returns:
        The exit codes.
    """
    while missing := set(pids) - ended.keys():
        if until_one_fails and any(ended.get(pid, 0) > 0 for pid in pids):
            for pid in missing:
                os.kill(pid, signal.SIGKILL)
        one = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert one is not None
        _end_group(one.si_pid)  # while nobody else can have its number
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
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: where does it hang?
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
