"""The environment of everything local: what points at the local cloud, and what keeps the user's own AWS settings out.

Invariant: the local AWS can never be real AWS. Clients get endpoint, region and keys explicitly and refuse any other
machine before the first request; processes get an environment made from nothing, in which no AWS file of the user is
read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.session
import httpx
from botocore.config import Config

from everstep.protocol.local_keys import LocalKeys
from everstep.protocol.loopback import is_loopback, url_host
from infra.local_cloud.errors import EndpointRefused
from infra.local_cloud.signatures import signed_headers

REGION: Final = "us-east-1"
INHERITED: Final = (
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "TORCH_EXTENSIONS_DIR",
    "OMP_NUM_THREADS",
    "CC",
    "CXX",
)
POISONOUS: Final = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CA_BUNDLE",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_EC2",
    "AWS_ENDPOINT_URL_AUTO_SCALING",
    "AWS_ENDPOINT_URL_STS",
)
"""Variables that would lead a client away from the endpoint it was pointed at."""


def aws_variables(endpoint_url: str, keys: LocalKeys) -> dict[str, str]:
    """Return the variables that point any AWS tool at the local cloud and at nothing else.

    Args:
        endpoint_url: the local cloud.
        keys: that it accepts.

    Returns:
        Variables for a process or a shell.

    Raises:
        EndpointRefused: the endpoint is not on this machine.
    """
    if not is_loopback(endpoint_url):
        raise EndpointRefused(f"the local cloud is on this machine only, not at {endpoint_url!r}")
    return {
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def process_environment(marker: str, user: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a local process, made from nothing.

    Args:
        marker: the state directory; every process of this local cloud carries it, so that it can be found after any
            crash.
        user: the user's own environment, of which a few harmless variables are passed on; None for this process's.

    Returns:
        Variables without any AWS setting except that no AWS file is read.
    """
    user = os.environ if user is None else user
    own_bin = str(Path(sys.executable).parent)
    return {
        **{name: user[name] for name in INHERITED if name in user},
        "PATH": os.pathsep.join(
            [own_bin, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        ),
        "PYTHONUNBUFFERED": "1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "EVERSTEP_LOCAL": "1",
        "EVERSTEP_LOCAL_CLUSTER": marker,
    }


def local_client(service: str, endpoint_url: str, keys: LocalKeys) -> Any:
    """Return a boto3 client of the local cloud that reads nothing of the user's AWS settings.

    Args:
        service: `s3`, `ec2`, `autoscaling` …
        endpoint_url: the local cloud.
        keys: that it accepts.

    Returns:
        The client; each request is refused if it would leave this machine.

    Raises:
        EndpointRefused: the endpoint is not on this machine.
    """
    if not is_loopback(endpoint_url):
        raise EndpointRefused(f"the local cloud is on this machine only, not at {endpoint_url!r}")
    unread = {
        "profile": (None, None, None, None),
        "config_file": (None, None, "/dev/null", None),
        "credentials_file": (None, None, "/dev/null", None),
        "ca_bundle": (None, None, None, None),
    }
    session = boto3.Session(
        botocore_session=botocore.session.Session(session_vars=unread),
        region_name=REGION,
        aws_access_key_id=keys.access_key_id,
        aws_secret_access_key=keys.secret_access_key,
    )
    config = Config(
        connect_timeout=3,
        read_timeout=20,
        retries={"mode": "standard", "total_max_attempts": 3},
        s3={"addressing_style": "path"},
        proxies={},
    )
    client = session.client(service, endpoint_url=endpoint_url, config=config)
    client.meta.events.register_first("before-send.*", _refuse_elsewhere)
    return client


def ask(method: str, url: str, content: bytes, keys: LocalKeys, *, timeout_seconds: float = 10.0) -> httpx.Response:
    """Send a signed request to a path below `/_everstep/` of a local AWS.

    Args:
        method: of HTTP.
        url: with its query.
        content: the body.
        keys: the cluster's own.
        timeout_seconds: for each of connecting, sending and receiving.

    Returns:
        The answer, whatever its status.

    Raises:
        httpx.TransportError: no answer.
    """
    return httpx.request(
        method,
        url,
        content=content,
        headers=signed_headers(method, url, content, keys),
        timeout=timeout_seconds,
        trust_env=False,
    )


def _refuse_elsewhere(request: Any, **_: object) -> None:
    if not is_loopback(request.url):
        raise EndpointRefused(
            f"a request to {url_host(request.url)} was refused: the local cloud is on this machine only"
        )
