"""Captures a proposed step into a slot and reports the outcome to the agent, as `Captured` or `Abandoned`.

    boundary                      forward and backward              before the next optimizer step
    observe; copy tensors ───────▶ the copier copies the others, ──▶ the guard waits for the copy and checks it
    that may change at any time   `Capturing` … `Captured`          (audited snapshots: everything is copied at the
                                                                     boundary, `Captured` is sent only here)

Invariant: the rank reports a snapshot as captured only if every byte belongs to its step. Versions of tensors show all
changes that torch counts, and audits find others. Errors of this module never reach the training script.
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
"""Interval of checks for the end of the session, while a background thread waits for the first slots."""
# For smaller states, a report costs as much time as it saves. With few cores, early digests and transfers would use the
# copier's core, delay the commit and block training.
STREAMED_BYTES = 32 * 1024 * 1024
"""Smallest background copy whose progress the rank reports, so that the agent sends chunks early."""
ASK_AGAIN_BOUNDARIES = 100
"""Steps until the rank requests refused slots again, because the state may have become smaller."""
# The part that the training thread copied has left the cache. Its digests would take the copier so long that training
# would wait at the guard, so the agent computes them.
COLD_BYTES = 8 * 1024 * 1024
"""Bytes copied at the boundary above which the copier computes no digests, unless it copies more bytes itself."""

CaptureMessage = TypeVar("CaptureMessage", Capturing, Captured)

logger = logging.getLogger("everstep.training")


class _Capture:
    """One capture of a step into a slot, until the rank has reported the outcome. `begun` is of `time.perf_counter`."""

    def __init__(self, step: int, slot: int, begun: float) -> None:
        self.step = step
        self.slot = slot
        self.begun = begun
        self.index_offset = self.index_bytes = 0
        """Set once the index is in the slot."""
        self._lock = threading.RLock()
        self._is_answered = False

    @property
    def payload_bytes(self) -> int:
        """Valid once the index is in the slot."""
        return self.index_offset + self.index_bytes

    def claim_answer(self) -> bool:
        """Return True to the first caller only, who may report the outcome to the agent."""
        with self._lock:
            is_first, self._is_answered = not self._is_answered, True
            return is_first


class _Verdict:
    """Decides once whether a snapshot's copy is consistent, and reports the result when the copy has also ended.

    It is consistent if no tensor's version or address changed meanwhile. `look` must be called after the copy, while
    the training thread executes no torch operation: at a pause (`everstep.training.pauses`) or at the guard. `settle`
    gets the names of changed tensors and an error, if any. Safe from any thread; not used for audits.
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
        """Decide, in the first call, and return the names of tensors that changed during the copy."""
        with self._lock:
            if self._changed is None and not self._is_settled:
                changed = self._moved()
                self._changed = changed if self._changed is None else self._changed
        self._conclude()
        return self._changed or ()

    def fail(self, error: BaseException) -> None:
        """Record that the guard's check raised `error`, so that the snapshot is abandoned."""
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
    """The tensors of a snapshot that stay the same objects. Tensors in `unstable` are copied at the boundary."""

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
        """Return whether the adapters' lists still have the same tensor objects, with unchanged shapes."""
        return (
            len(unstable) == self.unstable_count
            and len(lists) == len(self.lists)
            and all(map(operator.is_, lists, self.lists))
            and self.now.renew()
            and self.later.renew()
        )


class _WarmDigests:
    """Computes each chunk's digest right after its copy, while it is in the cache of the copier's thread."""

    def __init__(self, memory: SlotMemory, payload_bytes: int) -> None:
        self._memory = memory
        self._payload_bytes = payload_bytes
        self._known = bytearray()
        self._next = 0

    def reach(self, final_bytes: int) -> None:
        """Compute the digests of the first `final_bytes`, which no copy will write again."""
        while (
            self._next < chunk_count(self._payload_bytes)
            and (ends := chunk_range(self._next, self._payload_bytes))[1] <= final_bytes
        ):
            with self._memory.bytes_at(*ends) as chunk:
                self._known += digest(chunk)
            self._next += 1

    def all(self) -> bytes:
        self.reach(self._payload_bytes)
        return bytes(self._known)


class Snapshotter:
    """Takes the snapshots of one rank, in the training thread. `on_copying` is called in any thread."""

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
        """Steps since the agent refused slots; 0 otherwise."""
        self._growth_count = 0
        """How often the state has outgrown its slots, since a request for spare room was refused."""
        self._ticket: CopyTicket | None = None
        self._unresumable = ""
        """Why the last attempt to observe or capture the state failed; empty if it succeeded."""
        self.settled = NONE
        """The step that the rank captured or abandoned last."""
        # A report from the training thread would wake the agent on the core that training needs at that moment.
        self.telling = NONE
        """The finished step that the copier's thread reports in place of the training thread, or `NONE`."""

    @property
    def has_slots(self) -> bool:
        """Whether the granted slots have the size of the current capture plan."""
        return self._plan is not None and isinstance(self._link.slots, SlotsGranted)

    @property
    def obstacle(self) -> str:
        """Return why the agent will not grant slots for this state; empty if it still may."""
        answer = self._link.slots
        return answer.reason if isinstance(answer, SlotsRefused) else self._unresumable if self._plan is None else ""

    def forecast(self) -> None:
        """Request slots before the first boundary, if the state after the first step is predictable."""
        self._ahead = threading.Thread(target=self._map_granted, name="everstep-slots", daemon=True)
        self._ahead.start()
        with contextlib.suppress(Exception):  # An error here is ignored, because `prepare` raises it again and logs it.
            if (foreseen := self._state.forecast()) is not None:
                self._request(foreseen)

    def begin(self, announce: Callable[[], None]) -> None:
        """Map the first slots, and allocate their memory, in the background, because it would block training after a
        step. The thread first calls `announce` once, which asks the agent to read the rank's page.
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
        """Request slots if none are requested, and map granted slots, after every step and its capture."""
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
        """Clear `settled`, when the agent proposes a different step or none. At the end of training, it may propose the
        same step again, and the rank must then answer again.
        """
        self.settled = NONE

    def capture(self, step: int, slot: int) -> None:
        """Start to copy the finished step into a granted slot, and return as soon as training may continue."""
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
        """Return whether the current capture plan still fits, usually by the identity of the tensor objects."""
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
        """Report that the rank made no snapshot of `step`."""
        self.settled = step
        self._link.send(self._abandoned(step, reason, cause))

    def drain(self, limit_seconds: float) -> None:
        """Wait for the running copy and report it, after the script failed. The step may still be committed."""
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
        """Start the background copies into the slot, for which the guard waits."""
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
        """Return whether checks at pauses find every change of these tensors."""
        # Python code of a wrapper's class may change the tensor and pause before torch increments its version.
        return is_main_thread() and not sources.has_wrappers

    def _answer(self, capture: _Capture, message: Captured | Abandoned) -> None:
        """Report a capture's outcome once. Safe from any thread."""
        if capture.claim_answer():
            self._link.send(message)

    def _note(self, reason: str) -> None:
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
        """Request slots again. With `only_for_less`, do so only if the state is now smaller than that of `refused`."""
        try:
            observed = self._state.observe()
            if not only_for_less or CapturePlan.make(observed.tensors).index_offset < refused.index_offset:
                self._request(observed)
        except Exception as error:  # Catch any error, because methods of the script's objects may raise any class.
            self._note(_reason(error))

    def _map(self, granted: SlotsGranted) -> Mapping[int, SlotMemory]:
        """Map the granted slots, except those whose files still hold a smaller state until the next `SlotsGranted`."""
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
