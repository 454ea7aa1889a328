"""If a rank ends because its script reached the limit of processes and threads, the agent names this limit as cause."""

from __future__ import annotations

import pytest

from worker.core.task_limit import refused_task

FORK = """Traceback (most recent call last):
  File "train.py", line 5, in <module>
    os.fork()
BlockingIOError: [Errno 11] Resource temporarily unavailable
"""


@pytest.mark.parametrize(
    "text",
    [
        FORK,
        FORK.replace("os.fork()", "self.pid = _fork_exec("),
        FORK.replace("os.fork()", "subprocess.Popen(words)"),
        "RuntimeError: can't start new thread\n",
        "bash: fork: retry: Resource temporarily unavailable\n",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 8: Resource temporarily unavailable\n",
    ],
)
def test_a_refused_process_or_thread_is_named_with_the_limit(text: str) -> None:
    words = refused_task(f"step 3\n{text}")
    assert "at most 16,384 of them on a node" in words
    assert refused_task(words) == "", "the sentence is no evidence for itself"


@pytest.mark.parametrize(
    "text",
    ["", "MemoryError", "BlockingIOError: [Errno 11] Resource temporarily unavailable", "recv: Connection reset"],
)
def test_other_ends_are_not(text: str) -> None:
    assert refused_task(text) == ""
