"""Serves AWS's APIs on loopback, with moto and an engine that runs instances and groups.

User data runs with the privileges of this process, even root's. Therefore only callers with the cluster's key may
launch instances or inject faults: the server first checks the signature of every request (`signatures`).

One thread runs the engine and owns the instances. moto has no locks, so one lock protects every pass of the engine and
every request, except to S3, whose backend is safe for concurrent use, and to SQS, whose receive calls wait.
"""

from __future__ import annotations

import io
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from everstep.host.local_keys import LocalKeys
from infra.local_cloud import aws_answers
from infra.local_cloud.addresses import AddressPool
from infra.local_cloud.auto_scaling import AutoScaling
from infra.local_cloud.aws_options import AwsOptions
from infra.local_cloud.calls import CallRecord
from infra.local_cloud.ec2 import Ec2
from infra.local_cloud.environment import aws_variables, process_environment
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.events import Announcements, stamp
from infra.local_cloud.fault_kinds import FAULT
from infra.local_cloud.faults import CONDITIONS, Faults
from infra.local_cloud.gate import SERVICES, AwsGate, read
from infra.local_cloud.injector import Injector
from infra.local_cloud.instance_refresh import InstanceRefreshes
from infra.local_cloud.instances import InstanceRunner
from infra.local_cloud.metadata import MetadataService
from infra.local_cloud.moto_api import install, session_key
from infra.local_cloud.network import Network, remove
from infra.local_cloud.service_errors import answer_of, denied, service_of, throttled
from infra.local_cloud.signatures import ADMIN_SERVICE, Denied, IssuedKey, SignedRequest, Signer, stray, verify
from infra.local_cloud.synchronous_launches import SynchronousLaunches
from infra.local_cloud.visibility import DELAYED

log = logging.getLogger(__name__)

PASS_SECONDS = 0.1
"""Longest time between two passes of the engine. A request that may have changed the state triggers a pass at once."""
STOP_POLL_SECONDS = 0.05
"""Interval of the HTTP server's checks whether to stop."""
ADMIN_PREFIX = "/_everstep/"
"""Prefix of the local cloud's own paths. It is not a valid bucket name, so no S3 request has it."""
ADMIN_PATHS = "config (GET, PUT), faults (GET, POST, DELETE), wrong-calls (GET, DELETE), calls, instances, links (GET)"
MAX_ADMIN_BODY_BYTES = 64 * 1024
MAX_API_BODY_BYTES = 16 * 1024 * 1024
"""Limit of a request to any service except S3: twice the largest size that AWS documents."""
MOTO_PATHS = ("/moto-api", "/latest/meta-data/", "/latest/api/", "/favicon.ico")
"""Paths outside AWS's APIs that moto serves without a signature. The local cloud refuses them."""
RECEIVED = "everstep.received"
"""Key in a request's WSGI environ of a `SignedRequest`, the unparsed request line and headers."""
CONCURRENT = frozenset({"s3", "sqs"})
LOOPBACK = "127.0.0.1"
CONTROL_PLANES: Final = 2
"""Largest number of servers of one local cloud."""
SERVICES_BESIDE: Final = CONTROL_PLANES + 2
"""Services with an address of their own: control planes, a load balancer, and an S3 server in place of the local one.
"""

StartResponse = Callable[..., object]


class LocalAws:
    """The local AWS. At most one per process, because moto's state is global.

    Raises:
        UnusableKeys: the key file is unreadable, or is accessible to other users.
        UnusableAnswers: the file with answers of a conformance run does not exist or is invalid.
    """

    def __init__(self, options: AwsOptions) -> None:
        answers = aws_answers.read(Path(options.aws_answers) if options.aws_answers else None)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_stopping = False
        self.faults = Faults(options.conditions, seed=options.seed, changed=self._wake.set)
        self._addresses = AddressPool(random.SystemRandom())
        self._announcements = Announcements(self.faults, time.monotonic)
        self._ec2 = Ec2(self.faults, self._addresses, self._announcements, time.monotonic, answers)
        self._gate = AwsGate(self.faults, self._ec2.zone_of, time.monotonic, answers.auto_scaling_rate)
        self._auto_scaling = AutoScaling(self._ec2, self.faults, self._announcements, time.monotonic)
        self._refreshes = InstanceRefreshes(self._auto_scaling)
        launches = SynchronousLaunches(self._auto_scaling, time.monotonic)
        install(self._ec2, self._auto_scaling, self._refreshes, launches)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._keys = LocalKeys.read(Path(options.keys_file))
        self._calls = CallRecord()
        self._network: Network | None = None
        self._address = LOOPBACK
        self.control_planes = [(LOOPBACK, 0)] * CONTROL_PLANES
        """Port 0: the kernel chooses the port."""
        self.balancer = self.storage = LOOPBACK, 0
        if options.network_name:
            self._address, *addresses = (self._addresses.take() for _ in range(1 + SERVICES_BESIDE))
            self._network = Network(options.network_name, services=(self._address, *addresses))
        try:
            self._server = make_server(self._address, 0, self._serve, threaded=True, request_handler=_QuietHandler)
            self._host = f"{self._address}:{self._server.server_port}"
            self.url = f"http://{self._host}"
            if self._network:
                beside = [(address, _free_port(address)) for address in addresses]
                *self.control_planes, self.balancer, self.storage = beside
                for address, port in ((self._address, self._server.server_port), *beside):
                    self._network.allow(address, port)
        except BaseException:
            self._remove_network()
            raise
        self._metadata = MetadataService(self._facts)
        self._runner = InstanceRunner(
            Path(options.nodes_directory),
            {
                **process_environment(os.environ.get("EVERSTEP_LOCAL_CLUSTER", options.nodes_directory)),
                **aws_variables(self.url, self._keys),
                **options.instance_environment,
            },
            metadata=self._metadata,
            network=self._network,
        )
        self._injector = Injector(
            ec2=self._ec2,
            auto_scaling=self._auto_scaling,
            announcements=self._announcements,
            faults=self.faults,
            runner=self._runner,
            network=self._network,
            aws_addresses=(self._address, self.storage[0]),
            control_plane_addresses=tuple(address for address, _ in (*self.control_planes, self.balancer)),
        )
        self._serving = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_SECONDS,), name="serve", daemon=True
        )

    def start(self) -> None:
        """Start to answer requests, in threads. The caller must then call `run`."""
        self._serving.start()

    def run(self) -> None:
        """Run the engine until `stop`. Then end every instance.

        The main thread must call this method, because an instance dies with the thread that started it.
        """
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
        """Make `run` return after its current iteration. Idempotent."""
        # A signal handler calls this. It takes no lock, because the interrupted code may hold the lock.
        self._is_stopping = True

    def _remove_network(self) -> None:
        if self._network:
            remove(self._network.name)

    def _pass(self) -> None:
        try:
            with self._lock:
                self._ec2.advance()
                self._auto_scaling.reconcile()
                self._refreshes.reconcile()
                self._announcements.advance()
                running = self._ec2.running()
            self._runner.reconcile(running)
        # Log every error of a pass over all groups and continue: one faulty group must not stop the cloud.
        except Exception:
            log.exception("a pass of the engine failed")

    def _serve(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        received: SignedRequest = environ[RECEIVED]
        service = service_of(received.header("authorization"))
        if reason := stray(received, self._host):
            return _say_json(start_response, "403 Forbidden", {"Message": reason})
        if environ["PATH_INFO"].startswith(MOTO_PATHS):
            return _say_json(start_response, "404 Not Found", {"Message": "not a service of AWS"})
        try:
            caller = verify(received, lambda: _body(environ, service), self._issued, datetime.now(UTC))
        except Denied as error:
            return _say(start_response, *denied(service, error.denial, str(error), str(uuid.uuid4())))
        except BodyTooLarge as error:
            return _say(start_response, "413 Content Too Large", [], str(error).encode())
        if environ["PATH_INFO"].startswith(ADMIN_PREFIX) or caller.service == ADMIN_SERVICE:
            return self._administer(environ, caller, start_response)
        return self._call(caller.service, environ, _without_cors(start_response))

    def _call(self, service: str, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Pass an AWS API call to moto."""
        if self.faults.is_throttled(service):
            return _say(start_response, *throttled(service, str(uuid.uuid4())))
        scope = f"AWS4-HMAC-SHA256 Credential=key/date/us-east-1/{service}/aws4_request"
        # Select the service by the signature. For a presigned URL, moto would guess it from path and body, which the
        # signature may not cover.
        application = self._moto.get_application(
            environ if "HTTP_AUTHORIZATION" in environ else {**environ, "HTTP_AUTHORIZATION": scope}
        )
        if service in CONCURRENT:
            answer: Iterable[bytes] = application(environ, start_response)
            return answer
        with self._lock:
            body = (
                self._recorded(service, application, environ, start_response)
                if service in SERVICES
                else list(application(environ, start_response))
            )
        self._wake.set()
        return body

    def _issued(self, access_key_id: str) -> IssuedKey | None:
        if access_key_id == self._keys.access_key_id:
            return IssuedKey(secret_access_key=self._keys.secret_access_key, is_owner=True)
        with self._lock:
            return session_key(access_key_id)

    def _recorded(
        self, service: str, application: Any, environ: dict[str, Any], start_response: StartResponse
    ) -> list[bytes]:
        """Pass a call to moto, unless `gate` refuses it as AWS would.

        Record it with the answer's status in both cases.
        """
        at, body, statuses = time.time(), environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)), [""]
        environ["wsgi.input"] = io.BytesIO(body)

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> object:
            statuses.append(status)
            return start_response(status, headers, *rest)

        request = read(service, body)
        refusal = self._gate.refusal(request)
        if refusal:
            answer = _say(start, *answer_of(service, refusal.status, refusal.code, refusal.message, str(uuid.uuid4())))
        else:
            with self._ec2.as_described() if request.action in DELAYED else nullcontext():
                answer = list(application(environ, start))
        self._calls.add(service, body, statuses[-1], at, environ.get("HTTP_USER_AGENT", ""))
        return answer

    def _administer(self, environ: dict[str, Any], caller: Signer, start_response: StartResponse) -> Iterable[bytes]:
        if caller.is_owner and caller.service == ADMIN_SERVICE:
            return _say_json(start_response, *self._answer(environ))
        message = f"sign it with the cluster's own key for the service {ADMIN_SERVICE!r}"
        return _say_json(start_response, "403 Forbidden", {"Message": message})

    def _answer(self, environ: dict[str, Any]) -> tuple[str, object]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > MAX_ADMIN_BODY_BYTES:
            return "413 Content Too Large", {"Message": f"at most {MAX_ADMIN_BODY_BYTES} bytes"}
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
                case "GET", "wrong-calls":
                    answer = self._gate.wrong_calls
                case "DELETE", "wrong-calls":
                    with self._lock:
                        answer, self._gate.wrong_calls = self._gate.wrong_calls, []
                case "GET", "links":
                    answer = self._network.all_counters() if self._network else {}
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
                    return "404 Not Found", {"Message": ADMIN_PATHS}
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return "400 Bad Request", {"Message": str(error)}
        except FaultRefused as error:
            return "409 Conflict", {"Message": str(error)}
        return "200 OK", answer

    def _facts(self, instance_id: str) -> dict[str, str]:
        """Return an instance's metadata by path. The threads of the metadata service call this."""
        with self._lock:
            try:
                instance, life = self._ec2.find(instance_id)
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
                facts["events/recommendations/rebalance"] = msgspec.json.encode(
                    {"noticeTime": stamp(life.rebalance_at)}
                ).decode()
            if life.scheduled:
                facts["events/maintenance/scheduled"] = msgspec.json.encode(
                    [event.as_metadata() for event in life.scheduled]
                ).decode()
            target = self._auto_scaling.target_lifecycle_state(instance_id)
            if target:
                facts["autoscaling/target-lifecycle-state"] = target
            return facts


def _free_port(address: str) -> int:
    """Return a free port of an address that only this network uses."""
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class BodyTooLarge(Exception):
    """A request to a service other than S3 has a body larger than `MAX_API_BODY_BYTES`."""


def _body(environ: dict[str, Any], service: str) -> bytes:
    """Read a request's whole body, and replace its stream so that moto can read it again."""
    stream, length = environ["wsgi.input"], int(environ.get("CONTENT_LENGTH") or 0)
    limit = length if service == "s3" else MAX_API_BODY_BYTES
    if length > limit:
        raise BodyTooLarge(f"the body has {length} bytes; {service} accepts {limit}")
    # A request with chunked transfer states no length. One byte beyond the limit shows that the body is too large.
    if environ.get("wsgi.input_terminated"):
        content: bytes = stream.read() if service == "s3" else stream.read(limit + 1)
        if service != "s3" and len(content) > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, which is all that {service} accepts")
    else:
        content = stream.read(length)
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(content), str(len(content))
    return content


def _say(start_response: StartResponse, status: str, headers: list[tuple[str, str]], body: bytes) -> list[bytes]:
    start_response(status, [*headers, ("Content-Length", str(len(body)))])
    return [body]


def _say_json(start_response: StartResponse, status: str, content: object) -> list[bytes]:
    return _say(start_response, status, [("Content-Type", "application/json")], msgspec.json.encode(content))


def _without_cors(start_response: StartResponse) -> StartResponse:
    """Drop moto's CORS headers, with which web pages could read answers of the local AWS."""

    def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> object:
        return start_response(
            status, [(name, value) for name, value in headers if not name.lower().startswith("access-control-")], *rest
        )

    return start


class _QuietHandler(MotoRequestHandler):  # type: ignore[misc]
    """Logs only server errors. Stores the request line and headers unparsed, because the signature covers this form."""

    def make_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().make_environ()
        environ[RECEIVED] = SignedRequest(method=self.command, target=self.path, headers=tuple(self.headers.items()))
        return environ

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if str(code).startswith("5"):
            super().log_request(code, size)
