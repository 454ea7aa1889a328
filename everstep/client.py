"""The client: one method per operation of the service, named and called as boto3 would.

    import everstep.client
    service = everstep.client.client()
    source = service.upload_source(Directory="examples/char_gpt")
    service.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=4)
    service.get_waiter("training_job_completed").wait(TrainingJobName="gpt")

Requests and responses are the JSON of the contract (PascalCase), times as ISO 8601 text. Reading is tried again when nobody answers; what changes
something is not, unless doing it twice is the same as doing it once.

Invariant: every failure is an `everstep.errors.EverstepError`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Final, Self
from urllib.parse import quote

import httpx

from everstep import config, sources
from everstep.errors import (
    BY_STATUS,
    ConfigurationError,
    FieldError,
    NotFound,
    ServiceError,
    ServiceFault,
    ServiceUnavailable,
    Throttled,
    TransferFailed,
    WaitFailed,
)
from everstep.protocol.loopback import is_loopback

Json = dict[str, Any]

ATTEMPTS: Final = 4
FIRST_PAUSE_SECONDS: Final = 0.2
TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
UPLOAD_TIMEOUT: Final = httpx.Timeout(300.0, connect=5.0)
UPLOAD_CHUNK_BYTES: Final = 1024 * 1024
UNANSWERED_SECONDS: Final = 60.0
"""How long a waiter puts up with a control plane that does not answer: it may be restarting."""

_PAGED: Final = {
    "list_training_jobs": "TrainingJobSummaries",
    "list_incidents": "Incidents",
    "list_events": "Events",
    "list_outputs": "Outputs",
}
_WAITERS: Final = {
    "training_job_completed": frozenset({"Completed"}),
    "training_job_ended": frozenset({"Completed", "Stopped", "Failed"}),
    "training_job_completed_or_stopped": frozenset({"Completed", "Stopped"}),
}
ENDED: Final = frozenset({"Completed", "Stopped", "Failed"})
"""Values of `TrainingJobStatus` that nothing follows."""


def client(endpoint_url: str | None = None, token: str | None = None) -> EverstepClient:
    """Return a client of the service.

    Args:
        endpoint_url: of the service; by default from the environment or the user's configuration, see `everstep.config`.
        token: by default from there, too.

    Returns:
        A client; close it, or use it as a context manager.

    Raises:
        ConfigurationError: nothing is configured, or the token would be sent in the clear.
    """
    return EverstepClient(config.load(endpoint_url, token))


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class EverstepClient:
    """The service's operations. Thread-safe.

    Args:
        configuration: whom to call, as whom.
        http: another transport, for tests; it must know the base URL.
        pause: waits for so many seconds between two attempts.
    """

    def __init__(self, configuration: config.ClientConfig, *, http: httpx.Client | None = None, pause: Callable[[float], None] = _pause) -> None:
        url = config.checked_endpoint(configuration.endpoint_url)
        # A proxy from the environment has no business between two processes of one machine.
        self._http = http or httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=not is_loopback(url), follow_redirects=False)
        self._headers = {"authorization": f"Bearer {configuration.token}"}
        self._pause = pause
        self.endpoint_url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # Training jobs

    def create_training_job(self, **request: Any) -> Json:
        """Start a training job; the fields are those of `CreateTrainingJobRequest`."""
        return self._call("POST", "/v1/training-jobs", body=request)

    def describe_training_job(self, *, TrainingJobName: str) -> Json:
        """Describe one training job."""
        return self._call("GET", _job(TrainingJobName))

    def list_training_jobs(self, **query: Any) -> Json:
        """List training jobs, newest first: MaxResults, NextToken, StatusEquals, NameContains, FleetName."""
        return self._call("GET", "/v1/training-jobs", query=query)

    def stop_training_job(self, *, TrainingJobName: str) -> Json:
        """Ask a training job to stop at one agreed step."""
        return self._call("POST", _job(TrainingJobName, "stop"), is_repeatable=True)

    def describe_protection(self, *, TrainingJobName: str) -> Json:
        """Describe who holds which shard of a job right now."""
        return self._call("GET", _job(TrainingJobName, "protection"))

    def list_checkpoints(self, *, TrainingJobName: str) -> Json:
        """List a job's checkpoints in S3, newest step first."""
        return self._call("GET", _job(TrainingJobName, "checkpoints"))

    def list_metrics(self, *, TrainingJobName: str, **query: Any) -> Json:
        """List what a job's rank 0 has logged: AfterStep, MaxResults."""
        return self._call("GET", _job(TrainingJobName, "metrics"), query=query)

    def get_waiter(self, name: str) -> Waiter:
        """Return a waiter: training_job_completed, training_job_completed_or_stopped or training_job_ended.

        Args:
            name: which.

        Returns:
            A waiter; its `wait` blocks.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in _WAITERS:
            raise ConfigurationError(f"There is no waiter named {name!r}; there are {', '.join(_WAITERS)}.")
        return Waiter(self, name, self._pause)

    # Logs and outputs

    def list_logs(self, *, TrainingJobName: str) -> Json:
        """List what a job's ranks printed, and what of it is missing."""
        return self._call("GET", _job(TrainingJobName, "logs"))

    def get_log(self, *, TrainingJobName: str, Key: str) -> Iterator[bytes]:
        """Yield one log in chunks, by the key that `list_logs` gave."""
        return self._stream(_job(TrainingJobName, "logs/content"), {"Key": Key})

    def list_outputs(self, *, TrainingJobName: str, **query: Any) -> Json:
        """List the files that a job's ranks left in EVERSTEP_OUTPUT_DIR: MaxResults, NextToken."""
        return self._call("GET", _job(TrainingJobName, "outputs"), query=query)

    def get_output(self, *, TrainingJobName: str, Key: str) -> Iterator[bytes]:
        """Yield one output file in chunks, by the key that `list_outputs` gave."""
        return self._stream(_job(TrainingJobName, "outputs/content"), {"Key": Key})

    def download_outputs(self, *, TrainingJobName: str, Directory: str | os.PathLike[str], Generation: int | None = None) -> list[Path]:
        """Write the outputs of one generation below a directory, as `rank=<r>/<path>`; files that are there are replaced.

        Args:
            TrainingJobName: whose.
            Directory: where to; made if it is missing.
            Generation: which; by default the newest that left anything.

        Returns:
            The files written.

        Raises:
            NotFound: there are no outputs.
            TransferFailed: a file came short, or has a name that leaves the directory.
        """
        entries = list(self.paginate("list_outputs", TrainingJobName=TrainingJobName))
        wanted = Generation if Generation is not None else max((entry["Generation"] for entry in entries), default=None)
        chosen = [entry for entry in entries if entry["Generation"] == wanted]
        if not chosen:
            raise NotFound(
                f"The training job {TrainingJobName!r} has no outputs" + (f" of generation {Generation}." if Generation is not None else "."),
                hint="Outputs are uploaded when the ranks exit: files below EVERSTEP_OUTPUT_DIR.",
            )
        top = Path(Directory)
        return [self._download(TrainingJobName, entry, _below(top, entry["Path"])) for entry in chosen]

    # Incidents and events

    def list_incidents(self, **query: Any) -> Json:
        """List incidents in the order they were opened: TrainingJobName, MaxResults, NextToken."""
        return self._call("GET", "/v1/incidents", query=query)

    def describe_incident(self, *, IncidentId: str) -> Json:
        """Describe one incident."""
        return self._call("GET", f"/v1/incidents/{_part(IncidentId)}")

    def list_events(self, **query: Any) -> Json:
        """List events, oldest first: TrainingJobName, FleetName, AfterEventId, MaxResults, NextToken."""
        return self._call("GET", "/v1/events", query=query)

    # Fleets and nodes

    def create_fleet(self, **request: Any) -> Json:
        """Register an Auto Scaling group as a fleet; the fields are those of `CreateFleetRequest`."""
        return self._call("POST", "/v1/fleets", body=request)

    def describe_fleet(self, *, FleetName: str) -> Json:
        """Describe one fleet."""
        return self._call("GET", f"/v1/fleets/{_part(FleetName)}")

    def list_fleets(self) -> Json:
        """List all fleets."""
        return self._call("GET", "/v1/fleets")

    def update_fleet(self, *, FleetName: str, **request: Any) -> Json:
        """Change a fleet: SpareCount, MinNodeCount, HoldFailedInstances, MaxReplacementsPerHour."""
        return self._call("POST", f"/v1/fleets/{_part(FleetName)}", body=request, is_repeatable=True)

    def unfreeze_fleet(self, *, FleetName: str) -> Json:
        """Say of a fleet most of which is silent: who is silent is gone."""
        return self._call("POST", f"/v1/fleets/{_part(FleetName)}/unfreeze", is_repeatable=True)

    def delete_fleet(self, *, FleetName: str) -> Json:
        """End a fleet's nodes and forget it."""
        return self._call("DELETE", f"/v1/fleets/{_part(FleetName)}")

    def list_nodes(self, **query: Any) -> Json:
        """List nodes, oldest first: FleetName, IncludeEnded."""
        return self._call("GET", "/v1/nodes", query=query)

    def describe_node(self, *, NodeId: str) -> Json:
        """Describe one node."""
        return self._call("GET", f"/v1/nodes/{_part(NodeId)}")

    def release_node(self, *, NodeId: str, **request: Any) -> Json:
        """Let a held node work again, or end its instance: Terminate."""
        return self._call("POST", f"/v1/nodes/{_part(NodeId)}/release", body=request, is_repeatable=True)

    def create_join_token(self, **request: Any) -> Json:
        """Make a join token for a fleet's launch template: FleetName, ExpiresInSeconds."""
        return self._call("POST", "/v1/join-tokens", body=request)

    # Sources and health

    def upload_source(self, *, Directory: str | os.PathLike[str] | None = None, Body: bytes | BinaryIO | None = None) -> Json:
        """Store a user's code; what is stored already is not sent again.

        Args:
            Directory: packed as it is, without version control and caches; links in it are refused.
            Body: instead of a directory, a gzipped tar.

        Returns:
            `{"SourceId": …}`, as `create_training_job(Source=…)` takes it.

        Raises:
            ConfigurationError: both or neither were given.
            SourceRefused: the directory cannot be packed.
            ServiceError: the service does not take it.
        """
        if (Directory is None) == (Body is None):
            raise ConfigurationError("upload_source needs either Directory or Body.")
        with tempfile.TemporaryFile() as archive:
            source_id = sources.pack(Path(Directory), archive) if Directory is not None else _copy(Body, archive)
            try:
                self._call("GET", f"/v1/sources/{source_id}")
            except NotFound:
                self._put_file(f"/v1/sources/{source_id}", archive)
        return {"SourceId": source_id}

    def get_health(self) -> Json:
        """Say whether the service answers, and which version it is."""
        return self._call("GET", "/v1/health")

    def paginate(self, operation: str, **query: Any) -> Iterator[Json]:
        """Yield every item of a list, page by page.

        Args:
            operation: list_training_jobs, list_incidents, list_events or list_outputs.
            **query: its arguments.
        """
        call: Callable[..., Json] = getattr(self, operation)
        while True:
            page = call(**query)
            yield from page[_PAGED[operation]]
            if page.get("NextToken") is None:
                return
            query["NextToken"] = page["NextToken"]

    # How it is called

    def _call(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None, is_repeatable: bool = False
    ) -> Json:
        parameters = {name: _text(value) for name, value in (query or {}).items() if value is not None}

        def send() -> Json:
            return _json(self._http.request(method, path, json=body, params=parameters, headers=self._headers))

        return self._attempt(send, is_repeatable=is_repeatable or method in ("GET", "DELETE"))

    def _put_file(self, path: str, file: BinaryIO) -> None:
        def send() -> Json:
            file.seek(0)
            headers = {**self._headers, "content-type": "application/gzip"}
            return _json(self._http.put(path, content=_chunks(file), headers=headers, timeout=UPLOAD_TIMEOUT))

        self._attempt(send, is_repeatable=True)

    def _attempt(self, send: Callable[[], Json], *, is_repeatable: bool) -> Json:
        """Send once, or until it is answered where sending twice does no harm."""
        pause = FIRST_PAUSE_SECONDS
        for _ in range(ATTEMPTS - 1 if is_repeatable else 0):
            try:
                with self._translated():
                    return send()
            except (Throttled, ServiceUnavailable):
                self._pause(pause)
                pause *= 3
        with self._translated():
            return send()

    def _stream(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        with self._translated(), self._http.stream("GET", path, params=query, headers=self._headers, timeout=UPLOAD_TIMEOUT) as response:
            if not response.is_success:
                response.read()
                raise _error(response)
            yield from response.iter_bytes()

    def _download(self, job: str, entry: Json, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            for chunk in self.get_output(TrainingJobName=job, Key=entry["Key"]):
                file.write(chunk)
            received = file.tell()
        if received != entry["Bytes"]:
            partial.unlink()
            raise TransferFailed(f"{entry['Path']}: {received} of {entry['Bytes']} bytes came.", hint="Try again.")
        partial.replace(path)
        return path

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise ServiceUnavailable(f"{self.endpoint_url} did not answer in time.", hint="Is the control plane overloaded?") from error
        except httpx.TransportError as error:
            raise ServiceUnavailable(
                f"{self.endpoint_url} does not answer: {error}.", hint="Does the control plane run? `everstep local status`, or ask who runs it."
            ) from error


class Waiter:
    """Waits until a training job has ended, as boto3's waiters do. Made by `EverstepClient.get_waiter`."""

    def __init__(self, service: EverstepClient, name: str, pause: Callable[[float], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._wanted = _WAITERS[name]
        self._pause = pause
        self._monotonic = monotonic

    def wait(
        self, *, TrainingJobName: str, WaiterConfig: Mapping[str, float] | None = None, on_progress: Callable[[Json], None] | None = None
    ) -> Json:
        """Wait, through restarts of the control plane of up to a minute.

        Args:
            TrainingJobName: for which job.
            WaiterConfig: `Delay` seconds between two looks (1), `TimeoutSeconds` in all (none).
            on_progress: called with every description, also the last.

        Returns:
            The job's last description.

        Raises:
            WaitFailed: it ended another way, or the time is up.
            ServiceError: the service refuses to tell, or nobody has answered for a minute.
        """
        settings = WaiterConfig or {}
        timeout = settings.get("TimeoutSeconds")
        started_at = seen_at = self._monotonic()
        while True:
            try:
                job = self._service.describe_training_job(TrainingJobName=TrainingJobName)
            except ServiceUnavailable:
                if self._monotonic() - seen_at >= UNANSWERED_SECONDS:
                    raise
            else:
                seen_at = self._monotonic()
                if on_progress is not None:
                    on_progress(job)
                if job["TrainingJobStatus"] in self._wanted:
                    return job
                if job["TrainingJobStatus"] in ENDED:
                    raise WaitFailed(f"The training job {TrainingJobName!r} is {job['TrainingJobStatus']}: {job['Reason']}")
            if timeout is not None and self._monotonic() - started_at >= timeout:
                raise WaitFailed(f"The training job {TrainingJobName!r} has not ended within {timeout:g} s.")
            self._pause(settings.get("Delay", 1.0))


def _job(name: str, rest: str = "") -> str:
    return f"/v1/training-jobs/{_part(name)}" + (f"/{rest}" if rest else "")


def _part(text: str) -> str:
    return quote(text, safe="")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(response: httpx.Response) -> Json:
    if not response.is_success:
        raise _error(response)
    try:
        answer: Json = response.json()
    except ValueError as error:
        raise ServiceFault(f"The answer is not JSON: {response.text[:200]!r}.", hint="Is this the address of an Everstep control plane?") from error
    return answer


def _error(response: httpx.Response) -> ServiceError:
    kind = BY_STATUS.get(response.status_code, ServiceFault)
    try:
        body = response.json()
        fields = [FieldError(field["Field"], field["Message"]) for field in body.get("Fields", [])]
        return kind(body["Message"], hint=body.get("Hint", ""), code=body["Code"], request_id=body["RequestId"], fields=fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return kind(f"HTTP {response.status_code}: {response.text[:200]!r}.", hint="Is this the address of an Everstep control plane?")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(UPLOAD_CHUNK_BYTES):
        yield chunk


def _copy(body: bytes | BinaryIO | None, into: BinaryIO) -> str:
    assert body is not None
    digest = hashlib.sha256()
    for chunk in (body,) if isinstance(body, bytes) else _chunks(body):
        digest.update(chunk)
        into.write(chunk)
    return digest.hexdigest()


def _below(top: Path, path: str) -> Path:
    """Return where a file of the service goes; names come from training scripts and are not trusted."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or any(ord(letter) < 32 for letter in path):
        raise TransferFailed(f"The output {path!r} has a name that is not a clean relative path; it was not written.")
    target = top.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(top.resolve()):
        raise TransferFailed(f"The output {path!r} would be written outside of {top}: something below it is a link.")
    return target
