"""What the template imports before it forks, so that no rank has to.

The list is what `deepspeed.initialize` and `fully_shard` import on their first use besides torch itself; with only
`import deepspeed` a forked rank still took 4.9-5.7 s to its first step, with all of these 0.5 s (measured). Source:
`reference/torch_deepspeed.md`, Processes.

Invariant: afterwards this process has one thread, no process group and no CUDA context, so that forks of it are sound.
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
"""Its `build_shm_op()` loads the operator that DeepSpeed's gloo backend wants at `init_distributed`, and compiles it where it is not built."""
_OPERATOR = "deepspeed_shm_comm"

DRIVER = Path("/dev/nvidiactl")
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class PreloadFailed(Exception):
    """The template must not be forked from; the text says why."""


def can_preload(modules: Sequence[str]) -> bool:
    """Say whether any of these modules is worth a template: without torch, ranks start fast by themselves."""
    return any(
        importlib.util.find_spec(name.partition(".")[0]) is not None
        for name in modules
        if name.partition(".")[0] not in ("everstep", "numpy")
    )


def preload(modules: Sequence[str]) -> None:
    """Import these modules, load DeepSpeed's operator if it is built, and freeze what is now on the heap.

    Called once by the template. A module that is not installed is skipped: it is no loss for a rank that does without
    it. Nothing is compiled here: that takes half a minute, and most jobs do without DeepSpeed. The first rank that uses
    the operator builds it.

    Args:
        modules: their full names, in order.

    Raises:
        PreloadFailed: a thread has been left running, or a fork could not use CUDA.
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
    if (
        "torch" in sys.modules and DRIVER.exists() and _spoils_forks()
    ):  # without a driver there is nothing to be spoiled
        raise PreloadFailed("an import has asked the CUDA driver; a fork could not use it any more")


@contextmanager
def _cuda_untouched() -> Iterator[None]:
    """Have torch ask NVML whether there is a device: `torch.utils.cpp_extension` asks as it is imported, else the driver, which no fork outlives."""
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
    """Load DeepSpeed's operator where ranks have built it, so that no later rank has to.

    Once it is loaded, or where it is not built, at no cost.

    Returns:
        Whether it was loaded now.

    Raises:
        PreloadFailed: a thread has been left running.
    """
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
    """Say whether a folder of torch's extensions has DeepSpeed's operator, whole: nobody is building it."""
    # torch puts a folder of its own between where TORCH_EXTENSIONS_DIR is not set.
    built = [*directory.glob(f"{_OPERATOR}/*.so"), *directory.glob(f"*/{_OPERATOR}/*.so")]
    return any(not path.with_name("lock").exists() for path in built)


def _check_threads() -> None:
    count = len(os.listdir("/proc/self/task"))
    if count != 1:
        raise PreloadFailed(
            f"{count} threads run after the imports; a fork would lose all but one in the middle of what they do"
        )


@contextmanager
def _one_builder(directory: Path, look_seconds: float = 0.5) -> Iterator[None]:
    """Hold the directory's builder lock, and remove what builders that were killed have left, for as long as the block lasts.

    torch itself guards a build with a file that stays for ever when its builder is killed, and everybody then waits for
    ever. Templates take turns by our lock, which the kernel drops when its holder dies; but whoever else uses torch may
    be killed while we wait for him.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_over = threading.Event()
    with (directory / "everstep.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watch = threading.Thread(target=_remove_leftovers, args=(directory, is_over, look_seconds), name="leftovers")
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()


def _remove_leftovers(directory: Path, is_over: threading.Event, look_seconds: float) -> None:
    """Remove torch's build locks that nobody holds open.

    Two looks have to say so: a builder that is done closes its lock, then removes it.
    """
    before: set[tuple[Path, int]] = set()
    while not is_over.wait(look_seconds):
        # torch puts a folder of its own between where TORCH_EXTENSIONS_DIR is not set.
        found = {*directory.glob("*/lock"), *directory.glob("*/*/lock")}
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
    """Return the files that processes of this user hold open."""
    found: set[Path] = set()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            found.update(Path(os.readlink(descriptor)) for descriptor in descriptors.iterdir())
        except OSError:
            continue  # it has ended, or is somebody else's
    return found
