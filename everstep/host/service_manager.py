"""Reports to systemd that this process is ready and alive (sd_notify). The server and the agent use it.

A unit with `Type=notify` counts as started when its process reports that it is ready. With `WatchdogSec=`, systemd
aborts and restarts a process that has not reported for this time. The event loop sends the reports. A process whose
event loop is blocked therefore sends none, and systemd restarts it.

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
    """The connection of this process to systemd.

    A process creates it once at its start, before it starts other processes.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Read systemd's variables, and remove them from the environment.

        Args:
            environment: the environment of this process: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID.
        """
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        of_process = environment.pop("WATCHDOG_PID", str(os.getpid()))
        is_watched = self._address and microseconds.isdecimal() and of_process == str(os.getpid())
        self.report_seconds = int(microseconds) / 2e6 if is_watched else None
        """Seconds between two reports: half of the watchdog's limit. None without a watchdog."""

    def notify(self, state: str) -> None:
        """Send one state, such as `READY=1`. A failure is logged, because the process works without the report.

        Args:
            state: an assignment that sd_notify(3) documents.
        """
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
        """Report to systemd repeatedly that the event loop runs, until the task is cancelled.

        Return immediately if systemd does not watch this process (no WatchdogSec).
        """
        while self.report_seconds is not None:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.report_seconds)
