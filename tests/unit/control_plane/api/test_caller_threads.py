"""Requests that wait for S3 use threads that no other work uses.

The loops, the agents' connections and sign-in use other threads, so that slow reads and uploads never delay them.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import select
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from control_plane import api
from control_plane.api import auth
from control_plane.api.auth import MAX_HELD_BODY_BYTES
from control_plane.api.caller_threads import CALLER, CALLER_THREADS, CallerThreads, EventAllowance
from control_plane.api.deps import Services
from control_plane.api.errors import Throttled
from control_plane.app import LOOP_THREADS
from control_plane.db.tokens import Role, TokenRecord
from control_plane.loop import event_feed
from everstep.protocol.pace import LONGEST_SECONDS, Pace
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


class Blocked:
    """Calls of several callers that run in a thread until `go` is set."""

    def __init__(self, threads: CallerThreads) -> None:
        self.threads, self.go, self.running = threads, threading.Event(), Counter[str]()
        self.has_begun = threading.Semaphore(0)

    def work(self, name: str) -> str:
        self.running[name] += 1
        self.has_begun.release()
        assert self.go.wait(20)
        return name

    def begin(self, project: str, token: str) -> asyncio.Task[str]:
        context = contextvars.copy_context()
        context.run(CALLER.set, (project, token))
        return asyncio.create_task(self.threads.run(self.work, token), context=context)

    async def has(self, count: int) -> None:
        """Wait until `count` further calls run."""
        for _ in range(count):
            assert await asyncio.to_thread(self.has_begun.acquire, timeout=20)


def test_calls_of_a_token_and_of_a_project_leave_threads_to_the_others() -> None:
    async def play() -> None:
        blocked = Blocked(CallerThreads(threads=4, per_project=3, per_token=2, most_waiting=4))
        greedy = [blocked.begin("a", "a1") for _ in range(6)]
        await blocked.has(2)
        with pytest.raises(Throttled):
            await blocked.begin("a", "a1")
        sibling = [blocked.begin("a", "a2") for _ in range(2)]
        await blocked.has(1)
        other = blocked.begin("b", "b1")
        await blocked.has(1)
        assert blocked.running == {"a1": 2, "a2": 1, "b1": 1}
        greedy[0].cancel()  # its thread still runs, so it keeps its turn
        greedy[5].cancel()
        assert await asyncio.wait_for(asyncio.to_thread(blocked.has_begun.acquire, timeout=0), 20) is False
        blocked.go.set()
        done = await asyncio.gather(*greedy, *sibling, other, return_exceptions=True)
        assert Counter(each for each in done if isinstance(each, str)) == {"a1": 4, "a2": 2, "b1": 1}
        assert blocked.running == {"a1": 5, "a2": 2, "b1": 1}
        assert await blocked.begin("a", "a1") == "a1"
        blocked.threads.close()

    asyncio.run(play())


def test_slow_reads_of_one_caller_hold_up_no_other_project(service, client, fleet, source, monkeypatch) -> None:
    Job(service, client, source)
    held = Held(monkeypatch, service.objects, "list")
    with ThreadPoolExecutor(CALLER_THREADS + 4) as people, ExitStack() as clients:
        viewer = service.token(Role.VIEWER, "default")
        mine = [clients.enter_context(closing(service.client(viewer))) for _ in range(CALLER_THREADS + 4)]
        answers = [people.submit(each.list_outputs, TrainingJobName="gpt") for each in mine]
        try:
            assert held.is_asked.wait(20)
            with closing(service.client(service.token(Role.VIEWER, "another"))) as other:
                assert other.list_training_jobs()["TrainingJobSummaries"] == []
        finally:
            held.is_answered.set()
        assert all(answer.result(60)["Outputs"] == [] for answer in answers)


def test_requests_without_a_token_wait_instead_of_being_refused() -> None:
    """After a restart, a thousand agents may prove their instances at once."""

    async def play() -> None:
        blocked = Blocked(CallerThreads(threads=4, per_project=3, per_token=2, most_waiting=1))
        joins = [blocked.begin("", "") for _ in range(9)]
        await blocked.has(2)
        blocked.go.set()
        assert await asyncio.gather(*joins) == [""] * 9
        blocked.threads.close()

    asyncio.run(play())


async def test_the_outcome_of_an_admitted_call_is_never_refused() -> None:
    threads = CallerThreads(threads=2, per_project=2, per_token=1, most_waiting=1)
    CALLER.set(("one", "token"))
    go = threading.Event()
    calls = [asyncio.create_task(threads.run(go.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Throttled):
        await threads.run(go.wait)
    outcome = asyncio.create_task(threads.finish(lambda: "stored"))
    await asyncio.sleep(0)
    go.set()
    assert await outcome == "stored"
    assert await asyncio.gather(*calls) == [True, True]
    threads.close()


async def test_who_pays_too_much_waits_for_the_excess() -> None:
    clock, waits = [100.0], []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds

    pace = Pace(4.0, lambda: clock[0], wait)
    for _ in range(4):
        await pace.pay(1.0)
    assert waits == []
    await pace.pay(0.5)
    await pace.pay(2.0)
    assert waits == [0.5, 2.0]
    clock[0] += 1000.0
    await pace.pay(5.0)
    assert waits[2:] == [1.0], "a long pause earns one burst"


async def test_work_that_callers_leave_unpaid_makes_later_callers_wait_for_a_limited_time() -> None:
    waits = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    pace = Pace(4.0, lambda: 100.0, wait)
    for _ in range(1000):
        await pace.pay(1.0)
    assert max(waits) == LONGEST_SECONDS


async def test_a_waiter_that_is_cancelled_twice_over_leaves_no_error() -> None:
    """`leave` takes a cancelled turn out of the queue before its waiter has seen the cancellation."""
    threads = CallerThreads(threads=2, per_project=2, per_token=1)
    CALLER.set(("one", "token"))
    go = threading.Event()
    running = asyncio.create_task(threads.run(go.wait))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(threads.run(go.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    go.set()
    await running
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1] is True
    threads.close()


def test_strangers_of_one_address_keep_no_other_address_from_signing_in(service, monkeypatch) -> None:
    find, is_asked, go = auth.find_token, threading.Event(), threading.Event()

    def find_slowly(services: Services, text: str) -> TokenRecord | None:
        if text == "slow":
            is_asked.set()
            go.wait(60)
        return find(services, text)

    monkeypatch.setattr(auth, "find_token", find_slowly)

    def sign_in(token: str, source: str) -> int:
        transport = httpx.HTTPTransport(local_address=source)
        with httpx.Client(transport=transport, timeout=30, trust_env=False) as http:
            origin = f"http://{service.address}"
            return http.post(f"{origin}/v1/session", json={"Token": token}, headers={"origin": origin}).status_code

    with ThreadPoolExecutor(8) as people:
        answers = [people.submit(sign_in, "slow", "127.0.0.2") for _ in range(6)]
        try:
            assert is_asked.wait(20)
            assert sign_in(service.admin_token, "127.0.0.3") == 200
        finally:
            go.set()
        assert {answer.result(60) for answer in answers} == {401}


def test_events_of_a_token_grow_back_with_time_and_are_counted_per_token() -> None:
    now = [0.0]
    calls = EventAllowance(3, 0.5, lambda: now[0])
    for _ in range(3):
        assert calls.is_left("a")
        calls.spend("a")
    assert not calls.is_left("a")
    assert calls.is_left("b")
    now[0] = 1.9
    assert not calls.is_left("a")
    now[0] = 2.0
    assert calls.is_left("a")
    now[0] = 1_000.0
    for _ in range(3):
        assert calls.is_left("a")
        calls.spend("a")
    assert not calls.is_left("a")


@pytest.mark.security
def test_request_bodies_of_one_token_are_limited_together(service) -> None:
    """A caller that sends its bodies slowly keeps few of them on the server, and none of another token's."""
    body = (
        b"POST /v1/training-jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n"
    )
    viewer, other = service.token(Role.VIEWER), service.token(Role.VIEWER)
    with ExitStack() as stack:

        def begun(token: str) -> socket.socket:
            host, port = service.address.split(":")
            opened = stack.enter_context(socket.create_connection((host, int(port)), 30))
            opened.sendall(body + f"Authorization: Bearer {token}\r\n\r\n".encode() + b" " * 999_999)
            return opened

        several = [begun(viewer) for _ in range(MAX_HELD_BODY_BYTES // 1_000_000 + 1)]
        refused, _, _ = select.select(several, [], [], 30)
        assert [each.recv(12) for each in refused] == [b"HTTP/1.1 429"]
        another = begun(other)
        another.sendall(b" ")
        assert another.recv(12) == b"HTTP/1.1 403"


@pytest.mark.security
def test_no_call_of_the_api_uses_a_thread_of_the_loops() -> None:
    """A caller, a stranger or an agent with many calls would otherwise delay the jobs of all."""
    folder, shared = Path(api.__file__).parent, Path(event_feed.__file__)
    found = [
        f"{path.name}: {line.strip()}"
        for path in (*sorted(folder.rglob("*.py")), shared)
        for line in path.read_text().splitlines()
        if "to_thread(" in line or "run_in_executor(None" in line
    ]
    (poll,) = found  # one task for all streams
    assert poll.startswith(f"{shared.name}: good, found, newest = await asyncio.to_thread(self._look")
