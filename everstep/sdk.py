"""Creates the service's client: a boto3 client, built from a service model that is generated from the API.

    import everstep
    client = everstep.client()
    source = client.upload_source(Directory="examples/char_gpt")
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=4)
    client.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName="gpt")

The client checks each request against the whole API contract before sending it. It has three methods in addition to the
API's operations:

- `upload_source` packs and uploads a directory.
- `download_outputs` writes a job's outputs to files.
- `follow_events` reads the event stream.

Invariant: the token is sent over https or to this machine only. The client ignores the user's AWS configuration.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader

from everstep import config, event_stream, exchanges, sources, uploads, validation
from everstep.aws_models import DATA, SERVICE
from everstep.errors import ConfigurationError, NothingToDownload, TransferFailed
from everstep.host.loopback import is_loopback

if TYPE_CHECKING:
    from everstep.service import EverstepClient  # pyright: ignore[reportMissingModuleSource]  only a stub exists

Json = dict[str, Any]

REGION: Final = "us-east-1"
"""Name of the region if the caller passes none. botocore requires a name, although the service has no regions."""
CHUNK_BYTES: Final = 1024 * 1024
SKIPPED_SHOWN: Final = 5
"""Maximum number of files that an error about a download names."""
SIGNED_ADDRESSES: Final = 2
"""Upper limit of signed URLs that the client requests for one upload.

A URL may expire during a slow upload.
"""
_DEFAULTS: Final = Config(
    connect_timeout=5,
    read_timeout=60,
    retries={"mode": "standard", "total_max_attempts": 4},
    user_agent_extra="everstep",
    max_pool_connections=32,
)
IMPATIENT: Final = Config(connect_timeout=1, read_timeout=2, retries={"mode": "standard", "total_max_attempts": 1})
"""botocore settings for optional requests that must not delay the user, such as shell completion."""
_UNREAD: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}
"""Session settings with which botocore ignores the user's AWS profile and files."""


def client(
    endpoint_url: str | None = None,
    token: str | None = None,
    *,
    profile_name: str | None = None,
    region_name: str | None = None,
    ca_bundle: str | None = None,
    config: Config | None = None,
) -> EverstepClient:
    """Return a boto3 client of the service.

    Args:
        endpoint_url: URL of the service. Default: from the environment or the user's configuration, see
            `everstep.config`.
        token: bearer token. Default: from the same sources.
        profile_name: profile written by `everstep configure --profile`. It overrides the environment.
        region_name: value of the client's `meta.region_name`, as in boto3. It has no other effect, because the service
            has no regions. Default: `REGION`.
        ca_bundle: PEM file with the certificate authority, if it is not a public one. Default: from the same sources.
        config: botocore settings, such as timeouts and retries. They override Everstep's defaults.

    Returns:
        A client, thread-safe like boto3's clients.

    Raises:
        ConfigurationError: no endpoint or token is configured, or the token would cross a network unencrypted.
    """
    found = _configuration(endpoint_url, token, ca_bundle, profile_name)
    settings = _DEFAULTS.merge(Config(signature_version=UNSIGNED))
    if is_loopback(found.endpoint_url):
        # Use no proxy for a service on this machine.
        settings = settings.merge(Config(proxies={}))
    with _SESSION_LOCK:
        made = shared_session().create_client(
            SERVICE,
            region_name=region_name or REGION,
            endpoint_url=found.endpoint_url,
            verify=found.ca_bundle,
            config=settings.merge(config) if config else settings,
        )
    add_to(made, found.token)
    exchanges.watch(made)
    cast(Any, made).everstep_configuration = found
    return cast("EverstepClient", made)


def add_to(client: Any, token: str) -> None:
    """Make a client send a token and check its requests before sending them.

    Args:
        client: a botocore client of this service.
        token: bearer token for the Authorization header; sent only to endpoints that `checked_endpoint` accepts.
    """

    def sign(request: Any, **_: Any) -> None:
        config.checked_endpoint(request.url)
        request.headers["Authorization"] = f"Bearer {token}"

    client.meta.events.register(f"before-sign.{SERVICE}", sign)
    client.meta.events.register_first(f"before-parameter-build.{SERVICE}", validation.check)
    client.meta.events.register(f"after-call.{SERVICE}", _require_ours)


def _configuration(
    endpoint_url: str | None, token: str | None, ca_bundle: str | None, profile: str | None
) -> config.ClientConfig:
    return config.load(endpoint_url, token, ca_bundle=ca_bundle, profile=profile)


class _Loader(Loader):  # type: ignore[misc]  # botocore has no types
    """Loads the model of one service.

    It replaces botocore's own loader, which is slow: it lists the directories of all AWS services three times per
    client.
    """

    def list_available_services(self, type_name: str) -> list[str]:  # noqa: ARG002  # botocore's signature
        return [SERVICE]


_SESSION_LOCK: Final = threading.Lock()
"""Held while the session makes a client, because botocore's sessions are not thread-safe."""


@functools.cache
def shared_session() -> botocore.session.Session:
    """Return the session that all clients share. The caller must hold `_SESSION_LOCK`.

    Clients share a session, because a session takes longer to create than a client. The session's loader searches the
    service model of this package first, because ~/.aws/models may contain an older version.
    """
    session = botocore.session.Session(session_vars=_UNREAD)
    session.register_component("data_loader", _Loader(extra_search_paths=[str(DATA)]))
    session.register(f"creating-client-class.{SERVICE}", _add_conveniences)
    return session


def _require_ours(http_response: Any, **_: Any) -> None:
    """Raise an error if a successful response does not come from an Everstep server.

    If an operation has no output, botocore would accept any web page as its response.
    """
    if http_response.status_code < 300 and http_response.url and "x-amzn-requestid" not in http_response.headers:
        raise ConfigurationError(
            f"The response of {http_response.url} is not from Everstep.",
            hint="Is this the address of an Everstep control plane?",
        )


def _add_conveniences(base_classes: list[type], **_: Any) -> None:
    base_classes.insert(0, Conveniences)


class Conveniences:
    """Methods of the client in addition to the API's operations. botocore's client class inherits them."""

    def upload_source(
        self, *, Directory: str | os.PathLike[str] | None = None, Body: bytes | BinaryIO | None = None
    ) -> Json:
        """Store the user's code in the service, unless the service already has the same archive.

        The client uploads directly to S3 if S3 is reachable. Otherwise it uploads through the service.

        `everstep.sources` documents what a packed directory leaves out. A directory with links is rejected.

        Args:
            Directory: directory to pack; None if `Body` is given.
            Body: content of a gzipped tar, as an alternative to `Directory`.

        Returns:
            `{"SourceId": …}`, for `create_training_job(Source=…)`.

        Raises:
            ConfigurationError: the caller passed both arguments or neither.
            SourceRefused: the directory cannot be packed.
            ClientError: the service rejects the source.
        """
        if (Directory is None) == (Body is None):
            raise ConfigurationError("upload_source needs either Directory or Body.")
        service = cast(Any, self)
        with tempfile.TemporaryFile() as archive:
            source_id = sources.pack(Path(Directory), archive) if Directory is not None else _copy(Body, archive)
            _store(service, source_id, archive)
        return {"SourceId": source_id}

    def follow_events(
        self, *, TrainingJobName: str | None = None, FleetName: str | None = None, AfterEventId: int | None = None
    ) -> event_stream.EventStream:
        """Follow events as they happen, in the format of ListEvents.

        Args:
            TrainingJobName: name of the only training job whose events are returned. Default: all jobs.
            FleetName: name of the only fleet whose events are returned. Default: all fleets.
            AfterEventId: id of the event that precedes the first returned event. Default: only events from now on.

        Returns:
            An endless iterator, which the caller must close. To continue after an error, pass the iterator's
            `last_event_id` as AfterEventId.

        Raises:
            ClientError: the service rejects the request, or later ends the stream.
            EndpointConnectionError: the service does not respond.
            urllib3.exceptions.HTTPError: raised by the iterator if the connection breaks.
        """
        query = {"TrainingJobName": TrainingJobName, "FleetName": FleetName, "AfterEventId": AfterEventId}
        asked = {name: value for name, value in query.items() if value is not None}
        return event_stream.EventStream(cast(Any, self).everstep_configuration, asked)

    def download_outputs(
        self, *, TrainingJobName: str, Directory: str | os.PathLike[str], Generation: int | None = None
    ) -> list[Path]:
        """Write a job's outputs below a directory, as `rank=<r>/<path>`: of each path, the newest generation's file.

        Existing files are replaced.

        Args:
            TrainingJobName: job to download from; it may still run.
            Directory: target directory, created if missing.
            Generation: number of the only generation whose outputs are written. Default: all.

        Returns:
            The written files.

        Raises:
            ConfigurationError: Directory is a file.
            NothingToDownload: the job, or the requested generation, has no outputs.
            ClientError: the service rejects a request, for example because the job does not exist.
            OSError: the disk is full.
            TransferFailed: a file is incomplete, cannot be written, or has a name that leads outside the directory. The
                method has then written all other files.
        """
        top = Path(Directory)
        if top.exists() and not top.is_dir():
            raise ConfigurationError(
                f"{top} is a file.", hint="Pass a directory for the outputs, or a path that does not exist yet."
            )
        service = cast(Any, self)
        entries = service.get_paginator("list_outputs").paginate(TrainingJobName=TrainingJobName).search("Outputs[]")
        wanted = [entry for entry in entries if Generation in (None, entry["Generation"])]
        chosen = {entry["Path"]: entry for entry in sorted(wanted, key=itemgetter("Generation"))}.values()
        if not chosen:
            raise NothingToDownload(
                f"The training job {TrainingJobName!r} has no outputs"
                + (f" of generation {Generation}." if Generation is not None else "."),
                hint="Outputs are uploaded when the ranks exit: files below EVERSTEP_OUTPUT_DIR, and those of --keep.",
            )
        written: list[Path] = []
        skipped: list[str] = []
        for entry in chosen:
            try:
                written.append(_download(service, TrainingJobName, entry, _below(top, entry["Path"])))
            except (OSError, TransferFailed) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                skipped.append(
                    str(error) if isinstance(error, TransferFailed) else f"{entry['Path']}: {error.strerror}."
                )
        if skipped:
            more = f" … and {len(skipped) - SKIPPED_SHOWN} more." if len(skipped) > SKIPPED_SHOWN else ""
            raise TransferFailed(
                f"{len(skipped)} of {len(chosen)} files are not in {top}: {' '.join(skipped[:SKIPPED_SHOWN])}{more}",
                hint="The other files are complete. `everstep jobs output` repeats the download.",
            )
        return written


def _store(service: Any, source_id: str, archive: BinaryIO) -> None:
    size = archive.seek(0, os.SEEK_END)
    for _ in range(SIGNED_ADDRESSES):
        made = service.create_source(SourceId=source_id, Bytes=size)
        if made["IsStored"]:
            return
        if "Upload" not in made:
            break
        outcome = uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], archive)
        if outcome is uploads.UploadOutcome.TAKEN:
            service.complete_source(SourceId=source_id)
            return
        if outcome is uploads.UploadOutcome.NOT_TAKEN:
            break
    archive.seek(0)
    service.put_source(SourceId=source_id, Body=archive)


def _download(service: Any, job: str, entry: Json, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    received = 0
    with partial.open("wb") as file:
        for chunk in service.get_output(TrainingJobName=job, Key=entry["Key"])["Body"].iter_chunks(CHUNK_BYTES):
            file.write(chunk)
            received += len(chunk)
    if received != entry["Bytes"]:
        partial.unlink()
        raise TransferFailed(f"{entry['Path']}: received {received} of {entry['Bytes']} bytes.", hint="Try again.")
    partial.replace(path)
    return path


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _copy(body: bytes | BinaryIO | None, into: BinaryIO) -> str:
    assert body is not None
    digest = hashlib.sha256()
    for chunk in (body,) if isinstance(body, bytes) else _chunks(body):
        digest.update(chunk)
        into.write(chunk)
    return digest.hexdigest()


def _below(top: Path, path: str) -> Path:
    """Return the local path of an output, and reject a name that leads outside of `top`.

    The check is needed because training scripts choose the names.

    Args:
        top: local folder that receives the outputs.
        path: name of the output: a path relative to `top`, with `/` between its parts.

    Returns:
        The path of the local file, below `top`.

    Raises:
        TransferFailed: `path` is not a normalized relative path, or leads through a link to a place outside of `top`.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or any(ord(letter) < 32 for letter in path):
        raise TransferFailed(f"The output {path!r} was not written: its name is not a normalized relative path.")
    target = top.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(top.resolve()):
        raise TransferFailed(
            f"The output {path!r} would be written outside of {top}, because a path component is a link."
        )
    return target
