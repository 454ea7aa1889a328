"""Reports to systemd that this process is ready and alive (sd_notify). The server and the agent use it.

With `WatchdogSec=`, systemd restarts a process that has not reported for this time. The event loop sends the reports,
so systemd restarts a process whose event loop is blocked.

Invariant: without systemd, the module sends nothing. Children inherit none of systemd's variables.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger(__name__)


class ServiceManager:
    """The connection of this process to systemd, created before it starts other processes."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, and remove them from the environment."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        of_process = environment.pop("WATCHDOG_PID", str(os.getpid()))
        is_watched = self._address and microseconds.isdecimal() and of_process == str(os.getpid())
        self.report_seconds = int(microseconds) / 2e6 if is_watched else None
        """Half of the watchdog's limit; None without a watchdog."""

    def notify(self, state: str) -> None:
        """Send an assignment that sd_notify(3) documents, such as `READY=1`. A failure is only logged."""
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.setblocking(False)
            try:
                line.sendto(state.encode(), path)
            except OSError as error:
                log.warning("systemd does not receive %s: %s", state, error)

    async def keep_alive(self) -> None:
        """Report repeatedly that the event loop runs, until cancelled. Return at once without a watchdog."""
        while self.report_seconds is not None:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.report_seconds)
