"""AWS's APIs on loopback: moto served in this process, the engine beside it, and the instances below.

One lock is held around every request that is not S3's and around every pass of the engine: moto itself has none. S3 stays concurrent, its
backend is safe for that. One thread runs the engine and owns the instances.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from everstep.protocol.loopback import is_loopback
from infra.local_cloud.addresses import AddressPool
from infra.local_cloud.auto_scaling import AutoScaling
from infra.local_cloud.ec2 import Ec2
from infra.local_cloud.faults import CONDITIONS, Conditions, Faults
from infra.local_cloud.instances import InstanceRunner
from infra.local_cloud.moto_api import install

log = logging.getLogger(__name__)

PASS_SECONDS = 0.1
"""Longest time between two passes; every request that may have changed something brings the next one forward."""
ADMIN_PREFIX = "/_everstep/"
"""No bucket can have this name."""
MAX_ADMIN_BODY_BYTES = 64 * 1024

StartResponse = Callable[[str, list[tuple[str, str]]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """How the local AWS starts."""

    nodes_directory: Path
    environment: Mapping[str, str]
    """What instances get besides their own variables; AWS_ENDPOINT_URL is added."""
    conditions: Conditions
    port: int = 0
    seed: int = 0


class LocalAws:
    """The served cloud. One per process: moto's state is the process's.

    Args:
        options: how it starts. Port 0 lets the kernel choose.
    """

    def __init__(self, options: AwsOptions) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_stopping = False
        self.faults = Faults(options.conditions, seed=options.seed, changed=self._wake.set)
        self._addresses = AddressPool(random.SystemRandom())
        self._ec2 = Ec2(self.faults, self._addresses, time.monotonic)
        self._auto_scaling = AutoScaling(self._ec2, self.faults, time.monotonic)
        install(self._ec2, self._auto_scaling)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", options.port, self._serve, threaded=True, request_handler=_QuietHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._runner = InstanceRunner(options.nodes_directory, {**options.environment, "AWS_ENDPOINT_URL": self.url})
        self._serving = threading.Thread(target=self._server.serve_forever, name="serve", daemon=True)

    def start(self) -> None:
        """Begin to answer requests; `run` must follow."""
        self._serving.start()

    def run(self) -> None:
        """Run the engine until `stop`, then end every instance; called from the process's main thread, which instances follow into death."""
        try:
            while not self._is_stopping:
                self._wake.wait(PASS_SECONDS)
                self._wake.clear()
                self._pass()
        finally:
            self._server.shutdown()
            self._serving.join()
            self._server.server_close()
            self._runner.end_all()
            self._addresses.close()

    def stop(self) -> None:
        """Make `run` return within a pass; idempotent.

        Called by a signal handler, so it takes no lock: an event's own may be held by the very code that the signal interrupts.
        """
        self._is_stopping = True

    def _pass(self) -> None:
        try:
            with self._lock:
                self._ec2.advance()
                self._auto_scaling.reconcile()
                running = self._ec2.running()
            self._runner.reconcile(running)
        except Exception:  # the loop's top: one bad group must not stop the cloud
            log.exception("a pass of the engine failed")

    def _serve(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith(ADMIN_PREFIX):
            return self._administer(environ, start_response)
        if "/s3/aws4_request" in environ.get("HTTP_AUTHORIZATION", ""):
            answer: Iterable[bytes] = self._moto(environ, start_response)
            return answer
        with self._lock:
            body = list(self._moto(environ, start_response))
        self._wake.set()
        return body

    def _administer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        status, body = self._answer(environ)
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, bytes]:
        # A web page may make a browser send requests here, but not with this machine's name as Host.
        if not is_loopback(f"http://{environ.get('HTTP_HOST', '')}"):
            return "403 Forbidden", msgspec.json.encode({"Message": "this address serves this machine only"})
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(ADMIN_PREFIX))
        if request == ("GET", "config"):
            return "200 OK", msgspec.json.encode(self.faults.conditions)
        if request == ("GET", "instances"):
            return "200 OK", msgspec.json.encode(self._runner.pids())
        if request != ("PUT", "config"):
            return "404 Not Found", msgspec.json.encode({"Message": "GET or PUT /_everstep/config, GET /_everstep/instances"})
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > MAX_ADMIN_BODY_BYTES:
            return "413 Content Too Large", msgspec.json.encode({"Message": f"at most {MAX_ADMIN_BODY_BYTES} bytes"})
        try:
            conditions = CONDITIONS.decode(environ["wsgi.input"].read(length))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return "400 Bad Request", msgspec.json.encode({"Message": str(error)})
        self.faults.replace(conditions)
        return "200 OK", msgspec.json.encode(conditions)


class _QuietHandler(MotoRequestHandler):  # type: ignore[misc]
    """Logs failures only: a control plane polls."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if str(code).startswith("5"):
            super().log_request(code, size)
