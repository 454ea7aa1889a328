"""The agent's firewall rule refuses only requests of the ranks' user to the instance metadata service.

The metadata service is simulated in a network namespace of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.local_cloud import network
from tests.integration.worker.own_mounts import in_own_mounts, may_have_one
from worker.node.metadata_rule import ADDRESSES, exposure_of, is_covered, keep_away, keep_on
from worker.node.rank_user import RankUser, run_as

OBSTACLE = network.obstacle()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(OBSTACLE is not None or not may_have_one(), reason=f"no network namespaces here: {OBSTACLE}"),
]
RANKS, OTHERS = RankUser(61_234, 61_234), RankUser(61_235, 61_235)
PYTHON = (Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve())
_CLONE_NEWNET = 0x40000000
ASK = """
import http.client, sys
for address in sys.argv[1:]:
    line = http.client.HTTPConnection(f"[{address}]" if ":" in address else address, timeout=20)
    try:
        line.request("GET", "/latest/meta-data/iam/security-credentials/node")
        print(line.getresponse().read().decode())
    except OSError as error:
        print(error.strerror)
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def own_network() -> int:
    """Move the calling thread into an empty network, and return the thread's id."""
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
    ip("link", "set", "lo", "up")
    return threading.get_native_id()


def serve(family: int, address: str) -> socket.socket:
    """Answer every request at an address of the calling thread's network, until the returned socket is shut down."""
    listener = socket.create_server((address, 80), family=family)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                with line:
                    line.recv(4096)
                    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nkeys")

    threading.Thread(target=answer).start()
    return listener


@contextlib.asynccontextmanager
async def metadata_service() -> AsyncIterator[None]:
    """Run the metadata service, at both its addresses, at the other end of this thread's only network link."""
    own_network()
    with ThreadPoolExecutor(1) as far_end:
        thread = far_end.submit(own_network).result()
        ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(thread))
        for words in ("addr add 10.9.0.1/24 dev near", "addr add fd09::1/64 dev near nodad", "link set near up"):
            ip(*words.split())

        def begin() -> list[socket.socket]:
            for address in ("10.9.0.2/24", "fd09::2/64", *ADDRESSES.values()):
                ip("addr", "add", address, "dev", "far", *(["nodad"] if ":" in address else []))
            ip("link", "set", "far", "up")
            return [
                serve(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in ADDRESSES.values()
            ]

        listeners = far_end.submit(begin).result()
        ip("route", "add", "default", "via", "10.9.0.2")
        ip("-6", "route", "add", "default", "via", "fd09::2")
        try:
            yield
        finally:
            for listener in listeners:
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()


def told(user: RankUser) -> list[str]:
    """Return the service's answers to a user that requests the credentials of the node's role, one per address."""
    return run_as(user, ASK, *ADDRESSES.values()).stdout.splitlines()


def told_root() -> list[str]:
    words = [sys.executable, "-I", "-S", "-c", ASK, *ADDRESSES.values()]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


def rules() -> list[str]:
    return [line for family in ADDRESSES for line in ip(family, "rule").splitlines() if "prohibit" in line]


def test_ranks_are_refused_and_nobody_else() -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        async with metadata_service():
            assert told(RANKS) == ["keys", "keys"], "without the rule they are served"
            assert keep_away(RANKS) == ""
            assert told(RANKS) == ["Permission denied", "Permission denied"]
            assert told(OTHERS) == told_root() == ["keys", "keys"]
            assert keep_away(RANKS) == "", "again: nothing is made twice"
            assert len(rules()) == 2
            ip("rule", "del", "pref", "1")
            changes: asyncio.Queue[str] = asyncio.Queue()
            again = asyncio.create_task(keep_on(RANKS, "what was told before", changes.put_nowait, seconds=0.0))
            assert await changes.get() == ""
            assert len(rules()) == 2
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)
            assert told(RANKS) == ["Permission denied", "Permission denied"]

    in_own_mounts(body, *PYTHON)


def test_where_no_rule_can_be_made_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        async with metadata_service():
            with monkeypatch.context() as patched:
                patched.setenv("PATH", str(disk))
                reason = keep_away(RANKS)
            assert reason.startswith("169.254.169.254 can be reached; fd00:ec2::254 can be reached; ip: ")
            assert exposure_of(reason).startswith("ranks can reach this instance's metadata")
            ip("route", "del", "default")
            with monkeypatch.context() as patched:
                patched.setenv("PATH", str(disk))
                reason = keep_away(RANKS)
            assert reason.startswith("169.254.169.254 Network is unreachable; "), "there may be a route later"

    in_own_mounts(body, *PYTHON)


@pytest.mark.parametrize(
    ("endpoint", "covered"),
    [
        ("http://169.254.169.254", True),
        ("http://[fd00:ec2::254]", True),
        ("http://127.0.0.2:8100", False),
        (None, False),
    ],
)
def test_only_ec2s_own_addresses_are_covered(endpoint: str | None, covered: bool) -> None:
    assert is_covered(endpoint) is covered
