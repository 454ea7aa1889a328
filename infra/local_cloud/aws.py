"""AWS's APIs on loopback: moto served in this process, the engine beside it, and the instances below.

One lock is held around every request that is not S3's or SQS's and around every pass of the engine: moto itself has none. S3 stays concurrent, its
backend is safe for that; so does SQS, whose receivers wait. One thread runs the engine and owns the instances.
"""

from __future__ import annotations

import io
import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from everstep.protocol.loopback import is_loopback
from infra.local_cloud.addresses import AddressPool
from infra.local_cloud.auto_scaling import AutoScaling
from infra.local_cloud.calls import RECORDED_SERVICES, CallRecord
from infra.local_cloud.ec2 import Ec2
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.events import Announcements, stamp
from infra.local_cloud.fault_kinds import FAULT
from infra.local_cloud.faults import CONDITIONS, Conditions, Faults
from infra.local_cloud.injector import Injector, Places
from infra.local_cloud.instances import InstanceRunner
from infra.local_cloud.metadata import MetadataService
from infra.local_cloud.moto_api import install
from infra.local_cloud.network import Network, remove
from infra.local_cloud.throttling import refusal, service_of

log = logging.getLogger(__name__)

PASS_SECONDS = 0.1
"""Longest time between two passes; every request that may have changed something brings the next one forward."""
STOP_POLL_SECONDS = 0.05
"""How often the server looks whether it is to stop."""
ADMIN_PREFIX = "/_everstep/"
"""No bucket can have this name."""
MAX_ADMIN_BODY_BYTES = 64 * 1024
CONCURRENT = frozenset({"s3", "sqs"})
LOOPBACK = "127.0.0.1"
CONTROL_PLANES: Final = 2
"""As many replicas of the control plane have room."""

StartResponse = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """How the local AWS starts."""

    nodes_directory: Path
    environment: Mapping[str, str]
    """What instances get besides their own variables; AWS_ENDPOINT_URL is added."""
    conditions: Conditions
    port: int = 0
    seed: int = 0
    network_name: str = ""
    """Of a network that instances get namespaces in; empty: they share this machine's loopback."""


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
        self._announcements = Announcements(self.faults, time.monotonic)
        self._ec2 = Ec2(self.faults, self._addresses, self._announcements, time.monotonic)
        self._auto_scaling = AutoScaling(self._ec2, self.faults, self._announcements, time.monotonic)
        install(self._ec2, self._auto_scaling)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._calls = CallRecord()
        self._network: Network | None = None
        self._address = LOOPBACK
        self.control_planes = [(LOOPBACK, 0)] * CONTROL_PLANES
        """Where replicas of the control plane are to listen: address and port; port 0: anywhere."""
        if options.network_name:
            self._address, *addresses = (self._addresses.take() for _ in range(1 + CONTROL_PLANES))
            self._network = Network(options.network_name, services=(self._address, *addresses))
        try:
            self._server = make_server(self._address, options.port, self._serve, threaded=True, request_handler=_QuietHandler)
            self.url = f"http://{self._address}:{self._server.server_port}"
            if self._network:
                self.control_planes = [(address, _free_port(address)) for address in addresses]
                for address, port in ((self._address, self._server.server_port), *self.control_planes):
                    self._network.allow(address, port)
        except BaseException:
            self._remove_network()
            raise
        self._metadata = MetadataService(self._facts)
        self._runner = InstanceRunner(
            options.nodes_directory,
            {**options.environment, "AWS_ENDPOINT_URL": self.url},
            metadata=self._metadata,
            network=self._network,
        )
        self._injector = Injector(
            Places(
                ec2=self._ec2,
                auto_scaling=self._auto_scaling,
                announcements=self._announcements,
                faults=self.faults,
                runner=self._runner,
                network=self._network,
                aws_address=self._address,
                control_plane_addresses=tuple(address for address, _ in self.control_planes),
            )
        )
        self._serving = threading.Thread(target=self._server.serve_forever, args=(STOP_POLL_SECONDS,), name="serve", daemon=True)

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
            self._remove_network()
            self._addresses.close()

    def stop(self) -> None:
        """Make `run` return within a pass; idempotent.

        Called by a signal handler, so it takes no lock: an event's own may be held by the very code that the signal interrupts.
        """
        self._is_stopping = True

    def _remove_network(self) -> None:
        if self._network:
            remove(self._network.name)

    def _pass(self) -> None:
        try:
            with self._lock:
                self._ec2.advance()
                self._auto_scaling.reconcile()
                self._announcements.advance()
                running = self._ec2.running()
            self._runner.reconcile(running)
        except Exception:  # the loop's top: one bad group must not stop the cloud
            log.exception("a pass of the engine failed")

    def _serve(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith(ADMIN_PREFIX):
            return self._administer(environ, start_response)
        service = service_of(environ.get("HTTP_AUTHORIZATION", ""))
        if self.faults.is_throttled(service):
            status, headers, refused = refusal(service, str(uuid.uuid4()))
            start_response(status, [*headers, ("Content-Length", str(len(refused)))])
            return [refused]
        if service in CONCURRENT:
            answer: Iterable[bytes] = self._moto(environ, start_response)
            return answer
        with self._lock:
            body = self._recorded(service, environ, start_response) if service in RECORDED_SERVICES else list(self._moto(environ, start_response))
        self._wake.set()
        return body

    def _recorded(self, service: str, environ: dict[str, Any], start_response: StartResponse) -> list[bytes]:
        """Let moto answer a call, and record it with the status that it was given."""
        at, request, statuses = time.time(), environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)), [""]
        environ["wsgi.input"] = io.BytesIO(request)

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> object:
            statuses.append(status)
            return start_response(status, headers, *rest)

        body = list(self._moto(environ, start))
        self._calls.add(service, request, statuses[-1], at)
        return body

    def _administer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        status, body = self._answer(environ)
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, bytes]:
        # A web page may make a browser send requests here, but not with this machine's name as Host.
        if not is_loopback(f"http://{environ.get('HTTP_HOST', '')}"):
            return "403 Forbidden", msgspec.json.encode({"Message": "this address serves this machine only"})
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > MAX_ADMIN_BODY_BYTES:
            return "413 Content Too Large", msgspec.json.encode({"Message": f"at most {MAX_ADMIN_BODY_BYTES} bytes"})
        content = environ["wsgi.input"].read(length)
        try:
            match environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(ADMIN_PREFIX):
                case "GET", "config":
                    answer: object = self.faults.conditions
                case "PUT", "config":
                    self.faults.replace(CONDITIONS.decode(content))
                    answer = self.faults.conditions
                case "GET", "instances":
                    answer = self._runner.pids()
                case "GET", "calls":
                    answer = self._calls.every()
                case "GET", "links":
                    answer = {instance_id: self._network.counters(instance_id) for instance_id in self._network.links()} if self._network else {}
                case "GET", "faults":
                    answer = self._injector.history
                case "POST", "faults":
                    with self._lock:
                        answer = self._injector.inject(FAULT.decode(content))
                    self._wake.set()
                case "DELETE", "faults":
                    with self._lock:
                        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
                        answer = self._injector.clear(query.get("name", ""), query.get("target", ""))
                    self._wake.set()
                case _:
                    return "404 Not Found", msgspec.json.encode(
                        {"Message": "config (GET, PUT), faults (GET, POST, DELETE), calls, instances, links (GET)"}
                    )
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return "400 Bad Request", msgspec.json.encode({"Message": str(error)})
        except FaultRefused as error:
            return "409 Conflict", msgspec.json.encode({"Message": str(error)})
        return "200 OK", msgspec.json.encode(answer)

    def _facts(self, instance_id: str) -> dict[str, str]:
        """Return what an instance's metadata says now, by path; called from the metadata service's threads."""
        with self._lock:
            try:
                _, instance, life = self._ec2.find(instance_id)
            except FaultRefused:
                return {}
            facts = {
                "ami-id": instance.image_id,
                "instance-id": instance_id,
                "instance-life-cycle": "spot" if life.spot_action else "on-demand",
                "instance-type": instance.instance_type,
                "local-ipv4": life.address,
                "placement/availability-zone": instance.placement.zone,
                "placement/region": instance.placement.zone[:-1],
                **{f"tags/instance/{tag['key']}": tag["value"] for tag in instance.get_tags() if "/" not in tag["key"]},
            }
            if life.spot_action:
                action = {"action": life.spot_action.how, "time": stamp(life.spot_action.at_time)}
                facts["spot/instance-action"] = msgspec.json.encode(action).decode()
                if life.spot_action.how == "terminate":
                    facts["spot/termination-time"] = stamp(life.spot_action.at_time)
            if life.rebalance_at:
                facts["events/recommendations/rebalance"] = msgspec.json.encode({"noticeTime": stamp(life.rebalance_at)}).decode()
            if life.scheduled:
                facts["events/maintenance/scheduled"] = msgspec.json.encode([event.as_metadata() for event in life.scheduled]).decode()
            target = self._auto_scaling.target_lifecycle_state(instance_id)
            if target:
                facts["autoscaling/target-lifecycle-state"] = target
            return facts


def _free_port(address: str) -> int:
    """Return a port that is free at an address which is this network's alone."""
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class _QuietHandler(MotoRequestHandler):  # type: ignore[misc]
    """Logs failures only: a control plane polls."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if str(code).startswith("5"):
            super().log_request(code, size)
