"""Requests that wait for S3 use threads that no other work uses.

The loops, the agents' connections and sign-in use other threads, so that slow reads and uploads never delay them.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from control_plane.app import LOOP_THREADS
from tests.fakes.cloud import MemoryObjectStore
from tests.unit.control_plane.api.conftest import Service
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.api.test_sources import archive

BODY = archive(("train.py", b"print()"))


class Held:
    """A method of an object store whose call blocks until the test releases the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: MemoryObjectStore, name: str) -> None:
        self.is_asked, self.is_answered, self._real = threading.Event(), threading.Event(), getattr(store, name)
        monkeypatch.setattr(store, name, self._call)

    def _call(self, *given, **options):
        self.is_asked.set()
        assert self.is_answered.wait(20)
        return self._real(*given, **options)


def has_free_thread(service: Service) -> bool:
    """Return True if the only thread of the executor that the loops use is free within 10 s.

    Otherwise, raise TimeoutError.
    """
    return asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: True), service.loop).result(10)


@pytest.fixture
def service(service):
    with ThreadPoolExecutor(1) as only_one:
        service.loop.call_soon_threadsafe(service.loop.set_default_executor, only_one)
        yield service


@pytest.fixture
def person():
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.mark.parametrize(("name", "is_from_head"), [("list", False), ("list", True), ("get", True)])
def test_who_follows_a_log_keeps_no_thread_from_the_loops(
    service, client, fleet, source, person, monkeypatch, name, is_from_head
) -> None:
    job = Job(service, client, source)
    job.launch(1)
    job.put("logs", "gen=1/node=i-0/000000000000-1.jsonl")
    held = Held(monkeypatch, service.objects, name)
    answer = person.submit(client.follow_logs, TrainingJobName="gpt", StartFromHead=is_from_head)
    with closing(answer.result(20)["EventStream"]) as stream:
        first = person.submit(next, iter(stream))
        try:
            assert held.is_asked.wait(20)
            assert has_free_thread(service)
        finally:
            held.is_answered.set()
        assert first.result(20)["LogEvents"]


def test_who_uploads_a_source_keeps_no_thread_from_the_loops(service, client, person, monkeypatch) -> None:
    held = Held(monkeypatch, service.objects, "put_file")
    answer = person.submit(client.put_source, SourceId=hashlib.sha256(BODY).hexdigest(), Body=BODY)
    try:
        assert held.is_asked.wait(20)
        assert has_free_thread(service)
    finally:
        held.is_answered.set()
    assert answer.result(20)["FileCount"] == 1


def test_the_loops_have_as_many_threads_on_a_small_machine(tmp_path) -> None:
    everyone = threading.Barrier(LOOP_THREADS)
    with Service(tmp_path) as running:
        met = [
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(everyone.wait, 20), running.loop)
            for _ in range(LOOP_THREADS)
        ]
        assert sorted(each.result(20) for each in met) == list(range(LOOP_THREADS))
