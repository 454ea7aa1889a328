"""Creates all parts of a control-plane server and connects them.

Invariant: only this module creates database engines, cloud clients and loops. It also closes all of them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from control_plane.api.answers import Answers
from control_plane.api.archive import SourceLimits
from control_plane.api.auth import Authenticated, is_token_good
from control_plane.api.caller_threads import CallerThreads
from control_plane.api.dashboard import Dashboard
from control_plane.api.deps import Services
from control_plane.api.envelope import Envelope
from control_plane.api.forwarding import Forwarding, LastHop
from control_plane.api.held_tokens import HeldTokens
from control_plane.api.memberships import Memberships
from control_plane.api.open_answers import WhileTokenIsGood
from control_plane.api.peers import Peers
from control_plane.api.routes import attestation as attestation_routes
from control_plane.api.routes import metrics, replicas, sessions
from control_plane.api.surface import make_surface
from control_plane.api.traffic import Compression, Conditional
from control_plane.certificates import FleetAuthorities, ServerAuthority
from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import CloudMode, Connection
from control_plane.cloud.identity import Attestation, OwnAccount, RegionalSts
from control_plane.cloud.notices import EventQueue, SqsQueue
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.operator import CloudOperator
from control_plane.cloud.s3 import S3ServiceStore
from control_plane.cloud.secrets import ManagedSecrets
from control_plane.cloud.sinks import EventBusSink, EventSink
from control_plane.core.timeouts import grace_seconds, ladder
from control_plane.db import schema
from control_plane.db.leases import Leaser
from control_plane.db.session import Database
from control_plane.db.versions import Versions
from control_plane.gate import Gate
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.context import LoopContext
from control_plane.loop.event_feed import EventFeed
from control_plane.loop.exporter import EventExporter
from control_plane.loop.loop_metrics import LoopMetrics
from control_plane.loop.metric_writer import MetricWriter
from control_plane.loop.readiness import Readiness
from control_plane.loop.runner import Runner
from control_plane.replica import ServerReplica
from control_plane.secrets import (
    ADMIN_TOKEN,
    SERVER_SECRET,
    GivenSecrets,
    SecretFiles,
    Secrets,
    ensure_admin,
    server_id,
    server_secret,
)
from control_plane.settings import Settings
from control_plane.steady_clock import steady_now
from control_plane.tracing import otlp_tracer
from everstep.protocol.codec import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 32
"""Connections that the event loop accepts before it serves open ones again. uvicorn's default is 2,048."""
QUEUED_CONNECTIONS = 1024
"""Connections that the kernel holds until the server accepts them. It drops others, and their clients retry."""
LOOP_THREADS = 32
"""Threads for calls to the database and AWS, which mostly wait. Downloads and uploads have their own
(`api.caller_threads`).
"""
KEEP_ALIVE_SECONDS = 75
"""Limit of idle connections; longer than load balancers' usual 60 s, whose requests would otherwise meet a closing
server (502).
"""
STOP_SECONDS = 10.0
"""Seconds for the current pass of the loops when the server stops."""


class Loop(Protocol):
    """A background task of the server."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Then release all leases, and return."""


def create_app(
    settings: Settings,
    *,
    operator: CloudOperator | None = None,
    objects: ServiceStore | None = None,
    loops: Callable[[Services, bytes], Sequence[Loop]] | None = None,
    now: Callable[[], datetime] = steady_now,
    replica_url: str = "",
    when_ready: Callable[[], None] = lambda: None,
    when_crashed: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Create the application of one server process, which owns the database. The schema must be current.

    `operator` and `objects` replace the cloud in tests. `loops` creates the background tasks; None: the real ones.
    `replica_url` is where other servers reach this one; empty: they cannot. `when_ready` is called in a thread after
    the start, and may block. `when_crashed` is called on the event loop after a task's exception; the caller then ends
    the process.

    Raises:
        SchemaMismatch: the database has another schema than this version needs.
        EndpointRefused: the cloud mode is local, and the AWS endpoint is not on this machine.
    """
    settings.state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    spool_directory = settings.state_directory / "spool"
    spool_directory.mkdir(mode=0o700, exist_ok=True)
    queue: EventQueue | None = None
    sinks: dict[str, EventSink] = {}
    attestation: Attestation | None = None
    loop_metrics = LoopMetrics()
    stored: Secrets = SecretFiles(settings.state_directory)
    if operator is None or objects is None:
        connection = Connection(settings.cloud)
        queue = SqsQueue(connection, settings.events_queue_url) if settings.events_queue_url else None
        sinks = {arn: EventBusSink(connection, arn) for arn in settings.event_exports}
        operator = operator or AwsOperator(connection)
        loop_metrics = LoopMetrics(connection.meter.collectors)
        if settings.mode is CloudMode.AWS:
            attestation = Attestation(
                sts=RegionalSts(settings.region),
                region=settings.region,
                account=OwnAccount(lambda: connection.identify().account),
            )
        objects = objects or S3ServiceStore(connection)
        if settings.secrets_prefix:
            stored = ManagedSecrets(connection, settings.secrets_prefix)
    stored = GivenSecrets({SERVER_SECRET: settings.server_secret, ADMIN_TOKEN: settings.admin_token}, stored)
    tracer = otlp_tracer(settings.otlp_endpoint, version("everstep"))
    database = Database(settings.database)
    try:
        schema.require_current(database)
        ensure_admin(database, stored, now())
        secret = server_secret(stored)
        public_id = settings.server_id or server_id(SecretFiles(settings.state_directory))
    except BaseException:
        database.close()
        raise
    versions = Versions(database)
    registry = AgentRegistry()
    caller_threads = CallerThreads()
    services = Services(
        database=database,
        tokens=HeldTokens(database, versions, now),
        operator=operator,
        memberships=Memberships(operator, lambda: now().timestamp()),
        events=queue,
        objects=objects,
        registry=registry,
        peers=Peers(
            database, registry, hmac.digest(secret, b"control-plane servers", "sha256").hex(), ServerAuthority(secret)
        ),
        timeouts=ladder(settings.detection_seconds),
        bucket=settings.bucket,
        default_max_slowdown=settings.default_max_slowdown,
        spool_directory=spool_directory,
        source_limits=SourceLimits(archive_bytes=settings.max_source_bytes),
        session_key=hmac.digest(secret, b"browser sessions", "sha256"),
        nonce_key=hmac.digest(secret, b"nonces of agents", "sha256"),
        authorities=FleetAuthorities(secret),
        server_id=public_id,
        attestation=attestation,
        feed=EventFeed(database, now, caller_threads.finish),
        caller_threads=caller_threads,
        loop_metrics=loop_metrics,
        tracer=tracer,
        readiness=Readiness(),
        now=now,
        wake=lambda: None,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.get_running_loop()
        running.set_default_executor(ThreadPoolExecutor(LOOP_THREADS, thread_name_prefix="loop"))

        def wake() -> None:
            running.call_soon_threadsafe(registry.hint)

        app.state.services = replace(services, wake=wake)
        stop = asyncio.Event()
        with ServerReplica(settings.state_directory, replica_url) as replica:
            make_loops = loops or partial(_loops, settings, replica.owner, sinks)
            tasks = [asyncio.create_task(loop.run(stop)) for loop in make_loops(app.state.services, secret)]
            for task in tasks:
                task.add_done_callback(partial(_report_crash, when_crashed))
            try:
                await asyncio.to_thread(when_ready)
                yield
            finally:
                stop.set()
                await _finish(tasks)
                versions.close()
                services.caller_threads.close()
                for workers in (services.handshakes, services.agent_threads, services.tokens.threads):
                    workers.close()
                await services.peers.close()
                await asyncio.to_thread(services.tracer.close)
                await asyncio.to_thread(database.close)

    app = make_surface(lifespan=lifespan)
    app.state.services = services
    app.include_router(sessions.router)
    app.include_router(metrics.router)
    app.include_router(replicas.router)
    app.include_router(attestation_routes.router)
    app.router.default = Dashboard(otherwise=app.router.default)
    app.add_middleware(Forwarding)
    app.add_middleware(Authenticated)
    app.add_middleware(Compression)
    app.add_middleware(Answers, versions=versions, now=now)
    app.add_middleware(Conditional)
    app.add_middleware(WhileTokenIsGood, is_good=is_token_good)
    app.add_middleware(
        Envelope,
        max_body_bytes=settings.max_body_bytes,
        on_failure=partial(database.disk.failed, directory=settings.state_directory),
    )
    app.add_middleware(LastHop, trusted=settings.trusted_proxies)
    return app


def server_config(app: FastAPI, gate: Gate, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for `Server`. `options` are uvicorn's."""
    return uvicorn.Config(
        app,
        proxy_headers=False,  # `LastHop` reads them
        http=gate.protocol(),
        log_config=None,  # uvicorn sets up no logging of its own, so its lines have this process's format.
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # a small compressed frame can need seconds to decode
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=ACCEPTED_AT_ONCE,
        **options,
    )


class Server(uvicorn.Server):
    """uvicorn's HTTP server, which also limits TLS handshakes, and ends open event streams at shutdown.

    `gate` is the one in `config`; its limit for request headers also limits handshakes. `tls_listener` accepts TLS
    only.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        tls_listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config)
        self._gate = gate
        self._tls_listener, self._tls = tls_listener, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. uvicorn's `serve` calls this once."""
        # asyncio's default limit of TLS handshakes is 60 seconds.
        loop: Any = asyncio.get_running_loop()
        create_server = partial(loop.create_server, ssl_handshake_timeout=self._gate.header_seconds)
        if self.config.is_ssl:
            loop.create_server = create_server
        await super().startup(sockets)
        if not self.started:
            return
        if self._tls_listener is not None:
            protocol: Any = self.config.http_protocol_class
            handler = partial(
                protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            tls_server = await create_server(
                handler, sock=self._tls_listener, ssl=self._tls, backlog=self.config.backlog
            )
            self.servers.append(tls_server)
        for listener in (*(sockets or ()), *([self._tls_listener] if self._tls_listener is not None else [])):
            listener.listen(QUEUED_CONNECTIONS)  # asyncio uses its `backlog` for the kernel's queue as well

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all event streams, then stop. uvicorn's `serve` calls this once."""
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.services.feed.close()
        await super().shutdown(sockets)


def _loops(
    settings: Settings,
    owner: str,
    sinks: Mapping[str, EventSink],
    services: Services,
    secret: bytes,
) -> Sequence[Loop]:
    context = LoopContext(
        database=services.database,
        operator=services.operator,
        events=services.events,
        objects=services.objects,
        registry=services.registry,
        timeouts=services.timeouts,
        secret=secret,
        owner=owner,
        bucket=services.bucket,
        is_local=settings.mode is CloudMode.LOCAL,
        now=services.now,
        retention=settings.retention,
        loop_metrics=services.loop_metrics,
        tracer=services.tracer,
        readiness=services.readiness,
    )

    def leaser() -> Leaser:
        return Leaser(context.owner, grace_seconds(context.timeouts), context.monotonic)

    exporters = [EventExporter(services.database, name, sink, leaser(), context.now) for name, sink in sinks.items()]
    return Runner(context), MetricWriter(services.database, services.registry, services.now), *exporters


def _report_crash(when_crashed: Callable[[], None], task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a loop of the control plane has crashed, so the server ends", exc_info=error)
        when_crashed()


async def _finish(tasks: Sequence[asyncio.Task[None]]) -> None:
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        log.warning("a loop did not stop within %.0f s; its leases expire later", STOP_SECONDS)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
