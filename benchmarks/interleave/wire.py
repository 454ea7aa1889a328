"""Sends JSON messages between a rank of the benchmark and its agent, and writes the file that describes the case."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

from benchmarks.interleave.schemes import Case, Scheme


class Line:
    """A rank's connection to its agent. The rank sends JSON messages and waits for the agent's answers."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._reader = line.makefile("r")

    def send(self, **message: Any) -> None:
        """Send one message to the agent."""
        self._line.sendall(json.dumps(message).encode() + b"\n")

    def wait_for(self, **wanted: Any) -> None:
        """Read the agent's messages until one message contains all values of `wanted`."""
        for text in self._reader:
            message = json.loads(text)
            if all(message.get(key) == value for key, value in wanted.items()):
                return
        raise ConnectionError("the agent is gone")

    def ask(self, kind: str) -> None:
        """Send a command, and wait until the agent has executed it."""
        self.send(kind=kind)
        self.wait_for(kind=kind)


def write_case(path: Path, case: Case) -> None:
    """Write the case to a file, which all processes of the case read."""
    path.write_text(json.dumps(dataclasses.asdict(case)))


def read_case(path: Path) -> Case:
    """Return the case (the settings of one measurement) from the file that `write_case` wrote."""
    fields = json.loads(path.read_text())
    return Case(
        **{**fields, "schemes": tuple(map(Scheme, fields["schemes"])), "idle_seconds": tuple(fields["idle_seconds"])}
    )
