"""Starts the real application on loopback, over recorded or simulated data.

The dashboard's tests, pictures and benchmarks use these servers. `python -m tests.dashboard` starts one for people.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from control_plane.api.deps import Services
from control_plane.api.peers import Peers
from control_plane.app import Server, create_app, server_config
from control_plane.cloud.connection import CloudMode
from control_plane.db import tokens
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.gate import Gate
from control_plane.loop.agents import AgentRegistry
from control_plane.settings import Settings
from tests.dashboard.replay import Replay
from tests.dashboard.seeded import Story
from tests.fakes.cloud import FakeOperator, MemoryObjectStore
from tests.ports import ReservedPort
from tests.sim.world import BUCKET, InTurn, World

T = TypeVar("T")


class Past(Protocol):
    """The data behind a test server: database, objects, cloud and connected agents.

    Its clock `now` stands still. A simulation advances the clock of its `World`; the clock of a `Replay` never moves.
    """

    now: datetime
    operator: FakeOperator
    objects: MemoryObjectStore
    database: Database
    registry: AgentRegistry

    def close(self) -> None:
        """Close the database."""


class Served:
    """A server over the state of a `Past`.

    Args:
        directory: folder for the server's state.
        past: state behind the server, which closes it.
        port: port to listen on. 0: the kernel chooses.
    """

    def __init__(self, directory: Path, past: Past, port: int = 0) -> None:
        self._past = past
        self._state = directory / "server"
        self._port = ReservedPort(port)  # This socket reserves the port while the server is stopped.

    def serve(self) -> None:
        """Start the server on its port. Also restarts a stopped server."""
        settings = Settings(
            state_directory=self._state,
            bucket=BUCKET,
            mode=CloudMode.LOCAL,
            aws_endpoint_url="http://127.0.0.1:1",
            database_url=str(self._past.database.url),
        )
        is_ready = threading.Event()
        app = create_app(
            settings,
            operator=self._past.operator,
            objects=self._past.objects,
            loops=lambda *_: (),
            now=lambda: self._past.now,
            when_ready=is_ready.set,
        )
        self._listener = socket.create_server(("127.0.0.1", self._port.number))
        self.url = f"http://127.0.0.1:{self._port.number}"
        gate = Gate()
        self._server = Server(server_config(app, gate), gate)
        self._serving = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, name="server")
        self._serving.start()
        assert is_ready.wait(10)
        self.admin_token = (self._state / "admin_token").read_text().strip()
        services: Services = app.state.services
        # The application created its own registry of connected agents. The registry of the simulated agents replaces
        # it.
        registry = self._past.registry
        peers = Peers(services.database, registry, services.peers.key)
        app.state.services = replace(services, registry=registry, peers=peers)

    def fall_silent(self) -> None:
        """Stop the server, as in an outage. The server keeps its data, and `serve` starts it again."""
        self._server.should_exit = True
        self._serving.join(20)
        self._listener.close()
        assert not self._serving.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.fall_silent()
        self._port.close()
        self._past.close()

    def token(self, role: Role) -> str:
        """Create a user token with the role."""
        with self._past.database.write() as session:
            return tokens.mint(session, NewToken(kind=TokenKind.USER, role=role, project=""), self._past.now)[0]


class Living(Served):
    """A server over a simulated fleet. A separate thread runs the coroutines that advance the fleet.

    Args:
        directory: folder for the server's state.
        world: the simulated fleet.
        port: port to listen on. 0: the kernel chooses.
    """

    def __init__(self, directory: Path, world: World, port: int = 0) -> None:
        super().__init__(directory, world, port)
        self._loop = asyncio.new_event_loop()
        # The simulation waits for every call that it passes to a thread. `InTurn` therefore runs the calls inline, as
        # this is faster.
        self._loop.set_default_executor(InTurn())
        # a daemon thread, so that a failed simulation does not keep the process alive
        self._thread = threading.Thread(target=self._loop.run_forever, name="world", daemon=True)
        self._thread.start()
        self.world = world

    def __exit__(self, *_: object) -> None:
        self.fall_silent()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        self._port.close()
        self.world.close()
        assert not self._thread.is_alive()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the fleet's thread and return its result."""
        return self.begin(what).result()

    def begin(self, what: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the fleet's thread."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)


class Seeded(Living):
    """A server over the simulated fleet of a `Story`, a sequence of incidents that have all occurred.

    Args:
        directory: folder for the database and the server's state. It is created if it does not exist.
        seed: seed of the random choices in the story.
        port: port to listen on. 0: the kernel chooses.
    """

    def __init__(self, directory: Path, seed: int = 7, port: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.story = Story(directory, seed)
        super().__init__(directory, self.story.world, port)
        self.run(self.story.tell())
        self.story.print_all()
        self.serve()


class Replayed(Served):
    """A server over the recorded incidents.

    Args:
        directory: folder for the database and the server's state. It is created if it does not exist.
        seed: determines names, times and numbers.
        port: port to listen on. 0: the kernel chooses.
    """

    def __init__(self, directory: Path, seed: int, port: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        replay = Replay(directory, seed)
        super().__init__(directory, replay, port)
        self.seed = seed
        self.jobs = replay.jobs
        """Name of the job in each recorded incident, by the incident's name."""
        self.serve()
