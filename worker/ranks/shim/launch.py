"""Starts a rank inside its new process: from the fork to the first line of the user's script.

The script sees the same `__main__`, `sys.argv`, `sys.path`, stdio, signals, exit codes, `atexit` and open files in a
cold rank (an exec) and in a warm rank (a fork of the template). Invariant: no function here returns into the loop of
the shim or the template; the rank's process ends here.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import NoReturn

from worker.node import priority, rank_user
from worker.ranks.shim import processes
from worker.ranks.shim.messages import StartRank

GO = b"g"
_CANNOT_RUN = 127
"""Exit code if the program cannot be run, as in shells."""
_CANNOT_OPEN = 2
"""Exit code if the script cannot be opened, as in Python."""
_STALE_PREFIXES = (
    "LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "MALLOC_", "GLIBC_",
    "LC_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_COMPILE_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "DS_ACCELERATOR",
)  # fmt: skip
# `become` sets torch's thread count by a call. The template and all ranks run with `python -u` anyway.
_APPLIED_LATE = frozenset({"OMP_NUM_THREADS", "PYTHONUNBUFFERED"})
"""Variables with which a rank needs no cold start, although their names have a prefix in `_STALE_PREFIXES`."""


def needs_cold_start(environment: dict[str, str], template: dict[str, str]) -> str | None:
    """Return the first variable that would have no effect on a fork of the template, or None for a warm start. Pure."""
    # The template's libraries have already read such variables at their import.
    for name in sorted(environment.keys() | template.keys()):
        late = (name.startswith(_STALE_PREFIXES) or name == "LANG") and name not in _APPLIED_LATE
        if late and environment.get(name) != template.get(name):
            return name
    return None


def environment_of(start: StartRank) -> dict[str, str]:
    """Return a rank's environment with its package folder first in PYTHONPATH, also for child processes. Pure."""
    if not start.packages:
        return start.environment
    others = start.environment.get("PYTHONPATH")
    return {
        **start.environment,
        "PYTHONPATH": os.pathsep.join([start.packages, others] if others else [start.packages]),
    }


def settle(user: rank_user.RankUser | None, stdout: int, stderr: int, gate: int) -> None:
    """Set user, session, stdio and default signals of this new process, then wait until the shim lets it run.

    At `gate`, a pipe, one byte starts the script, and the end of file ends the process.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    priority.end_first_without_memory()
    if user is not None:
        try:
            rank_user.become(user)
        except OSError as error:
            os.write(2, f"this rank cannot run as {user.name}: {error}\n".encode())
            os._exit(_CANNOT_RUN)
    if os.read(gate, 1) != GO:
        os._exit(_CANNOT_RUN)
    for descriptor in (null, stdout, stderr, gate):
        os.close(descriptor)


def execute(start: StartRank) -> NoReturn:
    """Run the script in a new interpreter (a cold start), after `settle`."""
    try:
        os.chdir(start.working_directory)
        os.execve(sys.executable, _command(start), environment_of(start))
    except OSError as error:
        os.write(2, f"cannot run {sys.executable} in {start.working_directory}: {error}\n".encode())
    os._exit(_CANNOT_RUN)


def become(start: StartRank) -> NoReturn:
    """Run the script without an exec (a warm start), after `settle`. Always raises SystemExit, as any script."""
    os.environ.clear()
    os.environ.update(environment_of(start))
    if start.user is not None:
        rank_user.allow_looks()
    time.tzset()
    processes.set_name(f"rank {start.rank}")
    processes.set_title(_command(start))
    if (submodules := sys.modules.get("everstep.training.submodules")) is not None:
        submodules.import_on_use()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _forget_ourselves()
    reseed()
    _set_thread_count(start.environment.get("OMP_NUM_THREADS", ""))
    sys.argv = [start.script, *start.arguments]
    sys.orig_argv = _command(start)
    place = start.working_directory if start.module else os.path.dirname(start.script)
    sys.path[:0] = [place, *([start.packages] if start.packages else [])]
    try:
        os.chdir(start.working_directory)
        with open(start.script, "rb") as file:  # Also for a module, so that a missing file is the same error.
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {start.script!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        sys.exit(_CANNOT_OPEN)
    if start.module:
        _run(lambda: _run_module(start.module))
    else:
        _run(lambda: _run_script(start.script, source))
    sys.exit(0)


def _command(start: StartRank) -> list[str]:
    what = ["-m", start.module] if start.module else [start.script]
    return [sys.executable, "-u", *what, *start.arguments]


def _run_module(name: str) -> None:
    sys.modules["__main__"] = types.ModuleType("__main__")
    # `python -m` calls this function, too. It has no public equivalent that keeps the module as `__main__`.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(path: str, source: bytes) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __loader__=SourceFileLoader("__main__", path), __builtins__=__builtins__, __cached__=None
    )
    main.__spec__ = None
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run(program: Callable[[], None]) -> None:
    try:
        program()
    except Exception as error:
        # Report the exception like the interpreter, but without this module's frames in the traceback.
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


def _forget_ourselves() -> None:
    """Remove `worker` from the loaded modules, so that a script can import its own `worker.py`."""
    for name in [name for name in sys.modules if name == "worker" or name.startswith("worker.")]:
        del sys.modules[name]


def reseed() -> None:
    """Seed the global random generators anew, because all forked ranks inherit the template's state."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()


def _set_thread_count(text: str) -> None:
    """Set torch's thread count, because the template imported torch with its own OMP_NUM_THREADS."""
    torch = sys.modules.get("torch")
    if torch is not None and text.isdecimal() and int(text) > 0:
        torch.set_num_threads(int(text))
