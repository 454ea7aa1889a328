"""Defines the settings of a server, from the command line and the environment."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from control_plane.cloud.connection import LOCAL_REGION, CloudMode, CloudSettings
from control_plane.cloud.sinks import ARN
from control_plane.db.retention import DEFAULT, RowRetention
from everstep.host.local_keys import LocalKeys
from everstep.host.loopback import is_loopback, is_this_machine, url_host
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN


class InvalidSettings(Exception):
    """The settings contradict each other or are incomplete. The message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one server. A consistent object, checked before the server opens a file, database or socket."""

    state_directory: Path
    bucket: str
    mode: CloudMode = CloudMode.AWS
    region: str = ""
    """AWS region, required in AWS mode. In local mode, that of the simulated AWS."""
    aws_endpoint_url: str | None = None
    aws_s3_endpoint_url: str | None = None
    """None: S3 is at `aws_endpoint_url`."""
    aws_keys: LocalKeys | None = None
    """Keys of the simulated AWS. None in AWS mode, where boto3 finds the instance's credentials."""
    secrets_prefix: str = ""
    """Prefix in AWS Secrets Manager. Empty: the secrets are files in the state directory."""
    server_secret: str = field(default="", repr=False)
    """64 hexadecimal digits. Empty: a file or Secrets Manager has it."""
    admin_token: str = field(default="", repr=False)
    """Token of the first administrator. Empty: the first start generates it."""
    server_id: str = ""
    """32 hexadecimal digits. Empty: a file in the state directory has it."""
    database_url: str = ""
    """SQLAlchemy URL. Empty: SQLite in the state directory."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: the kernel chooses one."""
    replica_url: str = ""
    """URL at which other servers reach this one. Empty: the address that it listens on."""
    events_queue_url: str = ""
    """SQS queue of AWS events from EventBridge. Empty: the server only polls AWS."""
    event_exports: tuple[str, ...] = ()
    """ARNs of EventBridge buses that receive events."""
    otlp_endpoint: str = ""
    """Base URL of an OTLP/HTTP collector. Empty: no traces."""
    is_other_host_allowed: bool = False
    """Whether the server may listen beyond loopback without TLS."""
    tls_host: str = ""
    """Further address at `port` with a certificate of the installation's own authority. Empty: none."""
    tls_certificate: Path | None = None
    """PEM file, with intermediate certificates."""
    tls_key: Path | None = None
    trusted_proxies: tuple[str, ...] = ("127.0.0.1",)
    """Addresses and networks (CIDR) whose X-Forwarded-For and X-Forwarded-Proto the server believes."""
    detection_seconds: float = 3.0
    """Target time to detect a failure, from which all timeouts follow."""
    max_source_bytes: int = 256 * 1024 * 1024
    max_body_bytes: int = 1024 * 1024
    retention: RowRetention = DEFAULT
    """Limits of the rows in growing tables."""

    def __post_init__(self) -> None:
        if not self.bucket:
            raise InvalidSettings("a bucket is needed for sources, logs, outputs and checkpoints: --bucket NAME")
        if self.mode is CloudMode.LOCAL and not self.aws_endpoint_url:
            raise InvalidSettings("local mode needs --aws-endpoint-url on this machine (127.0.0.0/8 or ::1)")
        for option, url, is_of_cloud in (
            ("--aws-endpoint-url", self.aws_endpoint_url, True),
            ("--aws-s3-endpoint-url", self.aws_s3_endpoint_url, True),
            ("--events-queue-url", self.events_queue_url, True),
            ("--replica-url", self.replica_url, False),
            ("--otlp-endpoint", self.otlp_endpoint, False),
        ):
            if self.mode is CloudMode.LOCAL and is_of_cloud and url and not is_loopback(url):
                raise InvalidSettings(f"local mode needs {option} on this machine (127.0.0.0/8 or ::1), not {url!r}")
            if url and not url_host(url):
                raise InvalidSettings(f"{option} {url!r} is not an http or https URL")
        if self.mode is not CloudMode.LOCAL and self.aws_keys is not None:
            raise InvalidSettings(
                "--aws-keys-file is for --mode local: on AWS the server uses the credentials of its instance or "
                "environment"
            )
        if self.mode is CloudMode.LOCAL:
            object.__setattr__(self, "region", self.region or LOCAL_REGION)
        elif not self.region:
            raise InvalidSettings("a server on AWS needs a region: --region or AWS_REGION")
        for arn in self.event_exports:
            match = ARN.fullmatch(arn)
            if match is None:
                raise InvalidSettings(f"--export-events {arn!r} is not the ARN of an EventBridge bus")
            if match["region"] != self.region:
                raise InvalidSettings(f"--export-events {arn} is in {match['region']}, this server in {self.region}")
        if self.server_id and re.fullmatch(r"[0-9a-f]{32}", self.server_id) is None:
            raise InvalidSettings(f"--server-id {self.server_id!r} does not consist of 32 hexadecimal digits")
        if self.server_secret and re.fullmatch(r"[0-9a-fA-F]{64}", self.server_secret) is None:
            raise InvalidSettings(
                "EVERSTEP_SERVER_SECRET does not consist of 64 hexadecimal digits: create it with "
                "`openssl rand -hex 32`"
            )
        if self.admin_token and re.fullmatch(r"est_[A-Za-z0-9_-]{32,128}", self.admin_token) is None:
            raise InvalidSettings(
                "EVERSTEP_ADMIN_TOKEN is not est_ and at least 32 letters, digits, - or _: create it with "
                '`echo "est_$(openssl rand -hex 32)"`'
            )
        if self.secrets_prefix and re.fullmatch(r"[A-Za-z0-9/_+=.@-]{1,256}", self.secrets_prefix) is None:
            raise InvalidSettings(f"--secrets-prefix {self.secrets_prefix!r} cannot begin the name of a secret")
        if len(set(self.event_exports)) != len(self.event_exports):
            raise InvalidSettings("--export-events contains the same ARN twice")
        if self.tls_host:
            try:
                address = ipaddress.ip_address(self.tls_host)
            except ValueError as error:
                raise InvalidSettings(f"--tls-host {self.tls_host!r} is not an IP address") from error
            if address.is_unspecified or self.host in (self.tls_host, "0.0.0.0", "::") or self.has_tls:
                raise InvalidSettings(
                    "--tls-host is one address of this machine, in addition to another --host without --tls-certificate"
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidSettings("--tls-certificate and --tls-key must be set together")
        if not self.has_tls and not self.is_other_host_allowed and not is_this_machine(self.host):
            raise InvalidSettings(
                f"--host {self.host} can be reached from other machines, and bearer tokens would cross the "
                "network unencrypted. Give it "
                "a certificate (--tls-certificate, --tls-key), a TLS proxy in front of 127.0.0.1, or pass "
                "--allow-non-loopback if you trust the network"
            )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise InvalidSettings(
                    f"--trusted-proxies {proxy!r} is neither an IP address nor a network, for example 10.0.0.0/16: "
                    f"{error}"
                ) from error
        for limit in fields(self.retention):
            if getattr(self.retention, limit.name) < 1:
                raise InvalidSettings(f"--keep {limit.name}={getattr(self.retention, limit.name)}: the minimum is 1")
        if not 0 <= self.port <= 65_535:
            raise InvalidSettings(f"--port {self.port} is not a port")

    @property
    def has_tls(self) -> bool:
        """Whether the server accepts HTTPS only."""
        return self.tls_certificate is not None

    @property
    def default_max_slowdown(self) -> float:
        """Default limit of the slowdown by snapshots, as a fraction of the mean iteration; 100 % in local mode."""
        # In local mode, all nodes share one machine's cores, so measured step times are not reliable.
        return 1.0 if self.mode is CloudMode.LOCAL else DEFAULT_MAX_SLOWDOWN

    @property
    def cloud(self) -> CloudSettings:
        """Settings of the cloud connection."""
        return CloudSettings(
            mode=self.mode,
            region=self.region,
            endpoint_url=self.aws_endpoint_url,
            s3_endpoint_url=self.aws_s3_endpoint_url,
            keys=self.aws_keys,
        )

    @property
    def database(self) -> str:
        """URL of the database: `database_url`, or a SQLite file in the state directory."""
        return self.database_url or embedded_database(self.state_directory)


def embedded_database(state_directory: Path) -> str:
    """Return the URL of the SQLite database in a state directory."""
    return f"sqlite:///{state_directory / 'everstep.db'}"
