"""Ranks forked from one warm parent, and the fake agent that serves them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.fake_agent import JOB, RUN, FakeAgent

ROOT = Path(__file__).parents[3]


@dataclass
class Ranks:
    """The ranks of one launch."""

    parent: WarmParent
    directory: Path
    pids: list[int]

    def kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        statuses = self.parent.ask({"wait": self.pids})["statuses"]
        self.pids = []
        return list(statuses)

    def results(self) -> list[dict[str, Any]]:
        """Wait for a good end and return what each rank wrote down."""
        count = len(self.pids)
        statuses = self.wait()
        assert statuses == [0] * count, self.logs()
        return [json.loads((self.directory / f"result-{rank}.json").read_text()) for rank in range(count)]

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.directory.glob("rank*.log")))


class WarmParent:
    def __init__(self) -> None:
        # The environment's bin on PATH: DeepSpeed calls ninja by name.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.integration.training.warm_parent"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._is_ready = False
        self._numbers = itertools.count()

    def launch(
        self, name: str, world: int, directory: Path, *, until: int, options: dict[str, Any] | None = None, agent: FakeAgent | None = None
    ) -> Ranks:
        own = directory / f"launch-{next(self._numbers)}"
        own.mkdir()
        environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20"}
        if agent is not None:
            environment |= {
                "EVERSTEP_AGENT_SOCKET": str(agent.path),
                "EVERSTEP_JOB_NAME": JOB,
                "EVERSTEP_RUN_ID": RUN,
                "EVERSTEP_GENERATION": str(agent.generation),
            }
        arguments = {"until": until, "options": options or {}}
        request = {"launch": name, "world": world, "directory": str(own), "environment": environment, "arguments": arguments}
        return Ranks(self, own, self.ask(request)["pids"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._is_ready:
            assert json.loads(self._process.stdout.readline()) == {"ready": True}
            self._is_ready = True
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def warm_parent() -> Iterator[WarmParent]:
    parent = WarmParent()
    yield parent
    parent.close()
