"""Tests that the end of a process waits for threads that have the name of torch's Gloo threads."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep.training import gloo_threads
from everstep.training.gloo_threads import GLOO_THREAD, settle_gloo_threads

PR_SET_NAME = 15
"""Option of the system call prctl that renames the calling thread."""
STRETCH_ROUNDS = 3_000_000
"""Rounds of a hash that keeps a core busy for about a second without the interpreter's lock."""


@contextmanager
def gloo_thread(work: Callable[[], object]) -> Iterator[None]:
    has_begun = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, GLOO_THREAD.encode())
        has_begun.set()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        thread.join()


def test_a_running_thread_is_awaited_until_it_has_had_the_interpreters_lock() -> None:
    released: list[bool] = []

    def release() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", STRETCH_ROUNDS)
        released.append(True)

    with gloo_thread(release):
        assert settle_gloo_threads(limit_seconds=50)  # more than the thread needs on a busy machine
        assert released


def test_a_thread_that_waits_for_other_ranks_is_not_awaited() -> None:
    other_rank = threading.Event()
    with gloo_thread(other_rank.wait):
        try:
            assert settle_gloo_threads()
        finally:
            other_rank.set()


def test_a_thread_that_never_stops_is_awaited_up_to_the_limit() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    with gloo_thread(work):
        try:
            assert not settle_gloo_threads(limit_seconds=0)
        finally:
            is_over.set()


def test_a_process_waits_once_and_last() -> None:
    script = f"""
import atexit, importlib.util
spec = importlib.util.spec_from_file_location("gloo_threads", {gloo_threads.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.settle_gloo_threads = lambda: print("settled", flush=True)
module.settle_gloo_threads_at_exit()
module.settle_gloo_threads_at_exit()
atexit.register(lambda: print("closed", flush=True))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["closed", "settled"]
