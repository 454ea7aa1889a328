"""A training session: what a script holds in its hand.

    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for batch in session.batches(until_step=10_000):
        …
    session.close()

A step seen from here: `boundary` → `step_rules.decide` on the agent's word → `Snapshotter.capture` → `Copier` → the
guard before the next change → `Captured`.

Invariant: a snapshot of step k holds the state right after the k-th optimizer step: it is taken at that boundary, or in
`close` if no batch, step or `fence` has come since; which modules train, and the generators, it has as they were when
the loop was left, whatever an evaluation did since. Trouble with saving costs a snapshot, never training.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import (
    MAX_LIMIT_SECONDS,
    MAX_TARGET,
    AgentHalf,
    Arriving,
    Boundary,
    IdleSpan,
    IdleSpans,
    Phase,
    RankFault,
    RankHalf,
    Standing,
    Welcome,
)
from everstep.training.agent_link import AgentLink
from everstep.training.copier import Copier
from everstep.training.data import DataStream
from everstep.training.device_numbers import DeviceNumbers
from everstep.training.errors import RestoreMismatch, SessionMisuse, TrainingError
from everstep.training.exit_watch import ExitWatch
from everstep.training.guard import Guard
from everstep.training.metrics import MetricRing, check_values
from everstep.training.profile import NetworkProfiler, TorchTrace
from everstep.training.restore import (
    Arrival,
    Expected,
    LoadBegunAnew,
    Snapshot,
    agree,
    check_whole,
    map_ahead,
    read_snapshot,
)
from everstep.training.script import Environment, input_dir
from everstep.training.snapshots import Snapshotter
from everstep.training.state import RankState
from everstep.training.step_rules import Decision, RankView, decide, decide_alone, is_final_round_over
from everstep.training.step_watch import StepWatch

LOOK_SECONDS = 0.05
"""A rank that stands still looks at the page at least this often: `WordChanged` may be lost."""
QUIET_SECONDS = 0.25
"""Boundaries from which nothing follows are told together, this long after the last word at most: a small part of what people or peers wait for."""
DRAIN_SECONDS = 5.0
"""A script that failed is held no longer than this for a copy: 33 GiB at 0.15 s each, the slowest measured; a device may never come back."""
NOT_COMPILED = (
    "Everstep waits here for the copy of the state: compile optimizer.step() without fullgraph=True, or "
    "call it uncompiled"
)
"""The reason that torch.compile gives where a graph must be whole.

Any other graph breaks at the guard, which waits in every step.
"""
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""How iterators say that they are at their end."""

logger = logging.getLogger("everstep.training")


@dataclass(frozen=True, slots=True)
class Control:
    """What the script is told at a boundary."""

    step: int
    """Steps finished."""
    stop: bool
    """All ranks stop here: leave the loop and call `close`."""


class _Half(TypedDict, total=False):
    """What the rank has said on its page (`RankHalf`)."""

    boundary: int
    phase: Phase
    copying: int
    standing: Standing
    echo_step: int
    echo: int
    target: int
    limit: int
    first_passed: int


class TrainingSession:
    """One rank's line between a training script and the service; made by `init`.

    Args:
        state: all that the run's state is made of.
        link: to the agent.
        environment: of the rank.
        copier: brings tensors into slots.
        has_many_streams: batches are dicts, one of each loader.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        state: RankState,
        link: AgentLink,
        environment: Environment,
        copier: Copier,
        *,
        has_many_streams: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._link = link
        self._environment = environment
        self._has_many_streams = has_many_streams
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
        self._half_lock = (
            threading.RLock()
        )  # the training thread and the copier both write the page; a signal handler may in the middle of that
        self._said = _Half()
        self._half = RankHalf(generation=link.generation)
        self._base = Step(0)
        self._boundary = 0
        self._is_restored = False
        self._is_stopped = False
        self._is_closed = False
        self._has_left = False
        """Since the last boundary a step was begun, or the script has said that it changes its state."""
        self._progress = state.progress()
        """At the last boundary."""
        self._departure = ""
        """Why the state that `close` finds may be another than that of the last boundary."""
        self._handled = sys.exc_info()[1]
        """What the script was dealing with when it began: it says nothing of how it ends."""
        self._told_blocked_seconds = 0.0
        self._told_at = -math.inf
        """When the newest boundary was passed that the agent was told of at once."""
        self._profiler: NetworkProfiler | None = None
        if (
            link.has_agent and environment.world_size > 1 and environment.local_rank == 0
        ):  # whose idle spans are those of the node
            self._profiler = NetworkProfiler(self._report_spans, TorchTrace())
        self.fence_hook = torch.compiler.disable(lambda *_: self.fence(), reason=NOT_COMPILED)  # type: ignore[no-untyped-call]
        """`fence` for torch's hooks. Compiled code leaves its graph for it every time; traced, it would not wait."""
        for optimizer in state.optimizers():
            optimizer.register_step_pre_hook(self.fence_hook)
        self._step_watch = StepWatch(state.optimizers(), state.parameters(), state.companions(), self._report_fault)
        self._exit_watch = ExitWatch(self.close, self._drain)
        self._is_agreed = False
        self._mapped: tuple[Arriving | Welcome, mmap.mmap] | None = None
        if link.has_agent:
            self._snapshotter.foresee()  # slots are ready, then, before the first boundary asks for one
            named = link.welcome()
            with contextlib.suppress(OSError):  # said in its place, by `restore`
                if named.base_slot_path is not None:
                    self._mapped = named, map_ahead(Path(named.base_slot_path), state.expect_restore())

    @property
    def step(self) -> int:
        """The step being made: one more than the steps finished."""
        return self._boundary + 1

    def input_dir(self, channel: str) -> Path:
        """Return the directory of one of the job's input channels (see `everstep.training.input_dir`, which works before `init`, too)."""
        return input_dir(channel)

    @property
    def data(self) -> Mapping[str, DataStream]:
        """The registered loaders, each iterable over what is left of its epoch, for scripts that own the loop."""
        return self._state.streams

    @property
    def blocked_seconds(self) -> Sequence[float]:
        """How long each of the newest snapshots held the training thread, boundary and guard together."""
        return tuple(self._guard.blocked_seconds)

    def restore(self) -> int:
        """Bring back the step that the agent names, in place.

        Collective, all or none; once, after everything is built and before the first forward.

        Returns:
            Steps finished: the script's loop goes on behind it. 0 when there is nothing to restore. A second call
            changes nothing.

        Raises:
            RestoreMismatch: a rank's snapshot does not fit, or the ranks were given different steps; nothing was
                written. Or what fitted is found to be no snapshot when all of it has come: then the model holds a part
                of it, and the process must end.
            AgentUnreachable: the agent went while the state was on its way, and did not come back; the model holds a
                part of it, likewise.
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
        return self._boundary

    def batches(self, until_step: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield batches across epochs, with a boundary after every step. Restores first where that has not been done.

        Args:
            until_step: steps finished at the end, those before a restart included.
            accumulate: batches to one optimizer step. A DeepSpeed engine says itself when its step is complete.

        Yields:
            A batch; with loaders given by name a dict of one from each; None without any.

        Raises:
            SessionMisuse: a loader yields no batches.
        """
        self.restore()
        self._publish(
            target=int(until_step) if 0 < until_step <= MAX_TARGET else 0
        )  # people want to know how long it will take
        while self._boundary < until_step and not self._is_stopped:
            before, count = self._state.steps_made(), 0
            while count == 0 or not self._is_step_complete(before, count, accumulate):
                self._has_left = True
                yield self._next_batch()
                count += 1
            self.boundary()
        self._state.keep_passing()

    def boundary(self) -> Control:
        """Say that an optimizer step is finished.

        Every rank, once per step, after everything that belongs to it (scheduler, scaler, averages).

        Returns:
            Where training stands, and whether to stop; all ranks are told to stop at the same step.

        Raises:
            SessionMisuse: before `restore` or after `close`.
        """
        if not self._is_restored or self._is_closed:
            raise SessionMisuse("boundary() belongs between restore() and close()")
        self._guard.reach()
        passed_at = self._clock()
        self._logged.settle()
        self._boundary += 1
        self._has_left, self._progress = False, self._state.progress()
        self._state.end_step()
        self._publish(boundary=self._boundary, first_passed=self._half.first_passed or int(passed_at * 1e6))
        if self._link.has_agent:
            self._link.hold(self._word(passed_at))
            if self._profiler is not None:
                self._profiler.boundary(passed_at)
            decision = self._attend()
            if self._snapshotter.telling != self._boundary and not self._may_wait(decision, passed_at):
                self._link.let_go()
                self._told_at = passed_at
            self._snapshotter.prepare()
            if decision.must_wait:
                decision = self._await_stop()
            if decision.is_stopped:
                self._is_stopped = True
                self._state.keep_passing()
                self._publish(standing=Standing.STOPPED)
        return Control(self._boundary, self._is_stopped)

    def fence(self) -> None:
        """Wait for the copy in flight.

        Before the script changes registered state outside an optimizer step (weight clipping, swapped averages).
        """
        self._has_left = True
        self._guard.reach()

    @contextlib.contextmanager
    def phase(
        self, name: Literal["train", "eval", "checkpoint", "wait"], *, limit_seconds: float | None = None
    ) -> Iterator[None]:
        """Say what the script is doing, for as long as the context lasts: each phase has a time limit of its own.

        Args:
            name: of the phase. `wait`: this rank stands still on purpose, at a gate that something else opens.
            limit_seconds: nobody takes the rank for stuck before it has stood there for this long, and the job's reason
                says that it waits; at most a day. Without it the limit is the one that was learned from the job.

        Yields:
            Nothing.

        Raises:
            SessionMisuse: the limit is not above 0, or more than a day.
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
        """Log numbers for the step being made. Never blocks; what a full ring cannot take is dropped and counted.

        The same values are accepted and refused with an agent, without one and after `close`. Only an agent keeps them.

        Args:
            **values: numbers, or tensors of one element, which may require grad; one on a GPU is read at a later
                boundary. NaN and infinities are logged.

        Raises:
            SessionMisuse: a value is not one real number, or its name begins with `everstep/`; by name.
        """
        if self._link.has_agent and not self._is_closed:
            self._logged.add(Step(self.step), values)
        else:
            check_values(values)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live model and optimizer tensors by name: what a script may write out as its result."""
        return {
            item.name: item.tensor.detach() for adapter in self._state.adapters for item in adapter.observe().tensors
        }

    def close(self) -> None:
        """End the session: the last step is captured and committed if that is possible soon, then the agent is told.

        Idempotent.

        Call it right behind the loop, before results are written: a snapshot taken here must still be the state of the
        last boundary. Where the script has gone on since (a batch, an optimizer's step, `fence`), or deals with an
        exception (on its way out through a `finally`, or caught by the `except` clause that this is called in), nothing
        is captured, and a line says why. An evaluation in between leaves no trace if `batches` has ended, or `boundary`
        has said to stop: it is modes and generators that it changes. A script that ends with code 0 without it gets it
        at exit.
        """
        if self._is_closed:
            return
        self._is_closed = True
        failure = self._failure()
        self._departure = failure or self._gone_on()
        if self._profiler is not None:
            self._profiler.close()
        self._guard.reach()
        self._logged.close()
        self._ring.close()
        if self._link.has_agent and self._is_restored:
            if not failure:
                self._publish(phase=Phase.CLOSE, limit=0, standing=Standing.CLOSING)
                self._nudge()
                self._final_round()
            elif self._snapshotter.settled != self._boundary:  # the others hear of it when this process has ended
                self._say_departure()
        self._publish(phase=Phase.CLOSE, limit=0, standing=Standing.CLOSED)
        self._nudge()
        self._snapshotter.close()
        self._link.close()
        self._step_watch.close()
        self._exit_watch.cancel()

    def _report_fault(self, error: TrainingError) -> None:
        """Send the agent a refusal that is about to be raised."""
        self._link.send(RankFault(generation=self._link.generation, code=error.code, message=str(error)))

    def _drain(self) -> None:
        """Let what is under way in torch come to its end: the script has failed, and torch would fall over what it finds when the process ends."""
        self._snapshotter.drain(DRAIN_SECONDS)
        if self._profiler is not None:
            self._profiler.close()

    def _failure(self) -> str:
        error = sys.exc_info()[1]
        while isinstance(error, ENDS) and error is not self._handled:
            error = error.__context__  # a generator is closed at a bad end, too
        is_end = error is None or error is self._handled or (isinstance(error, SystemExit) and error.code in (None, 0))
        return "" if is_end else f"close() was called while {type(error).__name__} is being dealt with"

    def _gone_on(self) -> str:
        has_moved = self._has_left or self._state.progress() != self._progress
        return (
            "the script has gone on since: say boundary() when a step is complete, and close() right behind it"
            if has_moved
            else ""
        )

    def _say_departure(self) -> None:
        logger.warning("step %d is not captured at the end: %s", self._boundary, self._departure)

    def _final_round(self) -> None:
        """Stand at the last boundary until it is committed, or nothing more will come, or it has taken too long."""
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
            self._link.wait(min(left, LOOK_SECONDS))
        logger.warning(
            "step %d was not committed within %.0f s of the end", self._boundary, self._environment.final_round_seconds
        )

    def _await_stop(self) -> Decision:
        """Stand at the announced stop until it is confirmed or withdrawn; an agent that restarts meanwhile, or cannot be read, is waited for."""
        while True:
            self._guard.reach()
            self._link.wait(LOOK_SECONDS)
            decision = self._attend()
            if not decision.must_wait:
                return decision

    def _attend(self) -> Decision:
        """Look at the agent's word and act on it."""
        half = self._link.poll()
        if half is not None:
            return self._act(half)
        return decide_alone(self._view(), word) if (word := self._link.word) is not None else Decision()

    def _may_wait(self, decision: Decision, passed_at: float) -> bool:
        """Say whether the agent hears of this boundary together with a later one: each word takes processor time from the step that is made then."""
        return decision.is_quiet and passed_at - self._told_at < QUIET_SECONDS

    def _act(self, half: AgentHalf) -> Decision:
        if half.proposed != self._snapshotter.settled:
            self._snapshotter.forget()
        decision = decide(self._view(), half)
        if decision.echo is not None:
            step, echo = decision.echo
            self._publish(echo_step=step, echo=echo)
            self._nudge()
        if decision.abandon is not None:
            self._snapshotter.abandon(*decision.abandon)
        elif decision.capture_slot is not None:
            self._snapshotter.capture(self._boundary, decision.capture_slot)
        return decision

    def _view(self) -> RankView:
        return RankView(
            boundary=self._boundary,
            base=self._base,
            settled=self._snapshotter.settled,
            echo_step=self._half.echo_step,
            has_slots=self._snapshotter.has_slots,
            obstacle=self._departure or self._snapshotter.obstacle,
        )

    def _bring(self) -> Step:
        """Bring the state to the step that the agent names, and return that; begun anew for as long as the agent begins anew."""
        while True:
            named = self._link.welcome()
            try:
                self._bring_named(named)
                return named.base_step
            except LoadBegunAnew:
                self._link.watch(lambda _: self._link.welcome() is not named)  # noqa: B023 — watched here and now

    def _bring_named(self, named: Arriving | Welcome) -> None:
        arrival = Arrival(self._link, named)
        expected = Expected(self._environment.run, self._environment.rank, named.base_step, self._state.facts)
        read, problem = self._read(named, arrival, expected)
        arrival.check()  # or what was read may have been half of something
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

    def _read(
        self, named: Arriving | Welcome, arrival: Arrival, expected: Expected
    ) -> tuple[tuple[mmap.mmap, Snapshot] | None, str]:
        """Return this rank's slot and snapshot, or why there is none; neither when there is nothing to restore."""
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

    def _next_batch(self) -> object:
        streams = self._state.streams
        if self._has_many_streams:
            return {name: stream.next() for name, stream in streams.items()}
        return next(iter(streams.values())).next() if streams else None

    def _is_step_complete(self, before: int | None, count: int, accumulate: int) -> bool:
        return count >= accumulate if before is None else self._state.steps_made() != before

    def _nudge(self) -> None:
        """Have the agent look at the page."""
        self._link.hint(
            Boundary(
                generation=self._link.generation, boundary=Step(self._boundary), at_seconds=0.0, blocked_seconds=0.0
            )
        )

    def _word(self, passed_at: float) -> Boundary:
        """Return what the agent is told of a boundary that was passed just now, and what saving took since the one before."""
        blocked = self._guard.total_blocked_seconds - self._told_blocked_seconds
        self._told_blocked_seconds += blocked
        return Boundary(
            generation=self._link.generation,
            boundary=Step(self._boundary),
            at_seconds=passed_at,
            blocked_seconds=blocked,
        )

    def _report_spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        self._link.hold(IdleSpans(generation=self._link.generation, iteration_seconds=iteration_seconds, spans=spans))

    def _publish(self, **changes: Unpack[_Half]) -> None:
        """Write the rank's half of the page; what is not given stays. Any thread."""
        with self._half_lock:
            self._said.update(changes)  # one call, so that whoever comes in between loses nothing of it
            said = None
            while (
                said != self._said
            ):  # again where a signal handler has published meanwhile: what it wrote was written over
                said = self._said.copy()
                self._half = RankHalf(self._link.generation, **said)
                self._link.publish(self._half)
