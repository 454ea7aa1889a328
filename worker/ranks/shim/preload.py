"""Performs the imports of the template process, from which warm ranks are forked.

Invariant: after `preload` this process has one thread, no process group of torch.distributed and no CUDA context, so it
can fork safely.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# `deepspeed.initialize` and `fully_shard` import some of these on first use. With only `import deepspeed`, a forked
# rank needed 4.9 to 5.7 s to its first step, with all of them 0.5 s.
DEFAULT_MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "everstep.training",
)
_OPERATOR_MODULE = "deepspeed.comm.torch"
"""Module whose `build_shm_op()` loads, or compiles, the operator of DeepSpeed's gloo backend for `init_distributed`."""
_OPERATOR = "deepspeed_shm_comm"

DRIVER = Path("/dev/nvidiactl")
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class PreloadFailed(Exception):
    """Raised if the template cannot be forked safely. The text contains the reason."""


def can_preload(modules: Sequence[str]) -> bool:
    """Return whether any of the modules except everstep and numpy, which import fast, is installed."""
    return any(
        importlib.util.find_spec(name.partition(".")[0]) is not None
        for name in modules
        if name.partition(".")[0] not in ("everstep", "numpy")
    )


def preload(modules: Sequence[str]) -> None:
    """Import the installed ones of the modules, load DeepSpeed's C++ extension if it is compiled, and freeze the heap.

    Raises PreloadFailed if an import has left a thread running or has used the CUDA driver, so that forks are unsafe.
    """
    with _cuda_untouched():
        for name in modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                    raise
    if "deepspeed" in modules:
        load_operator()
    gc.collect()
    gc.freeze()
    _check_threads()
    if "torch" in sys.modules and DRIVER.exists() and _spoils_forks():
        raise PreloadFailed("an import has used the CUDA driver, so forked ranks could not use it")


@contextmanager
def _cuda_untouched() -> Iterator[None]:
    """Make torch query NVML instead of the CUDA driver, because a process that has used the driver cannot be forked."""
    # `torch.utils.cpp_extension` queries the number of devices at import.
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ASK_NVML]
        else:
            os.environ[_ASK_NVML] = before


def _spoils_forks() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] != 0


def load_operator() -> bool:
    """Load DeepSpeed's C++ extension if it is built; return whether. Raises PreloadFailed if a thread is left."""
    if _OPERATOR in sys.modules or "deepspeed" not in sys.modules:
        return False
    directory = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    if not is_built(directory):
        return False
    with _one_builder(directory):
        importlib.import_module(_OPERATOR_MODULE).build_shm_op()
    _check_threads()
    sys.modules.setdefault(_OPERATOR, types.ModuleType(_OPERATOR))
    return True


def is_built(directory: Path) -> bool:
    """Return whether a folder of torch extensions contains DeepSpeed's C++ extension, completely built."""
    # Without TORCH_EXTENSIONS_DIR, torch builds extensions one folder level deeper. Search both levels.
    built = [*directory.glob(f"{_OPERATOR}/*.so"), *directory.glob(f"*/{_OPERATOR}/*.so")]
    return any(not path.with_name("lock").exists() for path in built)


def _check_threads() -> None:
    others = [path for path in Path("/proc/self/task").iterdir() if int(path.name) != os.getpid()]
    if others:
        # An import leaves such a thread running, so it does not end between the two reads.
        names = ", ".join(sorted((path / "comm").read_text().strip() for path in others))
        raise PreloadFailed(
            f"{1 + len(others)} threads run after the imports, besides the main thread: {names}; a fork would end them "
            "in the middle of their work"
        )


@contextmanager
def _one_builder(directory: Path, look_seconds: float = 0.5) -> Iterator[None]:
    """Hold a lock on the folder of compiled extensions, which, unlike torch's `lock` file, ends with its process."""
    directory.mkdir(parents=True, exist_ok=True)
    is_over = threading.Event()
    with (directory / "everstep.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # torch would wait for ever for the removal of a killed process's `lock` file.
        watch = threading.Thread(target=_remove_leftovers, args=(directory, is_over, look_seconds), name="leftovers")
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()
            # The kernel ends the thread a moment after join() returns, and a fork needs a single thread.
            while os.path.exists(f"/proc/self/task/{watch.native_id}"):
                os.sched_yield()


def _remove_leftovers(directory: Path, is_over: threading.Event, look_seconds: float) -> None:
    before: set[tuple[Path, int]] = set()
    while not is_over.wait(look_seconds):
        # Lock files are one folder deeper if TORCH_EXTENSIONS_DIR is not set.
        found = {*directory.glob("*/lock"), *directory.glob("*/*/lock")}
        # Remove a file only after two checks: a finishing builder closes its lock before it removes the file.
        leftovers = {(path, _inode(path)) for path in found - _open_files()} if found else set()
        for path, _ in leftovers & before:
            path.unlink(missing_ok=True)
        before = leftovers - before


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _open_files() -> set[Path]:
    found: set[Path] = set()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            found.update(Path(os.readlink(descriptor)) for descriptor in descriptors.iterdir())
        except OSError:
            continue  # The process has ended, or belongs to another user.
    return found
