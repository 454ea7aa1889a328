"""Undisturbed runs of a training script, without any agent: forked from a process that has imported torch and DeepSpeed once.

    {"script": …, "world": 3, "directory": …, "variables": {…}}  →  {"pids": […]}
    {"wait": [pid, …]}                                           →  {"codes": […]}

It is its own subprocess; ranks die with it, and it ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Run:
    """Ranks that train, or have trained, undisturbed."""

    parent: References
    directory: Path
    pids: tuple[int, ...]

    def results(self) -> list[dict[str, Any]]:
        """Wait for the end and return what each rank left."""
        if codes := [code for code in self.parent.wait(self.pids) if code != 0]:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.directory.glob("*.log")))
            raise AssertionError(f"the undisturbed run ended with {codes}\n{logs}")
        return [json.loads((self.directory / f"rank={rank}" / "result.json").read_text()) for rank in range(len(self.pids))]


class References:
    """The warm process, seen from the tests. Started at once, ready some seconds later."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.e2e.reference"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, script: Path, world: int, directory: Path, hyperparameters: dict[str, str]) -> Run:
        """Start `world` ranks of a script."""
        directory.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {
            "EVERSTEP_HYPERPARAMETERS": json.dumps(hyperparameters),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world),
        }
        answer = self._ask({"script": str(script), "world": world, "directory": str(directory), "variables": variables})
        return Run(self, directory, tuple(answer["pids"]))

    def wait(self, pids: tuple[int, ...]) -> list[int]:
        """Return the exit codes of ranks once all of them have ended."""
        return list(self._ask({"wait": pids})["codes"])

    def close(self) -> None:
        """End the process and every rank of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    for module in ("deepspeed", "torch._dynamo", "torch.distributed.fsdp", "deepspeed.runtime.zero.muon.original_muon"):
        importlib.import_module(module)
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    gc.collect()
    gc.freeze()
    for text in sys.stdin:
        request = json.loads(text)
        if "wait" in request:
            answer = {"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["wait"]]}
        else:
            answer = {"pids": [_fork(request, rank) for rank in range(request["world"])]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(f"{request['directory']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        output = f"{request['directory']}/rank={rank}"
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo", EVERSTEP_OUTPUT_DIR=output, **request["variables"])
        sys.argv = [request["script"]]
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
