"""Fixtures: a control plane without loops, over the fake cloud and a database in a temporary directory."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import everstep
from control_plane.api import archive, envelope
from control_plane.api.routes import sources
from control_plane.app import Server, create_app, server_config
from control_plane.certificates import ServerCertificate
from control_plane.cloud.connection import CloudMode
from control_plane.db import tokens
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.gate import Gate
from control_plane.settings import Settings
from control_plane.steady_clock import steady_now
from everstep import failures
from everstep.errors import ServiceFailed
from tests.fakes.cloud import FakeOperator, MemoryObjectStore
from tests.sqlite import make_migrated

BUCKET = "everstep"
USERS_BUCKET = "mine"
GROUP = "training-group"
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class PromptServer(Server):
    """The product's server without uvicorn's pauses, which would add 0.15 s to each test.

    uvicorn checks every 0.1 s whether it must stop, and then waits 0.1 s for its connections.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, *tls: Any) -> None:
        super().__init__(config, gate, *tls)
        self._must_stop = asyncio.Event()

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Request the stop of the server, which runs on this loop in another thread."""
        with suppress(RuntimeError):  # The server has already stopped, and its loop is closed.
            loop.call_soon_threadsafe(self._must_stop.set)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._must_stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # uvicorn prescribes the signature
        self.config.app.state.services.feed.close()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks)
            await asyncio.sleep(0)
        await self.lifespan.shutdown()


class Service:
    """The control plane's application, served on loopback by a thread of this process."""

    def __init__(
        self,
        directory: Path,
        database_url: str = "",
        *,
        objects: MemoryObjectStore | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.clock = Clock()
        self.operator = FakeOperator()
        self.objects = objects or MemoryObjectStore(BUCKET, USERS_BUCKET)
        self.objects.now = self.clock
        self.settings = Settings(
            state_directory=directory / "server",
            database_url=database_url,
            bucket=BUCKET,
            mode=CloudMode.LOCAL,
            aws_endpoint_url="http://127.0.0.1:1",
            max_source_bytes=2**20,
        )
        self.settings.state_directory.mkdir(exist_ok=True)
        if not database_url:
            make_migrated(self.settings.state_directory / "everstep.db")
        self.database = Database(self.settings.database)
        self._is_ready = threading.Event()
        self.gate = gate or Gate()
        self.app = create_app(
            self.settings,
            operator=self.operator,
            objects=self.objects,
            loops=self._no_loops,
            now=self.clock,
            when_ready=self._is_ready.set,
        )
        self.admin_token = (self.settings.state_directory / "admin_token").read_text().strip()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._tls_listener = socket.create_server(("127.0.0.1", 0))
        self.tls_address = f"127.0.0.1:{self._tls_listener.getsockname()[1]}"
        self.certificate = ServerCertificate(self.services.peers.authority, "127.0.0.1", steady_now)
        tls = self._tls_listener, self.certificate.context
        self._server = PromptServer(server_config(self.app, self.gate), self.gate, *tls)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def _no_loops(self, *_: object) -> tuple[()]:
        self.loop = asyncio.get_running_loop()
        return ()

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._is_ready.wait(10)
        return self

    def stop(self) -> None:
        """Ask the server to stop. The method does not wait."""
        self._server.stop(self.loop)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(20)
        self._listener.close()
        self._tls_listener.close()
        self.database.close()
        assert not self._thread.is_alive()

    @property
    def services(self):
        return self.app.state.services

    def token(self, role: Role, project: str = "") -> str:
        with self.database.write() as session:
            return tokens.mint(session, NewToken(kind=TokenKind.USER, role=role, project=project), self.clock())[0]

    def client(self, token: str | None = None, **options):
        return everstep.client(f"http://{self.address}", token or self.admin_token, **options)


@contextmanager
def refused(code: str, match: str | None = None):
    """Check that the service or the client refuses the calls of the block with this error code.

    Yield the caught error.
    """
    with pytest.raises(ServiceFailed, match=match) as caught, failures.translated():
        yield caught
    assert caught.value.code == code


@contextmanager
def impatient(service: Service, seconds: float) -> Iterator[None]:
    """Set how many seconds the running service waits for a client that sends nothing.

    The next request builds the middleware again, with this time limit.
    """
    (options,) = (layer.kwargs for layer in service.app.user_middleware if layer.cls is envelope.Envelope)
    options["silent_seconds"] = seconds
    service.app.middleware_stack = None
    try:
        yield
    finally:
        del options["silent_seconds"]
        service.app.middleware_stack = None


def without_metadata(answer: dict) -> dict:
    """Return the response without botocore's metadata."""
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}


def all_pages(client, operation: str, **query):
    """Return the items of all pages of a list operation."""
    paginator = client.get_paginator(operation)
    page_size = {"PageSize": query.pop("MaxResults")} if "MaxResults" in query else {}
    return list(
        paginator.paginate(**query, PaginationConfig=page_size).search(f"{paginator.result_keys[0].expression}[]")
    )


@pytest.fixture
def service(tmp_path: Path, database_url: str) -> Iterator[Service]:
    with Service(tmp_path, database_url) as running:
        running.operator.create_group(GROUP, max_size=8)
        yield running


@pytest.fixture
def client(service: Service):
    with closing(service.client()) as connected:
        yield connected


@pytest.fixture
def fleet(client) -> str:
    return client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=4, SpareCount=1)["FleetName"]


@pytest.fixture
def source(client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Upload a source. The server inspects it in this process, because a process per test takes longer than a test."""
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "train.py").write_text("print('hello')\n")
    (directory / "data.txt").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "inspect_apart", archive.inspect)
        return client.upload_source(Directory=directory)


@pytest.fixture
def token(client, fleet, service):
    service.operator.set_desired(GROUP, 2)
    return client.create_join_token(FleetName="main")["JoinToken"]


@pytest.fixture
def node(service, token):
    return service.operator.describe_group(GROUP).members[0].instance_id


@pytest.fixture
def make(service, client, fleet, source):
    from tests.unit.control_plane.api.test_results import Job  # which imports this module

    def make(**config: int) -> Job:
        """Create a running job. Its trash is off unless `config` has TrashHours."""
        config = {"TrashHours": 0, **config}
        create = client.create_training_job
        client.create_training_job = lambda **request: create(CheckpointConfig=config, **request)
        job = Job(service, client, source)
        client.create_training_job = create
        job.launch(1)
        job.run_ranks()
        return job

    return make
