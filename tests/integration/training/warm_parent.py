"""A process that has imported torch and DeepSpeed once and forks ranks on request: one JSON line in, one out.

    {"launch": …, "world": 3, "directory": …, "environment": {…}, "arguments": {…}}  →  {"pids": […]}
    {"wait": [pid, …]}                                                               →  {"statuses": […]}

It ends, and its ranks with it, when its standard input does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from typing import TextIO

_PR_SET_PDEATHSIG = 1
answers: TextIO


def main() -> None:
    global answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    import importlib

    import deepspeed
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.utils.cpp_extension

    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    deepspeed.utils.logger.setLevel("ERROR")
    from tests.integration.training import scripts

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    answer({"ready": True})
    for text in sys.stdin:
        request = json.loads(text)
        if "wait" in request:
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["wait"]]
            answer({"statuses": statuses})
            continue
        pids = [launch(scripts, request, rank) for rank in range(request["world"])]
        answer({"pids": pids})


def answer(value: dict[str, object]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def launch(scripts: object, request: dict[str, object], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        directory = str(request["directory"])
        log = os.open(f"{directory}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: where does it hang?
        world = str(request["world"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, GLOO_SOCKET_IFNAME="lo", **request["environment"])  # type: ignore[arg-type]
        code = scripts.run(str(request["launch"]), directory, request["arguments"])  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
