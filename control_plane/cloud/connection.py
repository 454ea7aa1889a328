"""Makes the boto3 clients of the control plane, and translates botocore's exceptions into `CloudError`.

Invariant: code outside this package gets no botocore client and no botocore exception.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from http.client import HTTPException
from typing import Any, Final

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from control_plane.cloud.call_meter import BUDGETS, THROTTLED_CODES, CallMeter
from control_plane.cloud.credentials import SEARCH_SECONDS, LateCredentials
from control_plane.cloud.errors import (
    AccessDenied,
    CapacityError,
    CloudError,
    CloudUnavailable,
    EndpointRefused,
    GarbledAnswer,
    InvalidRequest,
    NoCredentials,
    NotFound,
    ObjectChanged,
    RegionUnknown,
    ResourceContended,
    Throttled,
)
from everstep.host.local_keys import LocalKeys
from everstep.host.loopback import is_loopback, url_host

log = logging.getLogger(__name__)

LOCAL_REGION: Final = "us-east-1"
NO_KEYS: Final = LocalKeys(access_key_id="none", secret_access_key="none")
"""Keys that the local cloud rejects. Without any keys, botocore would search for the user's own AWS keys."""
CONNECT_TIMEOUT_SECONDS: Final = 3.0
READ_TIMEOUT_SECONDS: Final = 20.0
MAX_ATTEMPTS: Final = 3


class CloudMode(StrEnum):
    """The cloud that the control plane uses: the local cloud on this machine, or AWS with boto3's credentials."""

    LOCAL = "local"
    AWS = "aws"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """The settings of the cloud to which the server connects."""

    mode: CloudMode
    region: str = ""
    """AWS region. Required in AWS mode. In local mode, an empty region means `LOCAL_REGION`."""
    endpoint_url: str | None = None
    """URL of the cloud's API. Required in local mode. Normally None in AWS mode."""
    s3_endpoint_url: str | None = None
    """URL of another S3 server. None: S3 is at `endpoint_url`."""
    keys: LocalKeys | None = None
    """The access key of the local cloud. Unused in AWS mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudIdentity:
    """The account, region and endpoint of a cloud. A server logs these at its start."""

    account: str
    region: str
    endpoint: str

    def __str__(self) -> str:
        return f"AWS account {self.account}, region {self.region}, endpoint {self.endpoint}"


class Connection:
    """Makes boto3 clients for one cloud.

    Thread-safe after construction. The object keeps one client per service. `max_attempts` are the attempts per call,
    including the first. botocore waits between two attempts. `search_pause` is the shortest time in seconds between two
    searches for credentials, while there are none.

    Raises:
        EndpointRefused: the mode is local, and the endpoint is missing or not on this machine. No request was made.
        RegionUnknown: the mode is AWS, and the settings name no region.
    """

    def __init__(
        self, settings: CloudSettings, *, max_attempts: int = MAX_ATTEMPTS, search_pause: float = SEARCH_SECONDS
    ) -> None:
        for url in (settings.endpoint_url, settings.s3_endpoint_url or settings.endpoint_url):
            if settings.mode is CloudMode.LOCAL and not (url and is_loopback(url)):
                raise EndpointRefused(f"local mode needs an endpoint on this machine (127.0.0.0/8 or ::1), not {url!r}")
        if settings.mode is CloudMode.LOCAL:
            settings = replace(settings, region=settings.region or LOCAL_REGION)
        elif not settings.region:
            raise RegionUnknown("a connection to AWS needs a region")
        self.settings = settings
        self._max_attempts = max_attempts
        core = _local_session() if settings.mode is CloudMode.LOCAL else _aws_session(search_pause)
        self._session = boto3.Session(botocore_session=core, region_name=settings.region, **self._keys())
        self._clients: dict[str, Any] = {}
        # The local cloud throttles calls as AWS does, and tests count the throttled calls. Budgets would prevent these
        # calls, so the meter has none with the local cloud.
        self.meter = CallMeter(BUDGETS if settings.mode is CloudMode.AWS else {})
        # Clients are thread-safe, but sessions are not. Therefore the constructor makes all clients before any thread
        # uses them.
        for service in ("autoscaling", "ec2", "events", "logs", "s3", "secretsmanager", "sqs", "sts"):
            self._clients[service] = self._make(service)

    def client(self, service: str) -> Any:
        """Return the boto3 client of an AWS service, such as `ec2`. The constructor has made all clients."""
        return self._clients[service]

    def identify(self) -> CloudIdentity:
        """Ask STS for the AWS account of the credentials, and log account, region and endpoint.

        Raises CloudError if STS did not answer, or the process has no credentials.
        """
        with translated():
            account = self.client("sts").get_caller_identity()["Account"]
        identity = CloudIdentity(
            account=account, region=self.settings.region, endpoint=self.settings.endpoint_url or "AWS's own"
        )
        log.info("cloud: %s", identity)
        return identity

    def _keys(self) -> dict[str, str]:
        if self.settings.mode is CloudMode.AWS:
            return {}
        keys = self.settings.keys or NO_KEYS
        return {"aws_access_key_id": keys.access_key_id, "aws_secret_access_key": keys.secret_access_key}

    def _make(self, service: str) -> Any:
        is_local = self.settings.mode is CloudMode.LOCAL
        endpoint_url = (service == "s3" and self.settings.s3_endpoint_url) or self.settings.endpoint_url
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": self._max_attempts},
            max_pool_connections=32,
            user_agent_extra="everstep",
            user_agent_appid=_replica(),  # CloudTrail lists this name of the calling server.
            # Presigned URLs need signature version 4, which covers length and checksum. They also need the region's own
            # host: S3 redirects some requests to the global host, and a redirect invalidates the signature.
            signature_version="s3v4" if service == "s3" else None,
            s3={"addressing_style": "path" if endpoint_url else "virtual"},
            proxies={} if is_local else None,
        )
        client = self._session.client(service, endpoint_url=endpoint_url, config=config)
        self.meter.watch(client, service)
        if is_local:
            client.meta.events.register_first("before-send.*", _refuse_elsewhere)
        return client


def _replica() -> str:
    """Return the name under which AWS's logs show the calls of this process. botocore accepts at most 50 characters."""
    return f"everstep-{socket.gethostname()[:30]}-{os.getpid()}"


@contextmanager
def translated() -> Iterator[None]:
    """Translate botocore's exceptions. Raises the subclass of CloudError for AWS's error code or the failure."""
    try:
        yield
    except ClientError as error:
        raise from_client_error(error) from error
    except NoCredentialsError as error:
        raise NoCredentials(str(error)) from error
    except PartialCredentialsError as error:
        raise AccessDenied(str(error)) from error
    except ParamValidationError as error:
        raise InvalidRequest(str(error)) from error
    except ResponseParserError as error:
        raise GarbledAnswer(str(error)) from error
    except (BotoCoreError, HTTPError, HTTPException, OSError) as error:
        # BotoCoreError includes connection errors and timeouts. While a body is read, urllib3's errors also get here.
        raise CloudUnavailable(str(error)) from error


def from_client_error(error: ClientError) -> CloudError:
    """Return the `CloudError` whose subclass matches AWS's error code, with AWS's own message."""
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    message = f"{error.operation_name}: {details.get('Message') or code or 'no message'}"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return _kind(code, message, status)(message, code=code)


def _kind(code: str, message: str, status: int) -> type[CloudError]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code.startswith("KMS."):  # S3 returns a `KMS.…` error if the caller may not use the key of an encrypted bucket.
        return AccessDenied
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    # Auto Scaling has no error code for missing resources. It returns ValidationError with the text "… not found".
    if code == "ValidationError" and "not found" in message.lower():
        return NotFound
    return CloudUnavailable if status >= 500 else InvalidRequest


_CODES: Final[tuple[tuple[type[CloudError], str], ...]] = (
    (Throttled, " ".join(THROTTLED_CODES)),
    (
        CapacityError,
        "InsufficientInstanceCapacity InstanceLimitExceeded VcpuLimitExceeded MaxSpotInstanceCountExceeded "
        "LimitExceeded",
    ),
    (
        ResourceContended,
        "ResourceContention ScalingActivityInProgress ResourceInUse ConditionalRequestConflict OperationAborted",
    ),
    (
        AccessDenied,
        "AccessDenied AccessDeniedException UnauthorizedOperation AuthFailure OptInRequired SignatureDoesNotMatch",
    ),
    (AccessDenied, "ExpiredToken ExpiredTokenException RequestExpired InvalidClientTokenId InvalidAccessKeyId"),
    (
        AccessDenied,
        "UnrecognizedClientException InvalidSignatureException MissingAuthenticationToken "
        "MissingAuthenticationTokenException",
    ),
    (NotFound, "NoSuchKey NoSuchBucket InvalidInstanceID.NotFound ResourceNotFoundException 404"),
    (ObjectChanged, "PreconditionFailed 412"),
    (CloudUnavailable, "RequestTimeout ServiceUnavailable InternalError InternalFailure"),
)
_BY_CODE: Final = {code: kind for kind, codes in _CODES for code in codes.split()}
_BY_STATUS: Final[dict[int, type[CloudError]]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    429: Throttled,
}


def _aws_session(search_pause: float) -> botocore.session.Session:
    session = botocore.session.Session()
    session.register_component("credential_provider", LateCredentials(pause=search_pause))
    return session


def _local_session() -> botocore.session.Session:
    unread = {
        "profile": (None, None, None, None),
        "config_file": (None, None, "/dev/null", None),
        "credentials_file": (None, None, "/dev/null", None),
        "ca_bundle": (None, None, None, None),
    }
    return botocore.session.Session(session_vars=unread)


def _refuse_elsewhere(request: Any, **_: object) -> None:
    if not is_loopback(request.url):
        raise EndpointRefused(f"local mode refuses to send a request to {url_host(request.url)}")
