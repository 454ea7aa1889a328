"""HAProxy with the configuration in infra/haproxy, before two servers on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.ports import ReservedPort

CONFIGURATION: Final = Path(__file__).parents[2] / "infra" / "haproxy" / "haproxy.cfg"
WHAT_TO_INSTALL: Final = "the test needs HAProxy 2.4 or newer: apt-get install haproxy"
_KEEPER: Final = """
trap '' INT TERM
"$1" -db -f "$2" &
haproxy=$!
read -r _
kill -9 $haproxy 2>/dev/null
wait $haproxy 2>/dev/null
"""


def program() -> str:
    """Return the path of HAProxy. Debian installs it in a folder that is not on every user's PATH."""
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        raise FileNotFoundError(WHAT_TO_INSTALL)
    return found


class Balancer:
    """A load balancer. The method `start` starts it once the servers' URLs are known.

    The object is a context manager, which stops the load balancer at the end of the block.
    """

    def __init__(self) -> None:
        self._program = program()
        self._port: ReservedPort | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(30)
        if self._port is not None:
            self._port.close()

    def start(self, urls: Sequence[str], address: str, port: int) -> str:
        """Start HAProxy before two servers, and return its own URL. It connects to the servers in the background."""
        self._port = ReservedPort(port, address)
        own = f"{address}:{self._port.number}"
        first, second = (url.removeprefix("http://") for url in urls)
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", self._program, CONFIGURATION],
            stdin=subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "EVERSTEP_BIND": own,
                "EVERSTEP_FIRST": first,
                "EVERSTEP_SECOND": second,
            },
            start_new_session=True,
        )
        return f"http://{own}"
