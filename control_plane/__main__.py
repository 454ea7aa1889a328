"""Entry point of a control-plane server, which `everstep server` starts: `python -P -m control_plane`."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

from sqlalchemy.exc import ArgumentError, OperationalError

from control_plane import options
from control_plane.app import Server, create_app, server_config
from control_plane.certificates import ServerCertificate
from control_plane.cloud.connection import Connection
from control_plane.cloud.errors import CloudError, NoCredentials
from control_plane.core.timeouts import explained, ladder, rungs
from control_plane.db import schema
from control_plane.db.errors import SchemaMismatch
from control_plane.db.retention import RowRetention
from control_plane.db.session import Database
from control_plane.errors import InvalidTimeouts
from control_plane.gate import MAX_STRANGERS, Gate, raise_open_files
from control_plane.secrets import ADMIN_TOKEN, SecretFiles, server_id, write_private
from control_plane.settings import InvalidSettings, Settings
from control_plane.steady_clock import steady_now
from control_plane.tracing import TracingUnavailable
from everstep.host.local_keys import UnusableKeys
from everstep.host.log_records import LOG_FORMATS, JsonFormatter, LogFormat, RateLimit, TextFormatter
from everstep.host.service_manager import ServiceManager

log = logging.getLogger("control_plane")

EXIT_REFUSED = 2
"""Invalid settings or a wrong schema. The log says what to change."""
EXIT_FAILED = 1
WILDCARDS = ("0.0.0.0", "::")
"""Clients cannot use these listening addresses."""
GRACE_SECONDS = 5
"""Seconds for open requests after SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Options that are not part of `Settings`."""

    is_migrating: bool
    ready_file: Path | None
    is_asked_for_timeouts: bool
    log_format: LogFormat


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT. Return 0 after a graceful stop, 2 for a user's mistake, 1 otherwise.

    `arguments` lack the program's name. None: `sys.argv`.
    """
    faulthandler.enable()  # Prints the stacks when systemd's watchdog aborts this process.
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(RateLimit("control_plane.api", "control_plane.gate", "uvicorn", "websockets", "asyncio"))
    for chatty in ("botocore", "alembic", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings, start = _parse(arguments)
        if start.log_format == "json":
            for handler in logging.getLogger().handlers:
                handler.setFormatter(JsonFormatter())
        if start.is_asked_for_timeouts:
            sys.stdout.write("\n".join(explained(ladder(settings.detection_seconds))) + "\n")
            return 0
        os.umask(0o077)
        settings.state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _announce(settings)
        if start.is_migrating:
            _migrate(settings)
        return _serve(settings, start.ready_file)
    except (
        InvalidSettings,
        InvalidTimeouts,
        SchemaMismatch,
        CloudError,
        ArgumentError,
        TracingUnavailable,
        UnusableKeys,
    ) as error:
        log.error("not started: %s", error)
        return EXIT_REFUSED
    except OperationalError as error:
        log.error("not started: the database does not answer: %s", str(error.orig).strip())
        return EXIT_FAILED
    except OSError as error:
        log.error("not started: %s", error)
        return EXIT_FAILED


def _parse(arguments: Sequence[str] | None) -> tuple[Settings, Start]:
    parser = argparse.ArgumentParser(
        prog="everstep server",
        description="The control plane of Everstep: REST API, agents' connections, job and fleet loops.",
        parents=[options.of_the_database(), options.of_the_cloud()],
    )
    env = os.environ.get
    parser.add_argument(
        "--migrate", action="store_true", help="migrate the database to this version's schema before serving"
    )
    parser.add_argument(
        "--secrets-prefix",
        default=env("EVERSTEP_SECRETS_PREFIX", ""),
        help="beginning of the names of this server's secrets in AWS Secrets Manager; by default, the secrets are "
        "files in the state directory",
    )
    parser.add_argument(
        "--server-id",
        default=env("EVERSTEP_SERVER_ID", ""),
        help="public id of the installation, 32 hexadecimal digits, equal for all its servers; by default, the first "
        "start generates the id",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8443, help="port to listen on; 0: the kernel chooses (default %(default)s)"
    )
    parser.add_argument(
        "--tls-certificate",
        type=Path,
        help="PEM file with the server's and the intermediate certificates; the server then accepts only https",
    )
    parser.add_argument(
        "--tls-host",
        default=env("EVERSTEP_TLS_HOST", ""),
        metavar="ADDRESS",
        help="further IP address to listen on at the same port, with TLS, for a load balancer and the other servers; "
        "the servers of an installation trust each other's certificates, and renew them",
    )
    parser.add_argument(
        "--replica-url",
        default=env("EVERSTEP_REPLICA_URL", ""),
        metavar="URL",
        help="address at which the other servers of the installation reach this one; required if --host is a wildcard "
        "address (default: --tls-host, or the address to listen on)",
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file with the certificate's key, without a password")
    parser.add_argument(
        "--allow-non-loopback", action="store_true", help="permit an address that other machines can reach, without TLS"
    )
    parser.add_argument(
        "--trusted-proxies",
        default="127.0.0.1",
        metavar="CIDR,…",
        help="addresses and networks of the proxies in front of this server, separated by commas; the server believes "
        "their X-Forwarded-For and X-Forwarded-Proto (default %(default)s)",
    )
    parser.add_argument(
        "--events-queue-url",
        default=env("EVERSTEP_EVENTS_QUEUE_URL", ""),
        help="SQS queue to which EventBridge sends AWS's events; without a queue, the server only polls AWS",
    )
    parser.add_argument(
        "--export-events",
        action="append",
        default=[],
        metavar="ARN",
        help="EventBridge bus that receives new events; may be repeated",
    )
    parser.add_argument(
        "--otlp-endpoint",
        default=env("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        metavar="URL",
        help="OpenTelemetry collector that receives traces of jobs over OTLP/HTTP; needs the extra otel "
        "(OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    parser.add_argument(
        "--bucket", default=env("EVERSTEP_BUCKET", ""), help="S3 bucket for sources, logs, outputs and checkpoints"
    )
    parser.add_argument(
        "--detection-seconds",
        type=float,
        default=3.0,
        help="target time to detect a failure; the server derives all timeouts from it (default %(default)s)",
    )
    parser.add_argument("--print-timeouts", action="store_true", help="print all timeouts with their reasons, and exit")
    parser.add_argument(
        "--max-source-bytes",
        type=int,
        default=256 * 1024 * 1024,
        help="maximum size of a source archive in bytes (default %(default)s)",
    )
    limits = ", ".join(f"{limit.name}={limit.default}" for limit in fields(RowRetention))
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="WHAT=LIMIT",
        help=f"limit of a growing table of the database, usually in days; may be repeated ({limits})",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=env("EVERSTEP_LOG_FORMAT", "text"),
        help="text for people, or json for log pipelines: one object per line, with job, node and generation "
        "of the line's subject (EVERSTEP_LOG_FORMAT)",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        help="file that the server writes once it accepts requests: JSON with url, pid and admin_token_path",
    )
    given = parser.parse_args(arguments)
    cloud = options.cloud(given)
    same = {field.name for field in fields(Settings)} & vars(given).keys() - {"mode", "region", "trusted_proxies"}
    settings = Settings(
        **{name: getattr(given, name) for name in same},
        state_directory=given.state_dir.resolve(),
        mode=cloud.mode,
        region=cloud.region,
        aws_keys=cloud.keys,
        event_exports=tuple(given.export_events),
        server_secret=env("EVERSTEP_SERVER_SECRET", ""),
        admin_token=env("EVERSTEP_ADMIN_TOKEN", ""),
        is_other_host_allowed=given.allow_non_loopback,
        trusted_proxies=tuple(filter(None, given.trusted_proxies.split(","))),
        retention=_retention(given.keep),
    )
    if given.log_format not in LOG_FORMATS:
        raise InvalidSettings(f"EVERSTEP_LOG_FORMAT {given.log_format!r} is none of {', '.join(LOG_FORMATS)}")
    return settings, Start(
        is_migrating=given.migrate,
        ready_file=given.ready_file,
        is_asked_for_timeouts=given.print_timeouts,
        log_format=given.log_format,
    )


def _retention(given: Sequence[str]) -> RowRetention:
    """Return the default retention, changed by the values `WHAT=LIMIT` of `--keep`."""
    known = {limit.name for limit in fields(RowRetention)}
    changes: dict[str, int] = {}
    for limit in given:
        what, _, figure = limit.partition("=")
        if what not in known or not figure.isascii() or not figure.isdigit():
            raise InvalidSettings(
                f"--keep {limit} is not of the form WHAT=LIMIT with a whole number. "
                f"WHAT is one of {', '.join(sorted(known))}."
            )
        changes[what] = int(figure)
    return replace(RowRetention(), **changes)


def _announce(settings: Settings) -> None:
    """Log timeouts, event queue and AWS account, before the server opens or changes anything."""
    for rung in rungs(ladder(settings.detection_seconds)):
        log.info("timeout %s", rung)
    queue = settings.events_queue_url
    log.info(
        "AWS's events: %s",
        f"the server reads them from {queue} and also polls AWS"
        if queue
        else "no queue is set (--events-queue-url), so the server only polls AWS",
    )
    try:
        Connection(settings.cloud).identify()
    except NoCredentials as error:
        log.warning(
            "%s. The server starts, and looks for AWS credentials until they are there. Attach a role to the instance, "
            "or write ~/.aws/credentials.",
            error.message,
        )


def _migrate(settings: Settings) -> None:
    database = Database(settings.database)
    try:
        before = schema.migrate(database)
        log.info(
            "database %s: schema %s → %s",
            database.url.render_as_string(hide_password=True),
            before or "none",
            schema.current(database),
        )
    finally:
        database.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket whose accepted connections inherit TCP_NODELAY."""
    # Without TCP_NODELAY, a body waits 40 ms on Linux for the acknowledgement of its headers. asyncio sets it
    # only if `proto` is IPPROTO_TCP, but `create_server` leaves it at 0.
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _serve(settings: Settings, ready_file: Path | None) -> int:
    with ExitStack() as stack:
        listener = stack.enter_context(listening(settings.host, settings.port))
        port = listener.getsockname()[1]
        url = _url("https" if settings.has_tls else "http", settings.host, port)
        replica_url = settings.replica_url or ("" if settings.host in WILDCARDS else url)
        tls_listener = None
        if settings.tls_host:
            tls_listener = stack.enter_context(listening(settings.tls_host, port))
            replica_url = settings.replica_url or _url("https", settings.tls_host, port)
        crashed = asyncio.Event()
        manager = ServiceManager()

        def announce() -> None:
            # The socket listens before the ready file exists, so a client that reads the file can connect immediately.
            _tell(url, settings, ready_file)
            manager.notify("READY=1")

        app = create_app(
            settings,
            replica_url=replica_url,
            when_ready=announce,
            when_crashed=lambda: _crash(server, crashed),
        )
        gate = Gate(min(MAX_STRANGERS, raise_open_files() // 4))
        config = server_config(
            app,
            gate,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            ws_ping_interval=settings.detection_seconds,
            ws_ping_timeout=4 * settings.detection_seconds,
        )
        # After its graceful stop, uvicorn sends SIGTERM or SIGINT to this process again. The process ignores the second
        # signal, so that it exits with code 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        certificate = None
        if settings.tls_host:
            certificate = ServerCertificate(app.state.services.peers.authority, settings.tls_host, steady_now)
        server = Server(config, gate, tls_listener, certificate.context if certificate is not None else None)
        asyncio.run(_run(server, listener, manager, certificate))
    log.info("stopped")
    return EXIT_FAILED if crashed.is_set() else 0


def _crash(server: Server, crashed: asyncio.Event) -> None:
    """Stop the server after a background loop has crashed, so that systemd restarts it."""
    # Without its loops, the server would still answer requests, but manage no job and no fleet.
    crashed.set()
    server.should_exit = True


async def _run(
    server: Server, listener: socket.socket, manager: ServiceManager, certificate: ServerCertificate | None
) -> None:
    beside = [asyncio.create_task(manager.keep_alive(), name="systemd's watchdog")]
    if certificate is not None:
        beside.append(asyncio.create_task(certificate.keep_valid(), name="renewal of the certificate"))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in beside:
            task.cancel()


def _tell(url: str, settings: Settings, ready_file: Path | None) -> None:
    if settings.admin_token:
        token = "the variable EVERSTEP_ADMIN_TOKEN"
    elif settings.secrets_prefix:
        token = f"secret {settings.secrets_prefix}admin-token"
    else:
        token = str(settings.state_directory / ADMIN_TOKEN)
    if ready_file is not None:
        write_private(ready_file, json.dumps({"url": url, "pid": os.getpid(), "admin_token_path": token}) + "\n")
    log.info(
        "listening on %s; administrator's token in %s; server id %s",
        url,
        token,
        settings.server_id or server_id(SecretFiles(settings.state_directory)),
    )


if __name__ == "__main__":
    sys.exit(main())
