"""Contains `TrainingSession`, the object that a script uses while it trains.

    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for batch in session.batches(until_step=10_000):
        …
    session.close()

At each step, `boundary` reads the agent's half of the shared page and calls `step_rules.decide`. `Snapshotter.capture`
starts a `Copier` in the background, for which the guard waits before the next change of the state. When the copy has
ended and is consistent, the rank sends `Captured`. If a snapshot fails, the session skips it and training continues.

Invariant: a snapshot of step k holds the state right after the k-th optimizer step. The session takes it at boundary k,
or in `close` if the script has called nothing that changes the state since this boundary. When the loop ends, the
session records training modes and random generators, so an evaluation before `close` does not change the snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from everstep.protocol.ids import Step
from everstep.protocol.limits import MAX_RANK_STEP
from everstep.protocol.options import OptionsKept
from everstep.protocol.rank_messages import (
    ECHO_UNABLE,
    ECHO_YES,
    MAX_LIMIT_SECONDS,
    NONE,
    AgentHalf,
    Arriving,
    Boundary,
    EarlierLayout,
    IdleSpan,
    IdleSpans,
    Phase,
    RankFault,
    RankHalf,
    RankStanding,
    Welcome,
)
from everstep.training.agent_link import AgentLink, ReplayLink
from everstep.training.copier import Copier
from everstep.training.data import DataStream
from everstep.training.determinism_check import DeterminismCheck
from everstep.training.device_numbers import DeviceNumbers
from everstep.training.earlier import AgentShards
from everstep.training.errors import RestoreMismatch, SessionMisuse, TrainingError
from everstep.training.exit_watch import ExitWatch
from everstep.training.gloo_threads import settle_gloo_threads_at_exit
from everstep.training.guard import Guard
from everstep.training.metrics import MetricRing, check_values
from everstep.training.profile import NetworkProfiler, TorchTrace
from everstep.training.rehearsal import Rehearsal, Replay
from everstep.training.relayout import read_earlier
from everstep.training.restore import (
    Arrival,
    Expected,
    LoadBegunAnew,
    Snapshot,
    agree,
    check_whole,
    gathered,
    map_ahead,
    read_snapshot,
)
from everstep.training.resume_changes import ResumeChanges
from everstep.training.script import Environment, input_dir
from everstep.training.snapshots import Snapshotter
from everstep.training.state import RankState
from everstep.training.step_rules import RankView, StepDecision, decide, decide_alone, is_final_round_over
from everstep.training.step_watch import StepWatch, uncompiled
from everstep.training.values import Values

PAGE_POLL_SECONDS = 0.05
"""Interval of reads of the page while a rank waits, because `PageChanged` may be lost."""
QUIET_SECONDS = 0.25
"""Longest delay of a report that needs no answer, too short for users and peers to notice."""
# Copying the largest measured state takes this long: 33 GiB at 0.15 s per GiB.
DRAIN_SECONDS = 5.0
"""Longest wait for a running copy when the process ends after an error, because a device may have failed."""
NOT_COMPILED = (
    "Everstep waits here for the copy of the state: compile optimizer.step() without fullgraph=True, or "
    "call it uncompiled"
)
"""Message of torch.compile with `fullgraph=True`. Otherwise, torch breaks the graph here, so the guard always runs."""
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions by which Python marks the end of an iterator or generator."""

logger = logging.getLogger("everstep.training")


@dataclass(frozen=True, slots=True)
class Control:
    """The result of `boundary`, from which the script reads whether it must stop."""

    step: int
    """Number of finished steps."""
    stop: bool
    """True when all ranks stop at this step. The script must then leave its loop and call `close`."""


class _Half(TypedDict, total=False):
    boundary: int
    phase: Phase
    copying: int
    standing: RankStanding
    echo_step: int
    echo: int
    target: int
    limit: int
    first_passed: int
    resume_revision: int
    rehearsal_step: int
    rehearsal_echo: int


class TrainingSession:
    """One rank's session with Everstep. `init` returns it to the script."""

    def __init__(
        self,
        state: RankState,
        link: AgentLink,
        environment: Environment,
        copier: Copier,
        *,
        has_many_streams: bool = False,
        extra: Values | None = None,
        check: DeterminismCheck | None = None,
        replay: Replay | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._link = link
        self._environment = environment
        self._has_many_streams = has_many_streams
        self.extra = Values() if extra is None else extra
        """Plain values of `init(extra=…)`, which snapshots contain. The script reads and writes them here."""
        self._check = check
        self._rehearsal = Rehearsal(state, environment, replay)
        self._changes = ResumeChanges(state)
        self._clock = clock
        self._guard = Guard()
        self._snapshotter = Snapshotter(
            state,
            link,
            copier,
            self._guard,
            lambda step: self._publish(copying=step),
            is_crowded=environment.is_crowded,
        )
        self._ring = MetricRing(link.generation, link.send)
        self._logged = DeviceNumbers(self._ring)
        # The training thread and the copier both write the page, so they need a lock. The lock is reentrant, because a
        # signal handler may interrupt a write and write the page itself.
        self._half_lock = threading.RLock()
        self._half_fields = _Half()
        self._half = RankHalf(generation=link.generation)
        self._base = Step(0)
        self._rehearsed = NONE
        self._boundary = 0
        self._is_restored = False
        self._is_stopped = False
        self._is_closed = False
        self._has_left = False
        """Whether the script has started another step or called `fence` since its last `boundary`."""
        self._progress = state.progress()
        self._departure = ""
        """Why the state may have changed between the last boundary and `close`; empty if it has not."""
        self._handled = sys.exc_info()[1]
        """The exception that the script was already handling at the start, which `close` ignores."""
        self._reported_blocked_seconds = 0.0
        self._reported_at = -math.inf
        """Time of the last report of a finished step without delay."""
        self._profiler: NetworkProfiler | None = None
        # Only local rank 0 profiles the network, because the ranks of a node have the same idle times.
        if link.has_agent and environment.world_size > 1 and environment.local_rank == 0:
            self._profiler = NetworkProfiler(self._report_spans, TorchTrace())

        def fence(*_: object) -> None:
            self.fence()

        self.fence_hook = uncompiled(fence, NOT_COMPILED)
        """`fence` as a hook for torch. Compiled code leaves its graph for it, because a traced hook would not wait."""
        for optimizer in state.optimizers():
            optimizer.register_step_pre_hook(self.fence_hook)
        if check is not None:
            check.attach(state)
        self._step_watch = StepWatch(state.optimizers(), state.parameters(), state.companions(), self._report_fault)
        settle_gloo_threads_at_exit()  # Keep this after `close`: the script may run further collectives.
        self._exit_watch = ExitWatch(self.close, self._drain)
        self._is_agreed = False
        self._mapped: tuple[Arriving | Welcome, mmap.mmap] | None = None
        if link.has_agent:
            self._snapshotter.forecast()  # Request slots, so that the agent grants them before the first capture.
            named = link.welcome()
            with contextlib.suppress(OSError):  # If the slot cannot be mapped, `restore` raises the error later.
                if named.base_slot_path is not None:
                    self._mapped = named, map_ahead(Path(named.base_slot_path), state.expect_restore())

    @property
    def step(self) -> int:
        """Number of the current step: finished steps plus one."""
        return self._boundary + 1

    def input_dir(self, channel: str) -> Path:
        """Return the directory of one input channel of the job.

        `everstep.training.input_dir` does the same and also works before `init`.

        Args:
            channel: `ChannelName` of an entry of `InputDataConfig`.

        Returns:
            The directory. The script must not write to it.

        Raises:
            SessionMisuse: the job has no channel of this name.
        """
        return input_dir(channel)

    @property
    def data(self) -> Mapping[str, DataStream]:
        """The registered loaders by name. Iterating a loader yields the remaining batches of its current epoch.

        Scripts with their own loop use this instead of `batches`.
        """
        return self._state.streams

    @property
    def blocked_seconds(self) -> Sequence[float]:
        """Seconds for which each recent snapshot blocked the training thread.

        Each value is the sum of the times at the boundary and at the guard.
        """
        return tuple(self._guard.blocked_seconds)

    def restore(self) -> int:
        """Restore, in place, the step that the agent names.

        Every rank calls this once, after the script has built model, optimizer and loaders, and before the first
        forward pass. Either all ranks restore, or no rank does. `batches` calls this if the script has not called it.
        Further calls change nothing.

        Returns:
            Number of finished steps, from which the script's loop continues. 0 if there is no step to restore.

        Raises:
            RestoreMismatch: a rank's snapshot does not fit, or the ranks received different steps; the live objects are
                then unchanged. Also raised if a rank copied a snapshot while it was still arriving, and the complete
                snapshot is invalid; the model is then partly overwritten, and the process must end.
            AgentUnreachable: the connection to the agent was lost during the restore and did not return in time. The
                model may be partly overwritten, and the process must end.
        """
        if self._is_restored:
            return self._boundary
        self._publish(phase=Phase.RESTORE, limit=0)
        try:
            with self._state.on_device():
                self._base = self._bring()
        except RestoreMismatch as error:
            self._report_fault(error)
            raise
        self._boundary = int(self._base)
        self._is_restored = True
        self._publish(boundary=self._boundary, phase=Phase.TRAIN)
        if self._link.has_agent:
            self._snapshotter.begin(self._nudge)
        if self._check is not None:
            self._check.restored(self._boundary)
        self._rehearsal.restored(self._boundary)
        self._changes = ResumeChanges(self._state)
        self._report_options()
        self._end_replay()
        return self._boundary

    def batches(self, until_step: int, accumulate: int = 1, *, prefetch: int = 0) -> Iterator[Any]:
        """Yield batches across epochs and call `boundary` after every step.

        Calls `restore` first if the script has not done so.

        Args:
            until_step: number of finished steps at which the loop ends. Steps before a restart count.
            accumulate: batches per optimizer step. Ignored with a DeepSpeed engine, because the engine reports when a
                step is complete.
            prefetch: batches that each loader fetches ahead, for example to copy them to a device early. Snapshots
                contain these batches. They must consist of tensors and plain values.

        Yields:
            A batch. With loaders registered by name: a dict with one batch of each loader. Without loaders: None.

        Raises:
            SessionMisuse: a loader yields no batches.
            RestoreMismatch: as in `restore`; or the number of ranks has changed, and a step would use a different
                number of samples than before.
        """
        self.restore()
        self._set_batches_per_step(accumulate)
        self.set_target(until_step)
        for stream in self._state.streams.values():
            stream.prefetch_count = prefetch
        while self._boundary < until_step and not self._is_stopped:
            before, count = self._state.steps_made(), 0
            while count == 0 or not self._is_step_complete(before, count, accumulate):
                self._has_left = True
                yield self._next_batch()
                count += 1
            self.boundary()
        self._state.keep_passing()

    def set_target(self, until_step: int) -> None:
        """Report the step at which the script's own loop ends. `batches` calls this itself.

        The service estimates the remaining time from this target.

        Args:
            until_step: number of finished steps at the end. 0: unknown.
        """
        self._publish(target=int(until_step) if 0 < until_step <= MAX_RANK_STEP else 0)

    def boundary(self) -> Control:
        """Report that an optimizer step is finished.

        Every rank calls this once per step, after all updates that belong to the step (scheduler, scaler, averages).
        `batches` calls it itself.

        Returns:
            The number of finished steps, and whether to stop. All ranks stop at the same step.

        Raises:
            SessionMisuse: the call came before `restore` or after `close`.
        """
        if not self._is_restored or self._is_closed:
            raise SessionMisuse("boundary() belongs between restore() and close()")
        self._guard.reach()
        passed_at = self._clock()
        self._logged.settle()
        self._boundary += 1
        self._has_left, self._progress = False, self._state.progress()
        self._state.end_step()
        if self._check is not None:
            self._check.boundary(self._boundary)
        self._rehearsal.boundary(self._boundary)
        self._end_replay()
        if self._rehearsal.kept_step and self._boundary == self._half.rehearsal_step:
            # Keep the state before the rank reports this step: after the report, the coordinator may confirm the
            # rehearsal.
            self._keep(self._rehearsal.keep_last)
        self._publish(
            boundary=self._boundary,
            first_passed=self._half.first_passed or int(passed_at * 1e6),
            resume_revision=self._changes.look(),
        )
        if self._link.has_agent:
            self._link.hold(self._word(passed_at))
            if self._profiler is not None:
                self._profiler.boundary(passed_at)
            decision = self._attend()
            if self._snapshotter.telling != self._boundary and not self._may_wait(decision, passed_at):
                self._link.let_go()
                self._reported_at = passed_at
            self._snapshotter.prepare()
            self._record(decision)
            if decision.must_wait:
                decision = self._await_stop()
            if decision.rehearses:
                self._rehearse()
            if decision.is_stopped:
                self._is_stopped = True
                self._state.keep_passing()
                self._publish(standing=RankStanding.STOPPED)
        return Control(self._boundary, self._is_stopped)

    def fence(self) -> None:
        """Wait until the background copy of the state has ended.

        Call this before the script changes registered state outside an optimizer step, for example for weight clipping
        or swapped averages.
        """
        self._has_left = True
        self._guard.reach()

    @contextlib.contextmanager
    def phase(
        self, name: Literal["train", "eval", "checkpoint", "wait"], *, limit_seconds: float | None = None
    ) -> Generator[None]:
        """Return a context that reports the script's activity to the service.

        Each phase has its own time limit.

        Args:
            name: the phase. `wait` means that this rank waits on purpose for something outside the job.
            limit_seconds: time without progress after which the service treats the rank as hung, at most one day. Until
                then, the field `Reason` of DescribeTrainingJob states that the rank waits. None: the service derives a
                limit from the job's earlier phases.

        Yields:
            None.

        Raises:
            SessionMisuse: the limit is not above 0, or it is more than a day.
        """
        if limit_seconds is not None and not 0 < limit_seconds <= MAX_LIMIT_SECONDS:
            raise SessionMisuse(
                f"limit_seconds is {limit_seconds}; it must be above 0 and at most {MAX_LIMIT_SECONDS:,}"
            )
        before, limit_before = self._half.phase, self._half.limit
        self._publish(phase=Phase[name.upper()], limit=math.ceil(limit_seconds or 0))
        try:
            yield
        finally:
            self._publish(phase=before, limit=limit_before)

    def log(self, **values: float | torch.Tensor) -> None:
        """Log numbers for the current step.

        The call never blocks. If the buffer for the agent is full, values are dropped and counted. Names and values are
        checked in the same way with an agent, without an agent and after `close`. The values are stored only if the
        rank has an agent and the session is open.

        Args:
            **values: numbers or tensors of one element, which may require grad. A value on a GPU is read at a later
                boundary. NaN and infinities are logged.

        Raises:
            SessionMisuse: a value is not one real number, or its name begins with `everstep/`. The error names the
                value.
        """
        if self._link.has_agent and not self._is_closed:
            self._logged.add(Step(self.step), values)
        else:
            check_values(values)
        if self._check is not None:
            self._check.logged(values)
        self._rehearsal.logged(values)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live model and optimizer tensors by name.

        A script may save them as its result.
        """
        return {
            item.name: item.tensor.detach() for adapter in self._state.adapters for item in adapter.observe().tensors
        }

    def close(self) -> None:
        """End the session after the last step is captured and committed.

        The wait for the commit ends after the timeout `final_round` (docs/reference/timeouts.md) at the latest. The
        rank then reports its end to the agent. Further calls change nothing. If a script exits with code 0 without this
        call, the exit watch makes the call.

        Call this right after the loop, before writing results: the snapshot taken here must still be the state of the
        last boundary. Nothing is captured, and a warning says why, in two cases:

        - The script continued after the last boundary: it fetched a batch, made an optimizer step or called `fence`.
        - The script is handling an exception: `close` runs in a `finally` or `except` block.

        An evaluation before this call is harmless if `batches` ended or `boundary` returned `stop`, because the session
        recorded training modes and generators at that moment.
        """
        if self._is_closed:
            return
        self._is_closed = True
        failure = self._failure()
        if self._check is not None and not failure:
            self._check.end()
        if not failure:
            self._rehearsal.closed(self._boundary)
        self._departure = failure or self._gone_on()
        if self._profiler is not None:
            self._profiler.close()
        self._guard.reach()
        self._logged.close()
        self._ring.close()
        if self._link.has_agent and self._is_restored:
            if not failure:
                self._publish(phase=Phase.CLOSE, limit=0, standing=RankStanding.CLOSING)
                self._nudge()
                self._final_round()
            elif self._snapshotter.settled != self._boundary:
                # The script failed, so do not wait for a commit. Only log that the last step is not captured. The other
                # ranks notice the failure when this process ends.
                self._say_departure()
        self._publish(phase=Phase.CLOSE, limit=0, standing=RankStanding.CLOSED)
        self._nudge()
        self._snapshotter.close()
        self._link.close()
        self._step_watch.close()
        self._exit_watch.cancel()

    def _report_fault(self, error: TrainingError) -> None:
        self._link.send(RankFault(generation=self._link.generation, code=error.code, message=str(error)))

    def _drain(self) -> None:
        """Wait for running torch calls after the script failed, because they would crash the exiting process."""
        self._snapshotter.drain(DRAIN_SECONDS)
        if self._profiler is not None:
            self._profiler.close()

    def _failure(self) -> str:
        error = sys.exc_info()[1]
        while isinstance(error, ENDS) and error is not self._handled:
            # If the script's loop raises an error, Python closes the generator `batches` with a further exception. Skip
            # this exception, and read the error.
            error = error.__context__
        is_end = error is None or error is self._handled or (isinstance(error, SystemExit) and error.code in (None, 0))
        return "" if is_end else f"close() was called while the script handles {type(error).__name__}"

    def _gone_on(self) -> str:
        has_moved = self._has_left or self._state.progress() != self._progress
        return (
            "the script has continued after it. Call boundary() when a step is complete, and then close() at once"
            if has_moved
            else ""
        )

    def _say_departure(self) -> None:
        logger.warning("step %d is not captured at the end: %s", self._boundary, self._departure)

    def _final_round(self) -> None:
        """Wait, for a limited time, until the last step is committed, or no further step can be."""
        deadline = self._clock() + self._environment.final_round_seconds
        while (left := deadline - self._clock()) > 0:
            half = self._link.poll()
            if (word := half or self._link.word) is not None and is_final_round_over(self._boundary, word):
                return
            if half is not None:
                if self._act(half).abandon is not None and self._departure:
                    self._say_departure()
                self._snapshotter.prepare()
                self._guard.reach()
            self._link.wait(min(left, PAGE_POLL_SECONDS))
        logger.warning(
            "step %d was not committed within %.0f s of the end", self._boundary, self._environment.final_round_seconds
        )

    def _await_stop(self) -> StepDecision:
        while True:
            self._guard.reach()
            self._link.wait(PAGE_POLL_SECONDS)
            decision = self._attend()
            if not decision.must_wait:
                return decision

    def _attend(self) -> StepDecision:
        half = self._link.poll()
        if half is not None:
            return self._act(half)
        return decide_alone(self._view(), word) if (word := self._link.word) is not None else StepDecision()

    def _may_wait(self, decision: StepDecision, passed_at: float) -> bool:
        """Return whether the rank may report this step with the next one. Each report costs the running step time."""
        return decision.is_quiet and passed_at - self._reported_at < QUIET_SECONDS

    def _act(self, half: AgentHalf) -> StepDecision:
        if half.proposed != self._snapshotter.settled:
            self._snapshotter.forget()
        decision = decide(self._view(), half)
        if decision.echo is not None:
            step, echo = decision.echo
            self._publish(echo_step=step, echo=echo)
            self._nudge()
        if decision.rehearsal_echo is not None:
            self._answer_rehearsal(*decision.rehearsal_echo, half.rehearsal_steps)
        if decision.abandon is not None:
            self._snapshotter.abandon(*decision.abandon)
        elif decision.capture_slot is not None:
            self._snapshotter.capture(self._boundary, decision.capture_slot)
        return decision

    def _report_options(self) -> None:
        kept = self._state.options.kept
        for each in kept:
            logger.warning("%s: the script sets %s, and training continues with %s", each.name, each.script, each.kept)
        if kept and self._environment.rank == 0:
            self._link.send(OptionsKept(generation=self._link.generation, options=kept))

    def _answer_rehearsal(self, step: int, echo: int, steps: int) -> None:
        if echo == ECHO_YES and (reason := self._rehearsal_obstacle()):
            echo = ECHO_UNABLE
            self._link.send(self._rehearsal.refusal(step - steps, steps, reason))
        self._publish(rehearsal_step=step, rehearsal_echo=echo)
        self._nudge()

    def _rehearsal_obstacle(self) -> str:
        try:
            return self._snapshotter.obstacle or self._rehearsal.obstacle()
        except Exception as error:  # Methods of the script's objects may raise any error.
            return f"{type(error).__name__}: {error}"

    def _record(self, decision: StepDecision) -> None:
        """Begin to record for an agreed rehearsal after its first step, or end the recording if it is withdrawn."""
        first = decision.keeps_from if self._half.rehearsal_echo == ECHO_YES else None
        if self._rehearsal.kept_step != first:
            self._rehearsal.cancel()
        if first is not None and first == self._boundary:
            self._keep(self._rehearsal.begin)

    def _keep(self, keep: Callable[[int], None]) -> None:
        """Keep the state of this boundary for the agreed rehearsal, or withdraw this rank's agreement."""
        try:
            keep(self._boundary)
        except Exception as error:  # Methods of the script's objects may raise any error.
            first = self._rehearsal.kept_step or self._boundary
            steps = self._half.rehearsal_step - first
            self._rehearsal.cancel()
            self._publish(rehearsal_echo=ECHO_UNABLE)
            self._link.send(self._rehearsal.refusal(first, steps, f"{type(error).__name__}: {error}"))
            self._nudge()

    def _rehearse(self) -> None:
        """Repeat the recorded steps, in a child if there is room, else in this process. All ranks wait at this step."""
        self._guard.reach()
        self._publish(phase=Phase.REHEARSE, limit=self._rehearsal.limit_seconds)
        self._nudge()
        report = self._rehearsal.repeat_beside(self._boundary)
        if report is not None:
            self._rehearsed = self._boundary
            self._publish(phase=Phase.TRAIN, limit=0)
            self._link.send(report)
            return
        if self._profiler is not None:
            self._profiler.close()
        self._ring.flush()
        self._link.close()
        self._rehearsal.restart(self._boundary, self._half.first_passed, self._changes.count)

    def _end_replay(self) -> None:
        replay = self._rehearsal.replay
        if replay is None or not self._rehearsal.is_over(self._boundary):
            return
        assert isinstance(self._link, ReplayLink)
        report = self._rehearsal.end()
        self._rehearsed = replay.last
        self._publish(boundary=self._boundary, phase=Phase.TRAIN, limit=0, first_passed=replay.first_passed)
        self._changes = ResumeChanges(self._state, replay.resume_revision)
        self._publish(rehearsal_step=replay.last, rehearsal_echo=ECHO_YES, resume_revision=self._changes.count)
        self._base = self._link.end_replay().base_step
        self._link.send(report)

    def _view(self) -> RankView:
        return RankView(
            boundary=self._boundary,
            base=self._base,
            settled=self._snapshotter.settled,
            echo_step=self._half.echo_step,
            rehearsal=(self._half.rehearsal_step, self._half.rehearsal_echo),
            rehearsed=self._rehearsed,
            has_slots=self._snapshotter.has_slots,
            obstacle=self._departure or self._snapshotter.obstacle,
        )

    def _bring(self) -> Step:
        """Restore the step that the agent names, and return it. Start again if the agent begins to load anew."""
        while True:
            named = self._link.welcome()
            try:
                self._bring_named(named)
                return named.base_step
            except LoadBegunAnew:
                self._link.watch(lambda _: self._link.welcome() is not named)  # noqa: B023 — watched here and now

    def _bring_named(self, named: Arriving | Welcome) -> None:
        if isinstance(named, Welcome) and named.relayout is not None:
            self._bring_earlier(named, named.relayout)
            return
        arrival = Arrival(self._link, named)
        expected = Expected(self._environment.run, self._environment.rank, named.base_step, self._state.facts)
        read, problem = self._read(named, arrival, expected)
        # Raise an error if the agent has started to load the snapshot again, because it may have overwritten parts of
        # the slot.
        arrival.check()
        if not self._is_agreed:
            agree(named.base_step, problem)
            self._is_agreed = True
        elif problem:
            raise RestoreMismatch(problem)
        if read is not None:
            self._state.load(read[1])
        arrival.finish()
        if read is not None:
            memory, snapshot = read
            if isinstance(named, Arriving):
                check_whole(named, memory, expected)
            self._state.complete(snapshot)

    def _bring_earlier(self, named: Welcome, layout: EarlierLayout) -> None:
        expected = Expected(self._environment.run, self._environment.rank, named.base_step, self._state.facts)
        refusal: RestoreMismatch | None = None
        relaid = None
        try:
            here = self._environment
            shards = AgentShards(self._link, layout)
            relaid = read_earlier(shards, self._state, expected, here.world_size, here.ranks_per_node, gathered)
        except RestoreMismatch as error:
            refusal = error
        try:
            agree(named.base_step, str(refusal or ""))
        except RestoreMismatch as error:
            raise (refusal or error) from None
        assert relaid is not None
        self._state.load(relaid)
        self._state.complete(relaid)

    def _read(
        self, named: Arriving | Welcome, arrival: Arrival, expected: Expected
    ) -> tuple[tuple[mmap.mmap, Snapshot] | None, str]:
        """Return the mapped slot and its snapshot, or why it is unusable. At step 0: None and an empty reason."""
        mapped, self._mapped = self._mapped, None
        if not named.base_step:
            return None, ""
        if named.base_slot_path is None:
            return None, f"the agent names step {named.base_step} to restore, and no slot that holds it"
        try:
            memory = (
                mapped[1] if mapped is not None and mapped[0] is named else map_ahead(Path(named.base_slot_path), ())
            )
            return (memory, read_snapshot(named, memory, arrival, expected)), ""
        except OSError as error:
            return None, f"the slot {named.base_slot_path} cannot be read: {error}"
        except RestoreMismatch as error:
            return None, str(error)

    def _set_batches_per_step(self, accumulate: int) -> None:
        count = self._state.batches_per_step(accumulate)
        for stream in self._state.streams.values():
            stream.batches_per_step = count
            try:
                stream.check_step()
            except RestoreMismatch as error:
                self._report_fault(error)
                raise

    def _next_batch(self) -> object:
        streams = self._state.streams
        if self._has_many_streams:
            return {name: stream.next() for name, stream in streams.items()}
        return next(iter(streams.values())).next() if streams else None

    def _is_step_complete(self, before: int | None, count: int, accumulate: int) -> bool:
        return count >= accumulate if before is None else self._state.steps_made() != before

    def _nudge(self) -> None:
        self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))

    def _word(self, passed_at: float) -> Boundary:
        """Return the message about the newest finished step, with the blocked seconds since the last report."""
        blocked = self._guard.total_blocked_seconds - self._reported_blocked_seconds
        self._reported_blocked_seconds += blocked
        return Boundary(
            generation=self._link.generation,
            boundary=Step(self._boundary),
            at_seconds=passed_at,
            blocked_seconds=blocked,
        )

    def _report_spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        self._link.hold(IdleSpans(generation=self._link.generation, iteration_seconds=iteration_seconds, spans=spans))

    def _publish(self, **changes: Unpack[_Half]) -> None:
        """Update the given fields of the rank's half of the page. Safe from any thread."""
        with self._half_lock:
            # Update all fields in one call. A signal handler, which may publish other fields, cannot interrupt this
            # call, so no field is lost.
            self._half_fields.update(changes)
            fields = None
            while fields != self._half_fields:
                # A signal handler of the script may interrupt this write and publish newer fields, which this write
                # then replaces with the older ones. Write again in that case.
                fields = self._half_fields.copy()
                self._half = RankHalf(self._link.generation, **fields)
                self._link.publish(self._half)
