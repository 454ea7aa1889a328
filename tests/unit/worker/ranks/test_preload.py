from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from worker.ranks.shim.preload import _one_builder, _spoils_forks

LOOK_SECONDS = 0.01


def wait_until_gone(lock: Path) -> None:
    """Poll until a lock file disappears, as torch's own builders do. No event announces the end of a build."""
    deadline = threading.Event()
    for _ in range(3000):
        if not lock.exists():
            return
        deadline.wait(LOOK_SECONDS)
    raise AssertionError(f"{lock} is still there")


@pytest.mark.parametrize("name", ["operator/lock", "py311_cpu/operator/lock"])
def test_what_a_killed_builder_has_left_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    lock = tmp_path / name
    lock.parent.mkdir(parents=True)
    lock.touch()
    with _one_builder(tmp_path, LOOK_SECONDS):
        wait_until_gone(lock)


def test_a_builder_that_is_killed_while_others_wait_for_it_keeps_nobody_waiting(tmp_path: Path) -> None:
    lock = tmp_path / "operator" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as held, _one_builder(tmp_path, LOOK_SECONDS):
        for _ in range(20):
            threading.Event().wait(LOOK_SECONDS)
            assert lock.exists(), "somebody builds"
        held.close()
        wait_until_gone(lock)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with _one_builder(tmp_path, LOOK_SECONDS):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_whether_forks_could_use_cuda_is_asked_of_one(is_spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim checks in a forked process whether ranks can use CUDA, because torch detects this only after a fork."""
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: is_spoilt and os.getpid() != parent)
    assert _spoils_forks() is is_spoilt


def test_imports_ask_nvml_whether_there_is_a_device_and_ranks_do_not_hear_of_it(tmp_path: Path) -> None:
    """While the shim imports modules ahead, a variable makes torch ask NVML for devices, not the CUDA driver.

    A query of the CUDA driver would make CUDA unusable in every forked rank. The ranks do not inherit the variable.
    """
    (tmp_path / "noting.py").write_text("import os\nprint(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])\n")
    code = (
        "import os\nfrom worker.ranks.shim.preload import "
        "preload\npreload(['noting'])\nprint('PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Frameworks set it in the tests' own process.
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


FAKE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from worker.ranks.shim import preload
preload.preload(["deepspeed"])
print(os.path.exists(sys.argv[1] + "/calls"))
operator = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm")
os.makedirs(operator)
for name in ("lock", "deepspeed_shm_comm.so"):
    open(os.path.join(operator, name), "w").close()
print(preload.load_operator())
os.unlink(os.path.join(operator, "lock"))
print(preload.load_operator(), preload.load_operator())
print(open(sys.argv[1] + "/calls").read())
"""


def test_no_operator_is_compiled_ahead_and_one_that_ranks_have_built_is_loaded_once(tmp_path: Path) -> None:
    """The shim compiles no operator of DeepSpeed ahead, because most jobs do not use DeepSpeed.

    After a rank has built an operator, the shim loads it, and never loads it a second time. It does not load an
    operator that a process is still building.
    """
    package = tmp_path / "deepspeed" / "comm"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "torch.py").write_text(
        f"def build_shm_op():\n    open({str(tmp_path / 'calls')!r}, 'a').write('built')\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = subprocess.run(
        [sys.executable, "-c", FAKE, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True", "False", "built"]


MANY = """
import os, sys
from pathlib import Path
from worker.ranks.shim import preload
counts = set()
for _ in range(2000):
    with preload._one_builder(Path(sys.argv[1])):
        pass
    counts.add(len(os.listdir("/proc/self/task")))
print(counts)
"""


def test_the_thread_that_watches_a_build_has_ended_when_the_build_has(tmp_path: Path) -> None:
    """The thread that watches a build has ended before the shim forks ranks.

    At a fork, the kernel must count the process as single-threaded. `Thread.join` may return before the kernel does so.
    """
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{1}"


LEAVES_A_THREAD = """
import ctypes, threading
has_begun = threading.Event()

def run():
    ctypes.CDLL(None).prctl(15, b"cuda000018")  # PR_SET_NAME
    has_begun.set()
    threading.Event().wait()

threading.Thread(target=run, daemon=True).start()
has_begun.wait()
"""
PRELOADS = """
import sys
from worker.ranks.shim import preload
sys.path.insert(0, sys.argv[1])
try:
    preload.preload(("leaves_a_thread",))
except preload.PreloadFailed as error:
    print(error)
"""


def test_an_import_that_leaves_a_thread_is_refused_with_the_threads_name(tmp_path: Path) -> None:
    (tmp_path / "leaves_a_thread.py").write_text(LEAVES_A_THREAD)
    done = subprocess.run([sys.executable, "-c", PRELOADS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 threads run after the imports, besides the main thread: cuda000018; a fork")
