"""Serves the credentials of a job's role to its ranks, on loopback, for any AWS SDK.

    rank ──GET /role, Authorization: <token of the generation>──▶ 127.0.0.1 ──▶ credentials for an hour at most, as JSON
                                                                      └─AssumeRole─▶ STS

Environment variables of a rank direct its AWS SDK to this server, which acts as a container credential provider. The
port is stored on disk, and the token is derived from the generation's key, so that ranks can also reach this node's
next agent process.

Invariant: a request without the token receives no credentials. No credentials are written to disk or to a log. Source:
AWS SDKs and Tools Reference Guide, `Container credential provider`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from everstep.protocol.plan import GenerationPlan
from worker.errors import StorageError
from worker.node.stable_port import KeptPort
from worker.storage.aws import Aws, JobPrincipal, RoleKeys
from worker.tasks import end

log = logging.getLogger(__name__)

RENEW_SECONDS: Final = 1200.0
"""The server renews credentials that are valid for less than this time. SDKs request new ones in the last 900 s."""
STS_RETRY_SECONDS: Final = 5.0
"""Pause between two requests for new credentials while STS does not answer."""
MAX_REQUEST_BYTES: Final = 16 * 1024
REQUEST_SECONDS: Final = 5.0
HOST: Final = "127.0.0.1"
PATH: Final = "/role"


class RoleCredentials:
    """Server for the role credentials of one generation at a time, owned by the agent's `Supplies` object."""

    def __init__(self, state: Path, aws: Aws, now: Callable[[], float]) -> None:
        self._port = KeptPort(state / "credentials_port")
        self._aws = aws
        self._now = now
        self._server: asyncio.Server | None = None
        self._token = b""
        """The token that each request must contain; empty while no generation may receive credentials."""
        self._principal = JobPrincipal(project="", job="", run="")
        self._keys: RoleKeys | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self.refused_count = 0

    async def begin(self, plan: GenerationPlan, key: bytes) -> RoleKeys:
        """Assume a job's role, and serve its credentials from now on. Raises StorageError with AWS's message."""
        await self.adopt(plan, key)
        self._keys = await asyncio.to_thread(self._aws.assume_role, self._principal)
        return self._keys

    async def adopt(self, plan: GenerationPlan, key: bytes) -> None:
        """Serve credentials to ranks that an earlier agent process started; assume the role at their first request."""
        await self.withdraw()
        self._principal = JobPrincipal.of(plan)
        if self._server is None:
            self._server = await self._listen()
        self._token = token_of(plan, key).encode()

    def variables(self) -> dict[str, str]:
        """Return the variables with which a rank's AWS SDK requests credentials from this server."""
        assert self._server is not None, "it was begun"
        port = self._server.sockets[0].getsockname()[1]
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{HOST}:{port}{PATH}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": self._token.decode(),
        }

    async def withdraw(self) -> None:
        """Stop serving the credentials of the job's role. The caller has ended the ranks of the generation."""
        self._token, self._keys, self._asked_at = b"", None, float("-inf")
        renewing, self._renewing = self._renewing, None
        await end(renewing)

    async def idle(self) -> None:
        """Wait until no request to STS for new role credentials is in progress."""
        if self._renewing is not None:
            await asyncio.wait([self._renewing])

    async def close(self) -> None:
        """Stop listening for ranks' requests. Later requests reach the node's next agent process at the same port."""
        await self.withdraw()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _listen(self) -> asyncio.Server:
        kept = self._port.read()
        try:
            server = await asyncio.start_server(self._serve, HOST, kept, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            if not kept:
                raise
            log.warning(
                "another process uses port %d of the earlier agent, so running ranks receive no new credentials: %s",
                kept,
                error,
            )
            server = await asyncio.start_server(self._serve, HOST, 0, limit=MAX_REQUEST_BYTES)
        self._port.keep(server.sockets[0].getsockname()[1])
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            status, answer = await self._answer(head)
            body = json.dumps(answer).encode()
            fields = (
                f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: "
                "close\r\n\r\n"
            )
            writer.write(fields.encode() + body)
            await writer.drain()
        writer.close()

    async def _answer(self, head: bytes) -> tuple[str, dict[str, str]]:
        request, *lines = head.split(b"\r\n")
        given = [
            value.strip()
            for name, _, value in (line.partition(b":") for line in lines)
            if name.strip().lower() == b"authorization"
        ]
        if not (self._token and len(given) == 1 and hmac.compare_digest(given[0], self._token)):
            self.refused_count += 1
            return "401 Unauthorized", {"code": "Unauthorized", "message": "this is no token of a job that runs here"}
        if request.split(b" ")[:2] != [b"GET", PATH.encode()]:
            return "404 Not Found", {"code": "NotFound", "message": f"GET {PATH}"}
        try:
            keys = await self._current()
        except StorageError as error:
            return "503 Service Unavailable", {"code": type(error).__name__, "message": str(error)}
        return "200 OK", {
            "AccessKeyId": keys.access_key_id,
            "SecretAccessKey": keys.secret_access_key,
            "Token": keys.session_token,
            "Expiration": datetime.fromtimestamp(keys.expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "RoleArn": self._principal.role_arn,
        }

    async def _current(self) -> RoleKeys:
        left = self._keys.expires_at - self._now() if self._keys is not None else 0.0
        is_idle = self._renewing is None or self._renewing.done()
        if left < RENEW_SECONDS and is_idle and (left <= 0 or self._now() - self._asked_at >= STS_RETRY_SECONDS):
            self._asked_at = self._now()
            self._renewing = asyncio.create_task(self._renew(), name="keys of a role")
            self._renewing.add_done_callback(_retrieve_exception)
        # SDKs wait only two seconds, so the current credentials are returned while they are valid.
        if left <= 0 and self._renewing is not None:
            await asyncio.shield(self._renewing)
        assert self._keys is not None, "they were there, or have come"
        return self._keys

    async def _renew(self) -> None:
        try:
            self._keys = await asyncio.to_thread(self._aws.assume_role, self._principal)
        except StorageError as error:
            log.warning("the credentials of %s cannot be renewed: %s", self._principal.role_arn, error)
            raise


def token_of(plan: GenerationPlan, key: bytes) -> str:
    """Return the token with which a generation's ranks request role credentials, derived from the generation's key."""
    return hmac.digest(key, f"credentials of run {plan.run} generation {plan.generation}".encode(), "sha256").hex()


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # Otherwise asyncio logs the error.
