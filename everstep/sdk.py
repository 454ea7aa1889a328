"""The client of the service: boto3's own, over the service model that is made from the API.

    import everstep
    client = everstep.client()
    source = client.upload_source(Directory="examples/char_gpt")
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=4)
    client.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName="gpt")

What boto3 does not do by itself is added the way boto3 adds it to S3's client: requests are held against the whole
contract before they are sent, `upload_source` packs a directory, `download_outputs` writes files, and `follow_events`
reads the stream of events.

Invariant: the token goes over https, or to this machine, and nowhere else; nothing of the user's AWS configuration is
read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader

from everstep import config, event_stream, exchanges, sources, uploads, validation
from everstep.aws_models import DATA, SERVICE
from everstep.errors import ConfigurationError, NothingToDownload, TransferFailed
from everstep.protocol.loopback import is_loopback

if TYPE_CHECKING:
    from everstep.service import EverstepClient

Json = dict[str, Any]

REGION: Final = "us-east-1"
"""botocore wants one; the service has none."""
CHUNK_BYTES: Final = 1024 * 1024
SIGNED_ADDRESSES: Final = 2
"""An upload that took so long that its address has expired is tried once more with another one."""
_DEFAULTS: Final = Config(
    connect_timeout=5,
    read_timeout=60,
    retries={"mode": "standard", "total_max_attempts": 4},
    user_agent_extra="everstep",
    max_pool_connections=32,
)
IMPATIENT: Final = Config(connect_timeout=1, read_timeout=2, retries={"mode": "standard", "total_max_attempts": 1})
"""For what may as well not be known: completion at a prompt."""
_UNREAD: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}
"""A profile that does not exist, or one that is meant for AWS, is not the business of this client."""


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
        endpoint_url: of the service; by default from the environment or the user's configuration, see
            `everstep.config`.
        token: by default from there, too.
        profile_name: one that `everstep configure --profile` wrote down; it wins over the environment.
        region_name: what the client says its region is, as boto3's clients do; the service has none.
        ca_bundle: PEM file with the authority of the service's certificate, where it is not one that everybody knows;
            by default from there, too.
        config: botocore's settings, as timeouts and retries; they win over Everstep's own.

    Returns:
        A client, thread-safe as boto3's are.

    Raises:
        ConfigurationError: nothing is configured, or the token would be sent in the clear.
    """
    found = _configuration(endpoint_url, token, ca_bundle, profile_name)
    settings = _DEFAULTS.merge(Config(signature_version=UNSIGNED))
    if is_loopback(found.endpoint_url):
        # A proxy from the environment has no business between two processes of one machine.
        settings = settings.merge(Config(proxies={}))
    session = botocore.session.Session(session_vars=_UNREAD)
    session.register_component("data_loader", _loader())
    session.register(f"creating-client-class.{SERVICE}", _add_conveniences)
    made = session.create_client(
        SERVICE,
        region_name=region_name or REGION,
        endpoint_url=found.endpoint_url,
        verify=found.ca_bundle,
        config=settings.merge(config) if config else settings,
    )
    add_to(made, found.token)
    exchanges.watch(made)
    made.everstep_configuration = found
    return cast("EverstepClient", made)


def add_to(client: Any, token: str) -> None:
    """Let a client of the service send a token, and check requests before they are sent.

    Args:
        client: a botocore client of this service.
        token: the bearer token.
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
    """Loads one service. botocore's own loader lists the folders of all AWS services three times for each client."""

    def list_available_services(self, type_name: str) -> list[str]:  # noqa: ARG002  # botocore's signature
        return [SERVICE]


@functools.cache
def _loader() -> Loader:
    """Read botocore's data once for all clients; ours first: an older version may have installed its model in ~/.aws/models."""
    return _Loader(extra_search_paths=[str(DATA)])


def _require_ours(http_response: Any, **_: Any) -> None:
    """Refuse a success that is not the service's: botocore takes any page for an answer without members."""
    if http_response.status_code < 300 and http_response.url and "x-amzn-requestid" not in http_response.headers:
        raise ConfigurationError(
            f"What {http_response.url} answers is not Everstep's.",
            hint="Is this the address of an Everstep control plane?",
        )


def _add_conveniences(base_classes: list[type], **_: Any) -> None:
    base_classes.insert(0, Conveniences)


class Conveniences:
    """What the client does beyond single operations. Mixed into botocore's class."""

    def upload_source(
        self, *, Directory: str | os.PathLike[str] | None = None, Body: bytes | BinaryIO | None = None
    ) -> Json:
        """Store a user's code; what is stored already is not sent again.

        It goes straight into S3 where that can be reached, else by the service.

        Args:
            Directory: packed as it is, without version control, caches and what `.everstepignore` names; links in it
                are refused.
            Body: instead of a directory, a gzipped tar.

        Returns:
            `{"SourceId": …}`, as `create_training_job(Source=…)` takes it.

        Raises:
            ConfigurationError: both or neither were given.
            SourceRefused: the directory cannot be packed.
            ClientError: the service does not take it.
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
        """Follow what happens, as it happens: events as ListEvents has them.

        Args:
            TrainingJobName: only of this training job.
            FleetName: only of this fleet.
            AfterEventId: begin behind this event; by default with what happens from now on.

        Returns:
            An iterator without an end, to be closed. Where it breaks, go on with its `last_event_id`.

        Raises:
            ClientError: the service refuses.
            EndpointConnectionError: it does not answer.
        """
        query = {"TrainingJobName": TrainingJobName, "FleetName": FleetName, "AfterEventId": AfterEventId}
        asked = {name: value for name, value in query.items() if value is not None}
        return event_stream.EventStream(cast(Any, self).everstep_configuration, asked)

    def download_outputs(
        self, *, TrainingJobName: str, Directory: str | os.PathLike[str], Generation: int | None = None
    ) -> list[Path]:
        """Write the outputs of one generation below a directory, as `rank=<r>/<path>`; files that are there are replaced.

        Args:
            TrainingJobName: whose.
            Directory: where to; made if it is missing.
            Generation: which; by default the newest that left anything.

        Returns:
            The files written.

        Raises:
            ConfigurationError: Directory is a file.
            NothingToDownload: there are no outputs.
            TransferFailed: a file came short, or has a name that leaves the directory.
        """
        top = Path(Directory)
        if top.exists() and not top.is_dir():
            raise ConfigurationError(
                f"{top} is a file.", hint="Name a directory for the outputs, or one that does not exist yet."
            )
        service = cast(Any, self)
        entries = list(
            service.get_paginator("list_outputs").paginate(TrainingJobName=TrainingJobName).search("Outputs[]")
        )
        wanted = Generation if Generation is not None else max((entry["Generation"] for entry in entries), default=None)
        chosen = [entry for entry in entries if entry["Generation"] == wanted]
        if not chosen:
            raise NothingToDownload(
                f"The training job {TrainingJobName!r} has no outputs"
                + (f" of generation {Generation}." if Generation is not None else "."),
                hint="Outputs are uploaded when the ranks exit: files below EVERSTEP_OUTPUT_DIR.",
            )
        return [_download(service, TrainingJobName, entry, _below(top, entry["Path"])) for entry in chosen]


def _store(service: Any, source_id: str, archive: BinaryIO) -> None:
    size = archive.seek(0, os.SEEK_END)
    for _ in range(SIGNED_ADDRESSES):
        made = service.create_source(SourceId=source_id, Bytes=size)
        if made["IsStored"]:
            return
        if "Upload" not in made:
            break
        outcome = uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], archive)
        if outcome is uploads.Outcome.TAKEN:
            service.complete_source(SourceId=source_id)
            return
        if outcome is uploads.Outcome.NOT_TAKEN:
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
        raise TransferFailed(f"{entry['Path']}: {received} of {entry['Bytes']} bytes came.", hint="Try again.")
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
    """Return where a file of the service goes; names come from training scripts and are not trusted."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or any(ord(letter) < 32 for letter in path):
        raise TransferFailed(f"The output {path!r} has a name that is not a clean relative path; it was not written.")
    target = top.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(top.resolve()):
        raise TransferFailed(f"The output {path!r} would be written outside of {top}: something below it is a link.")
    return target
