"""AWS clients of the agent for S3, secrets and roles: plain boto3 clients with explicit time-outs.

Invariant: in local mode (EVERSTEP_LOCAL=1), the agent sends bytes only to loopback addresses. No error text and no
`repr` contains credentials or the value of a secret.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import boto3
import botocore.session
from botocore.config import Config
from botocore.configprovider import ConstantProvider
from botocore.credentials import Credentials, ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError

from everstep.host.loopback import is_loopback
from everstep.protocol.plan import GenerationPlan
from worker.errors import (
    BucketMissing,
    ForbiddenEndpoint,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    StoreDenied,
    StoreRefused,
    StoreUnavailable,
)
from worker.storage.object_store import ObjectStore

# AWS allows at most one hour if one role assumes another role (IAM User Guide, role chaining).
ROLE_SECONDS = 3600
_CONNECT_TIMEOUT_SECONDS = 5
_READ_TIMEOUT_SECONDS = 30
_PROBE_TIMEOUT_SECONDS = 2
_MAX_ATTEMPTS = 4
_METADATA_ATTEMPTS = 3
"""Attempts to read the instance's own credentials, each of at most one second. botocore's default is one attempt."""
_MISSING = frozenset(
    {
        "NoSuchKey",
        "404",
        "NotFound",
        "ResourceNotFoundException",
        "ParameterNotFound",
        "ParameterVersionNotFound",
    }
)
_CHANGED = frozenset({"PreconditionFailed", "412"})
_DENIED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "403",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
    }
    | {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "UnrecognizedClientException"}
    | {"DecryptionFailure"}  # Secrets Manager cannot use the secret's KMS key.
)
_BUSY = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequestsException",
        "ServiceUnavailable",
        "InternalError",
    }
    | {"InternalServiceError", "InternalServerError"}
    | {"NoSuchUpload"}  # A lifecycle rule of the bucket may have ended the upload. A new upload may succeed.
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKeys:
    """Short-lived AWS credentials of a role."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: float
    """Unix time at which the credentials expire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrincipal:
    """Names the run of a job, and its role, for which a node calls AWS. CloudTrail and policies see these names."""

    project: str
    job: str
    run: str
    role_arn: str = ""
    """A role that the node's role may assume. Empty: the node's own permissions."""

    @classmethod
    def of(cls, plan: GenerationPlan) -> JobPrincipal:
        """Return the principal of the run that a plan belongs to."""
        return cls(project=plan.script.project, job=plan.job, run=plan.run, role_arn=plan.script.role_arn)

    @property
    def session_name(self) -> str:
        """Name of the role's session: 2 to 64 characters that STS allows."""
        return re.sub(r"[^A-Za-z0-9_+=,.@-]", "-", f"everstep-{self.job}")[:64]

    @property
    def session_tags(self) -> Mapping[str, str]:
        """Tags of the role's session, as in `aws:PrincipalTag/everstep:project`. No tag for an empty project."""
        values = {"everstep:project": self.project, "everstep:job": self.job, "everstep:run": self.run}
        return {key: value for key, value in values.items() if value}

    @property
    def reader(self) -> str:
        """Project and role, whose permissions decide what may be read. Different readers share no fetched data."""
        return f"{self.project or self.run} {self.role_arn}"


KeysOf = Callable[[], RoleKeys]

_REGION = "The bucket is in another region. Set AWS_REGION of the agent to the bucket's region."
_KEYS = "Check the credentials of the node: its role, or its access keys."
_ADVICE = {
    "AccessDenied": "Allow this call to the node's role, and for an encrypted bucket the use of its KMS key.",
    "AuthorizationHeaderMalformed": _REGION,
    "ExpiredToken": _KEYS,
    "InternalError": "The store failed by itself. The agent tries again. See the store's log, and its free space.",
    "InvalidAccessKeyId": _KEYS,
    "KMS": "Enable the KMS key of the bucket, and allow the node's role to use it.",
    "NoSuchBucket": "Create the bucket, or correct the name in the job's request.",
    "PermanentRedirect": _REGION,
    "RequestTimeTooSkewed": "Synchronize the node's clock, for example with chrony.",
    "SignatureDoesNotMatch": _KEYS,
    "SlowDown": "S3 limits the request rate of a prefix. The agent tries again.",
}
_NO_SPACE = "The store has no free space. Delete old checkpoints, or add space. The agent tries again."
_NO_SPACE_STATUS = 507
"""HTTP status of a store without free space (RFC 4918, section 11.5). AWS S3 never answers with this status."""


class Aws(Protocol):
    """Interface to the AWS services except the object store. `tests/contract/test_aws.py` tests every implementation.

    The subtype of a StorageError shows whether to retry; its text is AWS's message.
    """

    def secret(self, reference: str, keys: RoleKeys | None) -> str:
        """Return the value of a secret, with the node's own credentials if `keys` is None. Raises StorageError."""

    def assume_role(self, principal: JobPrincipal) -> RoleKeys:
        """Return credentials of a role for `ROLE_SECONDS`, requested with the node's own. Raises StorageError.

        The role's trust policy must permit `sts:TagSession`.
        """

    def objects(self, principal: JobPrincipal) -> ObjectStore:
        """Return the object store with a role's permissions, which renews the credentials. Raises StorageError."""


@dataclass(frozen=True, slots=True)
class SecretPlace:
    """The service, name and region of a secret, parsed from a reference in the job's request."""

    service: str
    """boto3's name of the service: `secretsmanager` or `ssm`."""
    name: str
    region: str | None = None
    """None for the node's region."""

    @classmethod
    def of(cls, reference: str) -> SecretPlace:
        """Parse a valid reference: `secretsmanager:NAME`, `ssm:NAME` or an ARN."""
        if reference.startswith("arn:"):
            _, _, service, region, *_ = reference.split(":")
            return cls(service, reference, region)
        service, _, name = reference.partition(":")
        return cls(service, name)


def aws_client(
    service: str,
    environment: Mapping[str, str],
    *,
    region: str | None = None,
    keys: KeysOf | None = None,
    is_probe: bool = False,
    **options: Any,
) -> Any:
    """Return a client for AWS or for the service at AWS_ENDPOINT_URL, without sending a request.

    `region` is None for the environment's region. botocore calls `keys` again before the credentials expire; with None,
    the client uses the credentials of the environment or the instance, as soon as they exist. A probe sends each
    request once, and waits only briefly.

    Raises ForbiddenEndpoint if EVERSTEP_LOCAL=1 and the endpoint is not on loopback.
    """
    endpoint = environment.get(f"AWS_ENDPOINT_URL_{_VARIABLES[service]}") or environment.get("AWS_ENDPOINT_URL", "")
    is_local = environment.get("EVERSTEP_LOCAL") == "1"
    if is_local and not is_loopback(endpoint):
        raise ForbiddenEndpoint(
            f"local mode uses loopback endpoints only, but the endpoint of {service} is {endpoint or 'that of AWS'}. "
            "Set AWS_ENDPOINT_URL to the local cloud, or unset EVERSTEP_LOCAL."
        )
    session = botocore.session.Session()
    if is_local or is_loopback(endpoint):
        for variable in ("config_file", "credentials_file"):
            session.set_config_variable(variable, os.devnull)
        # AWS_PROFILE names a section of the AWS config files, which are disabled above.
        session.get_component("config_store").set_config_provider("profile", ConstantProvider(None))
    session.set_config_variable("metadata_service_num_attempts", _METADATA_ATTEMPTS)
    renewed = RefreshableCredentials.create_from_metadata
    session._credentials = (  # botocore has no public function to replace the credentials
        _OwnKeys(session) if keys is None else renewed(_metadata(keys), partial(_metadata, keys), "everstep-role")
    )
    has_own = keys is not None
    client = boto3.Session(
        botocore_session=session,
        aws_access_key_id=None if has_own else environment.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=None if has_own else environment.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=None if has_own else environment.get("AWS_SESSION_TOKEN"),
        region_name=region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"),
    ).client(
        service,
        endpoint_url=endpoint or None,
        config=Config(
            connect_timeout=_PROBE_TIMEOUT_SECONDS if is_probe else _CONNECT_TIMEOUT_SECONDS,
            read_timeout=_PROBE_TIMEOUT_SECONDS if is_probe else _READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 1 if is_probe else _MAX_ATTEMPTS},
            proxies={} if is_loopback(endpoint) else None,
            user_agent_extra="everstep",
            **options,
        ),
    )
    if is_local and not is_loopback(client.meta.endpoint_url):
        raise ForbiddenEndpoint(
            f"local mode uses loopback endpoints only, but botocore has resolved {client.meta.endpoint_url}"
        )
    return client


class _OwnKeys(Credentials):  # type: ignore[misc]  # botocore has no type annotations
    """The node's own credentials. Each AWS call looks them up until a lookup succeeds."""

    def __init__(self, session: botocore.session.Session) -> None:
        super().__init__("", "", method="everstep-own")
        self._session = session
        self._lock = threading.Lock()
        self._found: Credentials | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials | None:
        with self._lock:
            if self._found is None:
                # botocore looks credentials up once per client, but a booting instance may receive its credentials
                # later.
                self._found = self._session.get_component("credential_provider").load_credentials()
        return self._found.get_frozen_credentials() if self._found is not None else None


def _metadata(keys: KeysOf) -> dict[str, str]:
    """Return the credentials from `keys` in the form that botocore expects when it renews credentials."""
    made = keys()
    return {
        "access_key": made.access_key_id,
        "secret_key": made.secret_access_key,
        "token": made.session_token,
        "expiry_time": datetime.fromtimestamp(made.expires_at, UTC).isoformat(),
    }


_VARIABLES = {"s3": "S3", "secretsmanager": "SECRETS_MANAGER", "ssm": "SSM", "sts": "STS"}


@contextmanager
def aws_errors(what: str) -> Iterator[None]:
    """Translate boto3's errors into subtypes of `StorageError`, whose text begins with the name `what`.

    Raises StorageError; the subtype shows whether to retry.
    """
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        known = "KMS" if code.startswith("KMS.") else code
        words = _NO_SPACE if status == _NO_SPACE_STATUS else _ADVICE.get(known)
        advice = f". {words}" if words else ""
        raise _kind(code, status)(f"{what}: {error}{advice}") from error
    except PartialCredentialsError as error:
        raise StoreDenied(f"{what}: {error}") from error
    except (
        NoCredentialsError,
        CredentialRetrievalError,
    ) as error:
        # A retry can succeed, because the instance's metadata service may provide credentials later.
        raise StoreUnavailable(f"{what}: {error}") from error
    except (
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        ReadTimeoutError,
        ResponseParserError,
        ResponseStreamingError,
    ) as error:
        raise StoreUnavailable(f"{what}: {error}") from error
    except BotoCoreError as error:
        raise StoreRefused(f"{what}: {error}") from error


def _kind(code: str, status: int) -> type[StorageError]:
    if code == "NoSuchBucket":
        return BucketMissing
    if code in _MISSING:
        return ObjectMissing
    if code in _CHANGED:
        return ObjectChanged
    if code in _DENIED or code.startswith("KMS."):
        return StoreDenied
    if code in _BUSY or status >= 500 or status == 429:
        return StoreUnavailable
    return StoreDenied if status in (401, 403) else StoreRefused
