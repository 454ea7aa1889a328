"""AWS as an agent speaks to it: S3, secrets and roles, through plain boto3 clients with explicit time-outs.

Invariant: in local mode no byte leaves for an address that is not loopback; this is checked on the endpoint that
botocore has resolved, before the first call. No value of a secret and no key is part of an error or of anything's
`repr`.
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

from everstep.protocol.loopback import is_loopback
from worker.errors import (
    ForbiddenEndpoint,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    StoreDenied,
    StoreRefused,
    StoreUnavailable,
)
from worker.storage.object_store import ObjectStore

ROLE_SECONDS = 3600
"""How long a role's keys are good for: the longest that a role assumed with another role's keys may have (IAM User Guide, role chaining)."""
_CONNECT_TIMEOUT_SECONDS = 5
_READ_TIMEOUT_SECONDS = 30
_MAX_ATTEMPTS = 4
_METADATA_ATTEMPTS = 3
"""At the instance's own keys, a second each; botocore makes one."""
_MISSING = frozenset(
    {
        "NoSuchKey",
        "NoSuchBucket",
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
    | {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "UnrecognizedClientException"}
)
_BUSY = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "Throttling",
        "ThrottlingException",
        "ServiceUnavailable",
        "InternalError",
    }
    | {"InternalServiceError", "InternalServerError"}
    | {"NoSuchUpload"}  # a rule of the bucket has ended it, say: another upload may do
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKeys:
    """The short-lived keys of a role."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: float
    """Unix time."""


KeysOf = Callable[[], RoleKeys]


class Aws(Protocol):
    """What an agent needs of AWS besides its object store.

    One suite holds every implementation to this: `tests/contract/test_aws.py`.
    """

    def secret(self, reference: str, keys: RoleKeys | None) -> str:
        """Read a secret.

        Args:
            reference: as `CreateTrainingJobRequest.secrets` has it.
            keys: to read it with; None: the node's own.

        Returns:
            Its value.

        Raises:
            StorageError: of the type that says what can be done about it, in AWS's words.
        """

    def assume_role(self, role_arn: str, session_name: str) -> RoleKeys:
        """Have keys of a role, with the node's own.

        Args:
            role_arn: which.
            session_name: shown in CloudTrail.

        Returns:
            Keys for `ROLE_SECONDS`.

        Raises:
            StorageError: of the type that says what can be done about it, in AWS's words.
        """

    def objects(self, role_arn: str, session_name: str) -> ObjectStore:
        """Return S3 as a role sees it, with keys that are renewed for as long as it is used.

        Args:
            role_arn: which.
            session_name: shown in CloudTrail.

        Returns:
            The store; nothing has been sent yet but for the keys.

        Raises:
            StorageError: of the type that says what can be done about it, in AWS's words.
        """


@dataclass(frozen=True, slots=True)
class SecretPlace:
    """Where a secret is."""

    service: str
    """`secretsmanager` or `ssm`, as boto3 names them."""
    name: str
    """Its name or ARN."""
    region: str | None = None
    """Of its ARN; None: the node's."""

    @classmethod
    def of(cls, reference: str) -> SecretPlace:
        """Return the place that `secretsmanager:NAME`, `ssm:NAME` or an ARN means.

        The contract's pattern has been checked.
        """
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
    **options: Any,
) -> Any:
    """Return a client of AWS, or of what stands for it at AWS_ENDPOINT_URL.

    With EVERSTEP_LOCAL=1, or against any endpoint on loopback, the user's own AWS configuration files are not read.

    Args:
        service: boto3's name.
        environment: the agent's.
        region: None: that of the environment.
        keys: gives them, and again before they end; None: those of the environment or the instance, as soon as there
            are any.
        **options: of botocore's configuration, besides ours.

    Returns:
        The client; nothing has been sent yet.

    Raises:
        ForbiddenEndpoint: EVERSTEP_LOCAL=1, and the endpoint is not on loopback.
    """
    endpoint = environment.get(f"AWS_ENDPOINT_URL_{_VARIABLES[service]}") or environment.get("AWS_ENDPOINT_URL", "")
    is_local = environment.get("EVERSTEP_LOCAL") == "1"
    if is_local and not is_loopback(endpoint):
        raise ForbiddenEndpoint(
            f"local mode speaks to loopback only, and the endpoint of {service} is {endpoint or 'that of AWS'}"
        )
    session = botocore.session.Session()
    if is_local or is_loopback(endpoint):
        for variable in ("config_file", "credentials_file"):
            session.set_config_variable(variable, os.devnull)
        session.get_component("config_store").set_config_provider(
            "profile", ConstantProvider(None)
        )  # AWS_PROFILE names one of the files
    session.set_config_variable("metadata_service_num_attempts", _METADATA_ATTEMPTS)
    renewed = RefreshableCredentials.create_from_metadata
    session._credentials = (  # botocore has no public way
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
            connect_timeout=_CONNECT_TIMEOUT_SECONDS,
            read_timeout=_READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
            proxies={} if is_loopback(endpoint) else None,
            user_agent_extra="everstep",
            **options,
        ),
    )
    if is_local and not is_loopback(client.meta.endpoint_url):
        raise ForbiddenEndpoint(
            f"local mode speaks to loopback only, and botocore has resolved {client.meta.endpoint_url}"
        )
    return client


class _OwnKeys(Credentials):  # type: ignore[misc]  # botocore has no types
    """The node's own keys, looked for until there are any.

    A client keeps what it was made with, and an instance may have none yet when it boots.
    """

    def __init__(self, session: botocore.session.Session) -> None:
        super().__init__("", "", method="everstep-own")
        self._session = session
        self._lock = threading.Lock()
        self._found: Credentials | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials | None:
        """Return what botocore signs a call with; None: with nothing, and it raises NoCredentialsError."""
        with self._lock:
            if self._found is None:
                self._found = self._session.get_component("credential_provider").load_credentials()
        return self._found.get_frozen_credentials() if self._found is not None else None


def _metadata(keys: KeysOf) -> dict[str, str]:
    """Return keys as botocore wants them from whoever renews them."""
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
    """Turn what boto3 raises into what the caller can act on.

    Args:
        what: is asked for, at the beginning of the error.

    Yields:
        Nothing.

    Raises:
        StorageError: of the type that says what can be done about it.
    """
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise _kind(code, status)(f"{what}: {error}") from error
    except PartialCredentialsError as error:
        raise StoreDenied(f"{what}: {error}") from error
    except (
        NoCredentialsError,
        CredentialRetrievalError,
    ) as error:  # of the instance's metadata, which may have them later
        raise StoreUnavailable(f"{what}: {error}") from error
    except (ConnectionError, HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError) as error:
        raise StoreUnavailable(f"{what}: {error}") from error
    except BotoCoreError as error:
        raise StoreRefused(f"{what}: {error}") from error


def _kind(code: str, status: int) -> type[StorageError]:
    if code in _MISSING:
        return ObjectMissing
    if code in _CHANGED:
        return ObjectChanged
    if code in _DENIED:
        return StoreDenied
    return StoreUnavailable if code in _BUSY or status >= 500 or status == 429 else StoreRefused


def session_name_of(job: str) -> str:
    """Return the name of a job's session of its role: 2 to 64 characters of those that STS takes."""
    return re.sub(r"[^A-Za-z0-9_+=,.@-]", "-", f"everstep-{job}")[:64]
