"""Captures a proposed step into a slot and reports the outcome to the agent.

The rank sends the outcome as `Captured`, or as `Abandoned` with a reason.

    boundary                      forward and backward              before the next optimizer step
    observe; copy tensors ───────▶ the copier copies the others, ──▶ the guard waits for the copy and checks it
    that may change at any time   `Capturing` … `Captured`          (audited snapshots: everything is copied at the
                                                                     boundary, `Captured` is sent only here)

Invariant: the rank reports a snapshot as captured only if every byte belongs to its step. Two checks ensure this:
versions of tensors show all changes that torch counts, and audits (byte-wise comparisons of some snapshots) find
changes that torch does not count. Errors of this module never reach the training script.

The module has more than 500 lines. It is not divided, because a capture, the check of its copy and the slots share the
lock under which the outcome becomes final.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import TypeVar

from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import (
    NONE,
    Abandoned,
    Captured,
    Capturing,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    UnkeptCause,
)
from everstep.protocol.slot import HEADER_BYTES, align, chunk_count, chunk_range, digest
from everstep.training.agent_link import AgentLink
from everstep.training.capture import CapturePlan, SlotMemory, StateTensor
from everstep.training.copier import Copier, Copies, CopyTicket
from everstep.training.errors import CannotResume
from everstep.training.guard import Flight, Guard
from everstep.training.pauses import await_pause, is_main_thread
from everstep.training.sources import Marks, Sources
from everstep.training.state import Observed, RankState

CLOSE_CHECK_SECONDS = 0.25
"""Seconds between two checks whether the session is closed, while a background thread waits for the first slots.

The thread notices immediately when the agent grants them.
"""
STREAMED_BYTES = 32 * 1024 * 1024
"""Minimum bytes of a background copy for which the rank reports the copy's progress.

With these reports, the agent computes digests and sends chunks before the copy has ended. For smaller states, a report
costs as much time as it saves. A rank with few cores reports no progress, because early digests and transfers would use
the copier's core, delay the commit and block training.
"""
ASK_AGAIN_BOUNDARIES = 100
"""Number of steps after which the rank requests slots again if the agent refused them.

Meanwhile, the state may have become small enough for the node's memory.
"""
COLD_BYTES = 8 * 1024 * 1024
"""Maximum bytes copied at the boundary for which the copier still computes the snapshot's digests.

The copier (a background thread of the rank) computes the digest of a chunk right after its copy, while the chunk is in
the processor's cache. The part of a snapshot that the training thread copied at the boundary has left the cache, so its
digests take longer. The copier therefore computes digests only if this part has at most `COLD_BYTES`, or is no larger
than the part that the copier copies. Otherwise the agent computes them later, because the copier would need so long
that training would wait at the guard.
"""

CaptureMessage = TypeVar("CaptureMessage", Capturing, Captured)

logger = logging.getLogger("everstep.training")


class _Capture:
    """One capture of a step into a slot. It exists until the rank has reported the outcome.

    Args:
        step: number of finished steps.
        slot: index of the granted slot that receives the snapshot.
        begun: value of `time.perf_counter` at the boundary.
    """

    def __init__(self, step: int, slot: int, begun: float) -> None:
        self.step = step
        self.slot = slot
        self.begun = begun
        self.index_offset = self.index_bytes = 0
        """Place of the snapshot's index. `_write` sets it once the index is in the slot."""
        self._lock = threading.RLock()
        self._is_answered = False

    @property
    def payload_bytes(self) -> int:
        """Size of the snapshot, valid once the index is in the slot."""
        return self.index_offset + self.index_bytes

    def claim_answer(self) -> bool:
        """Return True to the first caller, and False to all later callers.

        Only the first caller may report to the agent whether this capture succeeded.
        """
        with self._lock:
            is_first, self._is_answered = not self._is_answered, True
            return is_first


class _Verdict:
    """Decides, once per snapshot, whether the copy is consistent, and reports the result.

    A copy is consistent if no tensor changed while it was copied. Torch increments a tensor's version only when an
    operation ends. `look` must therefore be called while the training thread executes no torch operation: after the
    copy, when the thread is the main thread and runs Python code (`everstep.training.pauses`), or when it waits at the
    guard. The result is reported when the decision is made and the copy has ended. Snapshots that are compared byte by
    byte with the state do not use this class. All methods are safe from any thread.

    Args:
        moved: returns the names of tensors whose version or address changed since the step ended.
        settle: called once with these names, and with the error that ended the copy, the check or the wait at the
            guard.
    """

    def __init__(
        self, moved: Callable[[], Sequence[str]], settle: Callable[[Sequence[str], BaseException | None], None]
    ) -> None:
        self._moved = moved
        self._settle = settle
        # Use a reentrant lock, because a signal handler of the script may reach the guard during a check.
        self._lock = threading.RLock()
        self._changed: Sequence[str] | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_settled = False

    def look(self) -> Sequence[str]:
        """Decide from the tensors' versions whether the snapshot's copy is consistent; only the first call decides.

        Return the names of tensors that changed during the copy.
        """
        with self._lock:
            if self._changed is None and not self._is_settled:
                changed = self._moved()
                self._changed = changed if self._changed is None else self._changed
        self._conclude()
        return self._changed or ()

    def fail(self, error: BaseException) -> None:
        """Record that the guard's check raised `error`, so that the snapshot is abandoned. The guard calls this."""
        with self._lock:
            self._error = self._error or error
        self._conclude()

    def end_copy(self, error: BaseException | None) -> None:
        """Record that the copy has ended. The copier's thread calls this."""
        with self._lock:
            self._has_ended = True
            self._error = self._error or error
        self._conclude()

    def _conclude(self) -> None:
        with self._lock:
            is_due = self._has_ended and not self._is_settled and (self._changed is not None or self._error is not None)
            self._is_settled |= is_due
        if is_due:
            self._settle(self._changed or (), self._error)


class _Tensors:
    """The tensors of a snapshot that are the same objects after every step.

    A snapshot copies some of these tensors right after the step, and the other tensors in the background.

    Args:
        lists: the lists of tensors that the adapters returned after a step.
        unstable: names of tensors that once changed outside an optimizer step. Snapshots copy them right after the
            step.
    """

    def __init__(self, lists: Sequence[list[StateTensor]], unstable: Collection[str]) -> None:
        self.lists = lists
        self.unstable_count = len(unstable)
        tensors = list(enumerate(chain.from_iterable(lists)))
        is_later = [state.is_deferred and state.name not in unstable for _, state in tensors]
        # Copy the tensors in the order of the payload, so that digests can be computed from its beginning on.
        self.later = Sources(list(compress(tensors, is_later)))
        self.later_bytes = sum(state.tensor.nbytes for state in compress(chain.from_iterable(lists), is_later))
        self.now = Sources(list(compress(tensors, map(operator.not_, is_later))))
        self.count = len(tensors)

    def are(self, lists: Sequence[list[StateTensor]], unstable: Collection[str]) -> bool:
        """Return whether the adapters' lists of tensors after a later step equal the lists of this object.

        The tensors must be the same objects with unchanged shapes.
        """
        return (
            len(unstable) == self.unstable_count
            and len(lists) == len(self.lists)
            and all(map(operator.is_, lists, self.lists))
            and self.now.renew()
            and self.later.renew()
        )


class _WarmDigests:
    """Computes the digest of each chunk of a slot right after its copy, while the chunk is in the processor's cache.

    Used by the copier's thread.

    Args:
        memory: the slot that is being written.
        payload_bytes: size of the finished payload.
    """

    def __init__(self, memory: SlotMemory, payload_bytes: int) -> None:
        self._memory = memory
        self._payload_bytes = payload_bytes
        self._known = bytearray()
        self._next = 0

    def reach(self, final_bytes: int) -> None:
        """Compute the digests of the chunks that no copy will write again.

        Args:
            final_bytes: number of bytes at the beginning of the payload that no copy will write again.
        """
        while (
            self._next < chunk_count(self._payload_bytes)
            and (ends := chunk_range(self._next, self._payload_bytes))[1] <= final_bytes
        ):
            with self._memory.bytes_at(*ends) as chunk:
                self._known += digest(chunk)
            self._next += 1

    def all(self) -> bytes:
        """Return the digests of all chunks. Call this after the last copy into the slot."""
        self.reach(self._payload_bytes)
        return bytes(self._known)


class Snapshotter:
    """Takes the snapshots of one rank. The session owns this object and calls it from the training thread.

    Args:
        state: state of the rank.
        link: connection to the agent, which grants the slots.
        copier: copies tensors into slots, from host or GPU memory.
        guard: delays the next change of the state until the copy has ended.
        on_copying: called with the step when the copy of a step starts, and with `NONE` when the copy ends. Called in
            any thread.
        is_crowded: True when the node has few cores per rank.
        await_pause: calls a function when the main thread executes no torch operation (`everstep.training.pauses`).
    """

    def __init__(
        self,
        state: RankState,
        link: AgentLink,
        copier: Copier,
        guard: Guard,
        on_copying: Callable[[int], None],
        *,
        is_crowded: bool,
        await_pause: Callable[[Callable[[], None]], bool] = await_pause,
    ) -> None:
        self._is_crowded = is_crowded
        self._await_pause = await_pause
        self._state = state
        self._link = link
        self._copier = copier
        self._guard = guard
        self._on_copying = on_copying
        self._plan: CapturePlan | None = None
        self._tensors: _Tensors | None = None
        # The training thread maps slots. Once, at the start, a background thread maps them too, so they need a lock.
        self._mapping = threading.Lock()
        self._ahead: threading.Thread | None = None
        self._may_map = threading.Event()
        self._tell: Callable[[], None] = lambda: None
        self._is_closed = False
        self._granted: SlotsGranted | None = None
        self._memories: Mapping[int, SlotMemory] = {}
        self._refused_count = 0
        """Number of finished steps since the agent refused slots; 0 if its last answer was no refusal."""
        self._growth_count = 0
        """How often the state has outgrown its slots, since a request for spare room was refused."""
        self._ticket: CopyTicket | None = None
        """Ticket of the newest copy."""
        self._unresumable = ""
        """Reason why the rank last failed to observe or capture the state; empty if the last attempt succeeded."""
        self.settled = NONE
        """The step that the rank captured or abandoned last."""
        self.telling = NONE
        """The finished step that the copier's thread reports to the agent in place of the training thread, or `NONE`.

        If the training thread sent the report, the agent would wake up on the core that training needs at that moment.
        """

    @property
    def has_slots(self) -> bool:
        """True when the agent has granted slots of the size that the current capture plan (list of tensors) needs."""
        return self._plan is not None and isinstance(self._link.slots, SlotsGranted)

    @property
    def obstacle(self) -> str:
        """Return the reason why the agent will not grant slots for this state.

        Empty if the agent may still grant slots.
        """
        answer = self._link.slots
        return answer.reason if isinstance(answer, SlotsRefused) else self._unresumable if self._plan is None else ""

    def forecast(self) -> None:
        """Request slots before the first boundary, if their size is predictable.

        The size is predictable if the state after each optimizer's first step is predictable. `init` calls this once.
        """
        self._ahead = threading.Thread(target=self._map_granted, name="everstep-slots", daemon=True)
        self._ahead.start()
        with contextlib.suppress(Exception):  # An error here is ignored, because `prepare` raises it again and logs it.
            if (foreseen := self._state.forecast()) is not None:
                self._request(foreseen)

    def begin(self, announce: Callable[[], None]) -> None:
        """Map the first slots in the background when they are granted, and allocate their memory.

        Doing this after a step would block training. `restore` calls this once and does not wait for the thread.

        Args:
            announce: sends the agent a message, so that it reads the rank's page. Called once, in the background
                thread, before it maps slots.
        """
        self._tell = announce
        self._may_map.set()

    def _map_granted(self) -> None:
        self._may_map.wait()
        self._tell()
        while not self._is_closed and self._link.slots is None:
            self._link.wait(CLOSE_CHECK_SECONDS)
        if not self._is_closed and isinstance(granted := self._link.slots, SlotsGranted):
            with contextlib.suppress(OSError, ValueError):
                # Ignore an error of the mapping, because the next capture maps the slots again and reports the error.
                self._map(granted)

    def prepare(self) -> None:
        """Request slots if none are requested, and map granted slots.

        The session calls this after every step, after it has started a capture.
        """
        if self._plan is None:
            try:
                self._request(self._state.observe())
            except Exception as error:  # Methods of the script's objects may raise any error.
                self._note(_reason(error))
            return
        answer = self._link.slots
        self._refused_count = self._refused_count + 1 if isinstance(answer, SlotsRefused) else 0
        if isinstance(answer, SlotsGranted):
            # Ignore an error of the mapping, because the next capture maps the slots again and reports the error.
            with contextlib.suppress(OSError, ValueError):
                self._map(answer)
        elif isinstance(answer, SlotsRefused) and self._growth_count > 1:
            self._growth_count = 0
            self._ask(self._plan)
        elif self._refused_count == ASK_AGAIN_BOUNDARIES:
            self._refused_count = 0
            self._ask(self._plan, only_for_less=True)

    def forget(self) -> None:
        """Clear `settled`, the step that the rank captured or abandoned last.

        The session calls this when the agent proposes a different step or none. At the end of training, the agent may
        propose the same step a second time, and the rank must then answer again.
        """
        self.settled = NONE

    def capture(self, step: int, slot: int) -> None:
        """Start to copy the state of the finished step into a granted slot.

        The call returns as soon as the script may continue to train.

        Args:
            step: number of finished steps.
            slot: index among the granted slots.
        """
        begun = time.perf_counter()
        try:
            abandoned = self._capture(_Capture(step, slot, begun))
        except Exception as error:
            # A registered object has changed so that a restart could not restore it, or its `state_dict` raised an
            # error.
            cause = UnkeptCause.STATE if isinstance(error, CannotResume) else UnkeptCause.CAPTURE
            abandoned = cause, _reason(error)
            self._note(abandoned[1])
        if abandoned is not None:
            self.abandon(step, *abandoned)

    def _capture(self, capture: _Capture) -> tuple[UnkeptCause, str] | None:
        """Start the capture and return None, or return why the capture is impossible: the cause, and its words."""
        observed = self._state.observe()
        if self._plan is None or not self._is_planned(observed):
            self._plan = self._plan_for(observed)
            self._tensors = None
        granted = self._link.slots
        if not isinstance(granted, SlotsGranted):
            return UnkeptCause.NO_SLOT, "the agent has closed the connection"
        if not self._plan.fits_into(granted.capacity_bytes, observed.values):
            self._growth_count += 1
            self._request(observed)
            return UnkeptCause.LAYOUT, "the layout of the state has changed; the rank requests new slots"
        try:
            memory = self._map(granted)[capture.slot]
        except (OSError, ValueError, LookupError) as error:
            return UnkeptCause.NO_SLOT, f"slot {capture.slot} cannot be mapped: {error}"
        return self._write(capture, observed, self._plan, memory)

    def _is_planned(self, observed: Observed) -> bool:
        """Return whether the current capture plan (the list of tensors and offsets) still fits the observed state.

        Usually the tensor objects are the same as after the previous step; the check is then short.
        """
        assert self._plan is not None
        if self._tensors is not None and self._tensors.are(observed.lists, self._guard.unstable):
            return self._tensors.count + len(observed.fresh) == len(self._plan.entries) and self._plan.fits_at(
                self._tensors.count, observed.fresh
            )
        self._tensors = None
        return self._plan.fits(observed.tensors)

    def _write(
        self, capture: _Capture, observed: Observed, plan: CapturePlan, memory: SlotMemory
    ) -> tuple[UnkeptCause, str] | None:
        if self._ticket is not None:
            # Wait until the copies of the previous snapshot have ended, which may still run on a GPU. At their end, the
            # copier clears the page's field `copying`, which this capture sets.
            self._ticket.join()
        if self._tensors is None:
            self._tensors = _Tensors(observed.lists, self._guard.unstable)
        tensors, views = self._tensors, memory.views(plan)
        is_audited = self._guard.is_next_audited()
        later = Copies(tensors.later.aliases[:], [views[position] for position in tensors.later.positions])
        now = Copies(
            [*tensors.now.aliases, *(state.tensor.detach() for state in observed.fresh)],
            [*(views[position] for position in tensors.now.positions), *views[tensors.count :]],
        )
        marks = tensors.later.marks()
        try:
            self.settled = capture.step
            self._on_copying(capture.step)
            self._copier.copy(now)
            if is_audited:
                # An audit later compares the copy with the live tensors, to find changes outside an optimizer step.
                # Copy all tensors now: a background copy could already contain such a change.
                self._copier.copy(later)
            capture.index_bytes = memory.write_values(plan, observed.values)
            capture.index_offset = plan.index_offset
            self._fly(capture, plan, memory, later, marks, is_audited=is_audited)
        except BaseException as error:
            # Ignore errors of this wait for earlier copies. The code below reports the error that ended the capture.
            with contextlib.suppress(Exception):
                # Wait until all earlier copies have ended, because they may still write to the slot.
                self._copier.start(Copies((), ()), lambda _: None).join()
            self._on_copying(NONE)
            self.telling = NONE
            if not isinstance(error, Exception):
                self._answer(capture, self._abandoned(capture.step, f"the copy was cancelled: {type(error).__name__}"))
                raise
            return UnkeptCause.CAPTURE, f"the copy failed: {error}"
        return None

    def abandon(self, step: int, cause: UnkeptCause, reason: str) -> None:
        """Report to the agent that the rank made no snapshot of `step`."""
        self.settled = step
        self._link.send(self._abandoned(step, reason, cause))

    def drain(self, limit_seconds: float) -> None:
        """Wait for the running copy, for at most `limit_seconds`, and report its outcome.

        The session calls this after the script failed. With the reported outcome, the step may still be committed.
        """
        deadline = time.monotonic() + limit_seconds
        self._end_mapping(limit_seconds)
        if self._copier.drain(max(0.0, deadline - time.monotonic())):
            # Ignore driver errors, which torch raises as RuntimeError. The state is then unreadable, so the step is
            # lost.
            with contextlib.suppress(RuntimeError):
                self._guard.reach()

    def close(self) -> None:
        """Close the copier, which ends its thread, and unmap the slots."""
        self._end_mapping()
        self._copier.close()
        self._memories = {}

    def _end_mapping(self, limit_seconds: float | None = None) -> None:
        self._is_closed = True
        self._may_map.set()
        if self._ahead is not None:
            self._ahead.join(limit_seconds)

    def _fly(
        self,
        capture: _Capture,
        plan: CapturePlan,
        memory: SlotMemory,
        later: Copies,
        marks: Marks,
        *,
        is_audited: bool,
    ) -> None:
        """Start the copies of the tensors into the slot in the background.

        Before the next change of the training state, the guard (`everstep.training.guard`) waits for these copies.
        """
        assert self._tensors is not None
        sources = self._tensors.later
        is_large = self._tensors.later_bytes >= STREAMED_BYTES
        is_streamed = is_large and not self._is_crowded
        is_prompt = self._copier.is_prompt and not is_audited
        self.telling = capture.step if is_prompt else NONE
        cold_bytes = capture.payload_bytes - self._tensors.later_bytes
        is_warm = cold_bytes <= max(self._tensors.later_bytes, COLD_BYTES)
        chunks = _WarmDigests(memory, capture.payload_bytes) if is_prompt and is_warm and not is_streamed else None

        def settle(changed: Sequence[str], error: BaseException | None) -> None:
            # Report the step of this capture. With a GPU, the training thread may already be at a later step.
            if error is not None:
                self._answer(capture, self._abandoned(capture.step, f"the copy failed: {error}"))
            elif changed:
                words = f"{changed[0]} changed outside an optimizer step"
                self._answer(capture, self._abandoned(capture.step, words, UnkeptCause.CHANGED))
            else:
                kind = partial(
                    Captured,
                    chunk_digests=chunks.all() if chunks is not None else b"",
                    seconds=time.perf_counter() - capture.begun,
                )
                self._answer(capture, self._capture_message(capture, kind))

        verdict = _Verdict(partial(sources.moved, marks), settle)
        has_pauses = self._has_pauses(sources)

        # The copier's thread calls this function when the copy of the snapshot has ended.
        def copied(error: BaseException | None) -> None:
            if chunks is not None and error is None:
                # Compute the digests before `on_copying(NONE)`, which reports on the page that this rank no longer uses
                # the slot.
                chunks.all()
            self._on_copying(NONE)
            if is_audited:
                if is_streamed and error is None:
                    self._hint_capturing(capture, capture.payload_bytes)
                return
            verdict.end_copy(error)
            if error is None and not (has_pauses and self._await_pause(lambda: self._copier.do_later(verdict.look))):
                # Send the queued report of the finished step now. Otherwise, the report would wait for the message
                # `Captured`, which the rank sends only after the guard has checked that no tensor changed during the
                # copy.
                self._link.let_go()

        def reached(changed: Sequence[str], error: BaseException | None) -> None:
            if is_audited:
                settle(changed, error or ticket.error)
            elif error is not None:
                verdict.fail(error)

        def progress(complete_count: int, piece_bytes: int) -> None:
            if is_large:
                # The copy takes long, so send the queued report of the finished step now. If the copy is short, the
                # report is sent together with `Captured` instead, so that the agent wakes up only once.
                self._link.let_go()
            if complete_count == len(sources.positions):
                return
            # The bytes before this offset do not change any more: they were copied by the copier or at the boundary.
            final_bytes = plan.entries[sources.positions[complete_count]].offset + piece_bytes
            if chunks is not None:
                chunks.reach(final_bytes)
            elif is_streamed:
                self._hint_capturing(capture, final_bytes)

        is_followed = is_streamed or chunks is not None or (is_prompt and is_large)
        ticket = self._ticket = self._copier.start(
            Copies((), ()) if is_audited else later, copied, progress if is_followed else None
        )
        copies = later.targets if is_audited else None
        moved = partial(sources.moved, marks) if is_audited else verdict.look
        self._guard.arm(Flight(sources, moved, copies, ticket, reached, time.perf_counter() - capture.begun))

    def _has_pauses(self, sources: Sources) -> bool:
        """Return whether a check at a pause of the main thread finds every change of these tensors.

        A pause is a moment when the thread executes no torch operation. False if a tensor has a wrapper, that is, a
        subclass of `Tensor` around it. Python code of this class may change the tensor and pause before torch
        increments the wrapper's version, so a check at such a pause would miss the change.
        """
        return is_main_thread() and not sources.has_wrappers

    def _answer(self, capture: _Capture, message: Captured | Abandoned) -> None:
        """Report a capture's outcome to the agent, unless it is already reported. Safe from any thread.

        If a capture is interrupted, both the capture itself and the end of its copy may try to report.
        """
        if capture.claim_answer():
            self._link.send(message)

    def _note(self, reason: str) -> None:
        """Log the reason why the rank cannot capture steps, unless it was the last logged reason.

        Training continues.
        """
        if reason != self._unresumable:
            self._unresumable = reason
            logger.warning("snapshots fail, so a restart returns to the last committed step: %s", reason)

    def _hint_capturing(self, capture: _Capture, final_bytes: int) -> None:
        self._link.hint(self._capture_message(capture, partial(Capturing, final_bytes=final_bytes)))

    def _abandoned(self, step: int, reason: str, cause: UnkeptCause = UnkeptCause.CAPTURE) -> Abandoned:
        return Abandoned(generation=self._link.generation, step=Step(step), reason=reason, cause=cause)

    def _capture_message(self, capture: _Capture, kind: Callable[..., CaptureMessage]) -> CaptureMessage:
        return kind(
            generation=self._link.generation,
            step=Step(capture.step),
            slot=capture.slot,
            layout_hash=self._state.layout_hash,
            payload_bytes=capture.payload_bytes,
            index_offset=capture.index_offset,
            index_bytes=capture.index_bytes,
        )

    def _plan_for(self, observed: Observed) -> CapturePlan:
        tensors = observed.tensors
        return CapturePlan.make(tensors, self._state.parts(tensors))

    def _request(self, observed: Observed) -> None:
        """Make a capture plan (list of tensors) for this state, and request slots of the size that the plan needs."""
        self._plan = self._plan_for(observed)
        self._tensors = None
        capacity_bytes = self._plan.capacity_bytes(observed.values)
        if self._growth_count > 1:
            # The history of LBFGS grows at each step: without spare room, each step would only bring new slots.
            capacity_bytes += align(capacity_bytes // 2)
        self._link.send(
            SlotsRequest(
                generation=self._link.generation, layout_hash=self._state.layout_hash, capacity_bytes=capacity_bytes
            )
        )

    def _ask(self, refused: CapturePlan, *, only_for_less: bool = False) -> None:
        """Request slots again, if wanted only if the state is now smaller than that of the refused slots."""
        try:
            observed = self._state.observe()
            if not only_for_less or CapturePlan.make(observed.tensors).index_offset < refused.index_offset:
                self._request(observed)
        except Exception as error:  # Catch any error, because methods of the script's objects may raise any class.
            self._note(_reason(error))

    def _map(self, granted: SlotsGranted) -> Mapping[int, SlotMemory]:
        """Map the granted slots, except those whose files are smaller than granted.

        A file that is too small still holds an earlier, smaller state. The agent replaces the file and sends a new
        `SlotsGranted` before it grants this slot for a step.
        """
        with self._mapping:
            # Map the slots again after a new `SlotsGranted`, because the agent may have replaced the files at the same
            # paths.
            if granted is not self._granted:
                before, self._memories = self._memories, {}
                for memory in before.values():
                    self._copier.release(memory)
                self._memories = {
                    slot: SlotMemory(Path(path), granted.capacity_bytes)
                    for slot, path in enumerate(granted.paths)
                    if os.stat(path).st_size >= HEADER_BYTES + granted.capacity_bytes
                }
                self._granted = granted
                for memory in self._memories.values():
                    self._copier.prepare(memory)
            return self._memories


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CannotResume) else f"{type(error).__name__}: {error}"
