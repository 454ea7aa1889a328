"""Creates environment variables and AWS clients for the local cloud, isolated from the user's AWS settings.

Invariant: no client of the local cloud ever reaches real AWS. Clients refuse to send a request to another machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.session
import httpx
from botocore.config import Config

from everstep.host.local_keys import LocalKeys
from everstep.host.loopback import is_loopback, url_host
from infra.local_cloud.errors import LocalEndpointRefused
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
"""Variables that would give an AWS client other keys, TLS settings or endpoints than the local cloud's."""


def aws_variables(endpoint_url: str, keys: LocalKeys) -> dict[str, str]:
    """Return the variables that direct any AWS tool to the local cloud only.

    Raises LocalEndpointRefused if the endpoint is not on this machine.
    """
    if not is_loopback(endpoint_url):
        raise LocalEndpointRefused(f"the local cloud is on this machine only, not at {endpoint_url!r}")
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


def process_environment(marker: str) -> dict[str, str]:
    """Return a new environment for a process, without the user's AWS settings and configuration files.

    `marker` is the state directory, by which `down` finds the process after a crash.
    """
    own_bin = str(Path(sys.executable).parent)
    return {
        **{name: os.environ[name] for name in INHERITED if name in os.environ},
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
    """Return a boto3 client of the local cloud, which refuses to send a request to another machine.

    Raises LocalEndpointRefused if the endpoint is not on this machine.
    """
    if not is_loopback(endpoint_url):
        raise LocalEndpointRefused(f"the local cloud is on this machine only, not at {endpoint_url!r}")
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
    """Send a signed request to a path below `/_everstep/` of a local AWS, and return the answer, also an error.

    The signature covers `url` with its query and `content`. `timeout_seconds` limits each of connecting, sending and
    receiving. Raises httpx.TransportError if the local AWS did not answer.
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
        raise LocalEndpointRefused(
            f"a request to {url_host(request.url)} was refused: the local cloud is on this machine only"
        )
