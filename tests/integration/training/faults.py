"""Disturbs training in three ways and resumes it, to compare its result with the result of an undisturbed run.

    kill_a_rank             the last rank is killed one step after the captured one; all ranks start again
    terminate_an_instance   as above, and the slots of this rank are lost; the copies arrive while the ranks wait
    stop_and_resume         all ranks agree to stop at the captured step, end by themselves, and start again

The script calls `reach` after each finished step, before the step's boundary. The ranks wait there until the agent has
proposed a step, so the test decides which step is captured and how far each rank trains. No wait has a fixed duration.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.protocol.rank_messages import ECHO_YES, NONE, Abandoned, RankHalf, StopState, read_rank_half
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.test_resume import differences
from tests.warm_parent import Launch, WarmParent

FAULTS = ("kill_a_rank", "terminate_an_instance", "stop_and_resume")
FIRST = 4
"""Earliest step that the agent proposes, if the test names none."""
GATE = 2
"""Number of finished steps after which a rank waits until the agent has proposed a step."""
UNTIL = 12
"""Number of steps of a whole run, if the test names none.

With 11 batches per rank and epoch, the run ends in a later epoch than `FIRST`.
"""
LOST_STEPS = {"kill_a_rank": 1, "terminate_an_instance": 1, "stop_and_resume": 0}
"""Number of finished steps that each fault costs, because it strikes one step after the captured step."""
WAIT_SECONDS = 120.0
IMPORTS = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate.accelerator")
"""Modules that the process imports once, before it forks the ranks. The imports take longer than most runs."""

_numbers = itertools.count()


def reach(rank: int, step: int, points: dict[str, Any]) -> None:
    """Make a rank wait until the agent has proposed a step, and make the rank `halt` wait for its kill.

    Every rank waits after `GATE` steps until the test unlocks the file `gate`. The rank `halt` waits again one step
    after the proposed step, until the test kills it.

    Args:
        rank: the rank that calls.
        step: number of finished steps.
        points: `gate`: path of a file that the test locks. When the test unlocks it, the file contains the proposed
            step. `halt`: the rank that waits for its kill; None in a run that no rank is killed in. `halted`: path of
            the socket to which this rank reports its wait. `points` is empty in a run without fault.
    """
    if not points or step < GATE:
        return
    with open(points["gate"]) as gate:
        if step == GATE:
            fcntl.flock(gate, fcntl.LOCK_SH)
        proposed = json.load(gate)
    if points["halt"] == rank and step == proposed + 1:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.sendto(str(step).encode(), points["halted"])
        signal.pause()


class Training:
    """One script with one set of options.

    Args:
        parent: forks the ranks.
        directory: empty directory of the test.
        script: name of the module whose `run` trains.
        world: number of ranks.
        options: options of the script.
        first: earliest step that the agent proposes.
        until: number of steps of a whole run.
        imports: further modules that the process imports once, before it forks the ranks.
    """

    def __init__(
        self,
        parent: WarmParent,
        directory: Path,
        script: str,
        world: int,
        options: dict[str, Any],
        *,
        first: int = FIRST,
        until: int = UNTIL,
        imports: Sequence[str] = (),
    ) -> None:
        self._parent = parent
        self._directory = directory
        self._script = script
        self._world = world
        self._options = options
        self._first = first
        self._until = until
        self._imports = (*IMPORTS, *imports)
        self.slots: dict[int, Path] = {}
        """The sealed slot of each rank's captured step."""

    def undisturbed(self) -> list[dict[str, Any]]:
        """Return the results of a run without agent and without fault."""
        return self._launch(None, "undisturbed", {}).results()

    def resumed(self, fault: str) -> list[dict[str, Any]]:
        """Disturb a run, check that the fault happened and how many steps it cost, and resume the run.

        Args:
            fault: one of `FAULTS`.

        Returns:
            The results of the resumed run.
        """
        with FakeAgent(self._directory, self._world, first=self._first, lead=1, commit_target=1) as agent:
            finished = self._stop(agent) if fault == "stop_and_resume" else self._kill(agent)
            base = agent.committed
            self.slots = slots = {rank: agent.sealed[rank, base] for rank in range(self._world)}
            if is_lost := fault == "terminate_an_instance":
                slots = self._replace(agent, slots)
        assert self._first <= base < self._until
        assert finished - base == LOST_STEPS[fault], "the fault struck at another step than the test planned"
        with FakeAgent(
            self._directory, self._world, 2, base_step=base, base_slots=slots, commit_target=0, arrives=is_lost
        ) as second:
            found = self._launch(second, "disturbed", {}).results()
        assert [each["begun"] for each in found] == [base] * self._world
        return found

    def refused(self) -> set[str]:
        """Run the script to its end, and return why its ranks captured no step.

        Returns:
            The end of the output of each rank that fails. If no rank fails, the reasons of all abandoned steps.
        """
        with FakeAgent(self._directory, self._world, first=self._first, lead=1, commit_target=1) as agent:
            points = {"gate": str(self._directory / "gate"), "halt": None}
            (self._directory / "gate").write_text(json.dumps(self._first))
            ranks = self._launch(agent, "disturbed", points)
            codes = ranks.wait(until_one_fails=False)
            assert agent.commits == []
            if any(codes):
                return {ranks.log(rank)[-2000:] for rank in range(self._world)}
            return {message.reason for _, message in agent.of_kind(Abandoned)}  # type: ignore[attr-defined]

    def _launch(self, agent: FakeAgent | None, home: str, points: dict[str, Any]) -> Launch:
        own, work = self._directory / f"launch-{next(_numbers)}", self._directory / home
        own.mkdir()
        work.mkdir(exist_ok=True)
        environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20"} | (agent.environment if agent is not None else {})
        arguments = {"until": self._until, "options": self._options, "points": points, "home": str(work)}
        call = (f"tests.integration.training.{self._script}:run", str(own), arguments)
        return self._parent.fork(
            *call,
            world=self._world,
            directory=own,
            environment=environment,
            result="result-{rank}.json",
            imports=self._imports,
        )

    def _kill(self, agent: FakeAgent) -> int:
        """Kill the last rank, then the others. Return the largest number of steps that a rank has finished."""
        halted = self._directory / "halted"
        points = {"gate": str(self._directory / "gate"), "halt": self._world - 1, "halted": str(halted)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.bind(str(halted))
            line.settimeout(WAIT_SECONDS)
            with self._gate(agent, points) as ranks:
                pass
            try:
                finished = int(line.recv(16))
                assert agent.reached.wait(WAIT_SECONDS), f"{agent.messages[-20:]}\n{ranks.logs()}"
                os.kill(ranks.pids[-1], signal.SIGKILL)
            except TimeoutError:
                raise AssertionError(f"{agent.messages[-20:]}\n{ranks.logs()}") from None
            finally:
                ranks.kill()
                codes = ranks.wait(until_one_fails=False)
        assert codes == [-signal.SIGKILL] * self._world
        return max(finished, *(half.boundary for half in halves(agent)))

    def _stop(self, agent: FakeAgent) -> int:
        """Let all ranks agree to stop at the proposed step. Return this step."""
        with self._gate(agent, {"gate": str(self._directory / "gate"), "halt": None}) as ranks:
            step = agent.proposed
            agent.announce_stop(step, StopState.ANNOUNCED)
        agent.wait_for(lambda: all((half.echo_step, half.echo) == (step, ECHO_YES) for half in halves(agent)), 120)
        agent.announce_stop(step, StopState.CONFIRMED)
        assert [each["step"] for each in ranks.results()] == [step] * self._world
        return step

    @contextlib.contextmanager
    def _gate(self, agent: FakeAgent, points: dict[str, Any]) -> Iterator[Launch]:
        """Start the ranks, which wait after `GATE` steps. Release them at the end of the context.

        The context begins when the agent has proposed a step.
        """
        with open(points["gate"], "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            ranks = self._launch(agent, "disturbed", points)
            try:
                agent.wait_for(
                    lambda: agent.proposed != NONE and all(half.boundary >= GATE - 1 for half in halves(agent)),
                    WAIT_SECONDS,
                )
                json.dump(agent.proposed, gate)
                gate.flush()
                yield ranks
            except BaseException:
                ranks.kill()
                ranks.wait(until_one_fails=False)
                raise

    def _replace(self, agent: FakeAgent, slots: dict[int, Path]) -> dict[int, Path]:
        """Copy the committed slots to another node, and delete all slots of the last rank."""
        node = self._directory / "replacement"
        node.mkdir()
        copies = {rank: Path(shutil.copy(path, node)) for rank, path in slots.items()}
        for path in agent.lines[-1].slot_paths:
            path.unlink()
        return copies


def halves(agent: FakeAgent) -> list[RankHalf]:
    """Return each rank's half of its shared-memory page. A rank that has written nothing has boundary 0."""
    return [read_rank_half(line.page) or RankHalf(agent.generation) for line in agent.lines]


def check_equal(resumed: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> None:
    """Check that a resumed run and an undisturbed run have the same results bit for bit.

    A resumed run has only the events of its own steps, if the script has events. The first item of an event is its
    step.
    """
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert expected["begun"] == 0
        assert found.keys() == expected.keys()
        assert found.get("events", []) == [event for event in expected.get("events", []) if event[0] > found["begun"]]
        for what in found.keys() - {"begun", "digest", "events"}:
            assert found[what] == expected[what], what
        assert differences(found["digest"], expected["digest"]) == {}
