"""Tests this node in a child process while the node works for no job.

Invariant: the child has ended when `stop` returns. Its output is bounded, and whatever it prints, the agent runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from everstep.protocol.agent_messages import MAX_BURN_IN_TESTS, BurnInOutcome, BurnInResult, BurnInTest, RunBurnIn
from worker.tasks import end

log = logging.getLogger(__name__)
LIMIT_SECONDS: Final[Mapping[int, float]] = {1: 110.0, 2: 1200.0, 3: 3600.0}
"""Time limit of all tests by level. At level 1, it is below the time for which jobs wait for the result."""
MAX_OUTPUT_BYTES: Final = 64 * 1024
END_SECONDS: Final = 5.0
"""Time for the child to end after SIGTERM, before its process group is killed."""
_TESTS: Final = msgspec.json.Decoder(list[BurnInTest])


@dataclass(eq=False, repr=False)
class BurnInRunner:
    """Runs the tests that the control plane orders (`worker.node.burn_in`) on the disk of `state`."""

    state: Path
    on_change: Callable[[], None]
    _: KW_ONLY
    address: str
    command: Sequence[str] = (sys.executable, "-P", "-s", "-m", "worker.node.burn_in")
    limits_seconds: Mapping[int, float] = field(default_factory=lambda: LIMIT_SECONDS)
    end_seconds: float = END_SECONDS

    def __post_init__(self) -> None:
        self.result: BurnInResult | None = None
        self._number: int | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, order: RunBurnIn) -> None:
        """Start the tests of an order. An order that has run, or still runs, changes nothing."""
        if order.number == self._number or (self.result is not None and order.number == self.result.number):
            return
        await self.stop()
        self._number = order.number
        self._running = asyncio.create_task(self._run(order), name="burn-in")

    async def stop(self) -> None:
        """End running tests without a result, because a job needs the node or the agent ends."""
        running, self._running, self._number = self._running, None, None
        await end(running)

    async def _run(self, order: RunBurnIn) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.limits_seconds.get(order.level, max(self.limits_seconds.values()))):
                tests = _TESTS.decode(await self._output(order))[:MAX_BURN_IN_TESTS]
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("the burn-in came to no result: %r", error)
            tests = [BurnInTest(name="burn-in", outcome=BurnInOutcome.UNKNOWN, text=repr(error)[:500])]
        seconds = time.monotonic() - begun
        self.result = BurnInResult(number=order.number, level=order.level, seconds=seconds, tests=tuple(tests))
        words = ", ".join(f"{test.name} {test.outcome} ({test.rate})" for test in tests)
        log.info("burn-in of level %d: %.2f s: %s", order.level, seconds, words)
        self.on_change()

    async def _output(self, order: RunBurnIn) -> bytes:
        partner = order.partner
        pair = () if partner is None else (self.address, partner.address, str(partner.port), str(partner.place))
        # The child stays in the agent's session, in which the kernel prefers threads of a lower niceness.
        child = await asyncio.create_subprocess_exec(
            *self.command,
            *(str(order.level), str(self.state), *pair),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            process_group=0,
        )
        assert child.stdout is not None
        try:
            output = bytearray()
            while chunk := await child.stdout.read(MAX_OUTPUT_BYTES):
                output += chunk
                if len(output) > MAX_OUTPUT_BYTES:
                    raise msgspec.DecodeError(f"the child printed more than {MAX_OUTPUT_BYTES} bytes")
            await child.wait()
            return bytes(output)
        finally:
            if child.returncode is None:
                await _end(child, self.end_seconds)


async def _end(child: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # `wait` also waits for the pipe, so close the transport, for which asyncio has no public method.
    child._transport.close()  # type: ignore[attr-defined]
    await child.wait()
