"""Snapshots of a rank's state: from a proposed step and a granted slot to `Captured`, or to `Abandoned` and why.

    boundary                      forward and backward              before the next optimizer step
    observe; copy what may ──────▶ the copier copies the rest, ────▶ the guard waits for it, checks it
    change any time; index         `Capturing` … `Captured`          (audited: all is copied at the boundary, `Captured` only now)

Invariant: a snapshot is reported as captured only when every byte of it is of its own step, as far as torch counts the
changes that the training thread makes. Audits find changes that torch does not count. No failure in here reaches the
training script.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
)
from everstep.protocol.slot import HEADER_BYTES, chunk_count, chunk_range, digest
from everstep.training.agent_link import AgentLink
from everstep.training.capture import CapturePlan, SlotMemory, StateTensor
from everstep.training.copier import Copier, Copies, CopyTicket
from everstep.training.errors import CannotResume
from everstep.training.guard import Flight, Guard
from everstep.training.pauses import await_pause, is_main_thread
from everstep.training.sources import Marks, Sources
from everstep.training.state import Observed, RankState

LOOK_SECONDS = 0.25
"""How often it is looked whether the first slots are still wanted; that they are granted is heard at once."""
STREAMED_BYTES = 32 * 1024 * 1024
"""Of deferred tensors, from which on the agent is told how far the copy has come: it gains 0.1 ms a MiB by that, and each word costs as much.
Not where cores are few, and digests and streams take the copier's: on two cores with two ranks, 1 GiB each, a commit
took 1,003 ms a GiB instead of 926, and training with little time for the copy was blocked for 186 ms instead of 5
(medians, measured in turn)."""
ASK_AGAIN_BOUNDARIES = 100
"""From one look at a state that had grown beyond its node's memory to the next: it may have become smaller again."""
COLD_BYTES = 8 * 1024 * 1024
"""What was copied at the boundary the copier digests up to this size, however little it copies itself: training waits for its end."""

Told = TypeVar("Told", Capturing, Captured)

logger = logging.getLogger("everstep.training")


@dataclass(frozen=True, slots=True)
class _Written:
    """What will be in a slot once the copies have ended."""

    step: int
    slot: int
    index_offset: int
    index_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.index_offset + self.index_bytes


class _Capture:
    """A capture under way.

    Args:
        step: steps finished.
        slot: the granted slot that it is written to.
        begun: `time.perf_counter` at the boundary.
    """

    def __init__(self, step: int, slot: int, begun: float) -> None:
        self.step = step
        self.slot = slot
        self.begun = begun
        self._lock = threading.RLock()
        self._is_answered = False

    def claim_answer(self) -> bool:
        """Say whether the caller is the one that reports the outcome to the agent: the first of all threads that ask."""
        with self._lock:
            is_first, self._is_answered = not self._is_answered, True
            return is_first


class _Verdict:
    """Decides once whether an unaudited snapshot is whole, and reports that once its copy has ended. Any thread.

    A change that began before the end of the copy is in a version only when its operation has ended. So the one look
    that decides is made at a moment when the training thread is inside no operation: at a pause behind the copy, or at
    the guard, whichever comes first.

    Args:
        moved: returns the names of the tensors whose versions or addresses changed since the boundary.
        settle: called once, with those names, and with the error that ended the copy, the look or the wait at the
            guard.
    """

    def __init__(
        self, moved: Callable[[], Sequence[str]], settle: Callable[[Sequence[str], BaseException | None], None]
    ) -> None:
        self._moved = moved
        self._settle = settle
        self._lock = threading.RLock()  # a signal handler of the script may reach the guard in the middle of a look
        self._changed: Sequence[str] | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_settled = False

    def look(self) -> Sequence[str]:
        """Decide, unless that was done before; return the names of the tensors that changed too early."""
        with self._lock:
            if self._changed is None and not self._is_settled:
                changed = self._moved()
                self._changed = changed if self._changed is None else self._changed
        self._conclude()
        return self._changed or ()

    def fail(self, error: BaseException) -> None:
        """Give the snapshot up: no look could be made at the guard."""
        with self._lock:
            self._error = self._error or error
        self._conclude()

    def end_copy(self, error: BaseException | None) -> None:
        """Take note that the copy has ended. In the copier's thread."""
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
    """The tensors of a plan that stay the same from boundary to boundary, sorted by when they are copied.

    Args:
        lists: as they were observed.
        unstable: names of those that may change before the next optimizer step after all.
    """

    def __init__(self, lists: Sequence[list[StateTensor]], unstable: Collection[str]) -> None:
        self.lists = lists
        self.unstable_count = len(unstable)
        tensors = list(enumerate(chain.from_iterable(lists)))
        is_later = [state.is_deferred and state.name not in unstable for _, state in tensors]
        # In the plan's order, which is that of the payload: what has been copied of it is final from the front.
        self.later = Sources(list(compress(tensors, is_later)))
        self.later_bytes = sum(state.tensor.nbytes for state in compress(chain.from_iterable(lists), is_later))
        self.now = Sources(list(compress(tensors, map(operator.not_, is_later))))
        self.count = len(tensors)

    def are(self, lists: Sequence[list[StateTensor]], unstable: Collection[str]) -> bool:
        """Say whether these are the tensors still, in the shapes that they had."""
        return (
            len(unstable) == self.unstable_count
            and len(lists) == len(self.lists)
            and all(map(operator.is_, lists, self.lists))
            and self.now.renew()
            and self.later.renew()
        )


class _WarmDigests:
    """Digests a slot's chunks behind the copy. In the copier's thread.

    Args:
        memory: the slot that is being written.
        payload_bytes: of what will be in it.
    """

    def __init__(self, memory: SlotMemory, payload_bytes: int) -> None:
        self._memory = memory
        self._payload_bytes = payload_bytes
        self._known = bytearray()
        self._next = 0

    def reach(self, final_bytes: int) -> None:
        """Take the chunks that are whole by now.

        Args:
            final_bytes: the payload's first bytes, up to here, are not written any more.
        """
        while (
            self._next < chunk_count(self._payload_bytes)
            and (ends := chunk_range(self._next, self._payload_bytes))[1] <= final_bytes
        ):
            with self._memory.bytes_at(*ends) as chunk:
                self._known += digest(chunk)
            self._next += 1

    def all(self) -> bytes:
        """Return the digests of all chunks, none of which is written any more."""
        self.reach(self._payload_bytes)
        return bytes(self._known)


class Snapshotter:
    """Takes snapshots of one rank. Used by the training thread; one owner: the session.

    Args:
        state: of the rank.
        link: to the agent.
        copier: brings tensors into slots.
        guard: stands before the next change.
        on_copying: told the step whose copier runs, and `NONE` when it has stopped; called from any thread.
        is_crowded: there are few cores for each rank.
        await_pause: finds pauses of the main thread (`everstep.training.pauses`).
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
        self._mapping = threading.Lock()  # by the training thread, and once ahead of it
        self._ahead: threading.Thread | None = None
        self._may_map = threading.Event()
        self._tell: Callable[[], None] = lambda: None
        self._is_closed = False
        self._granted: SlotsGranted | None = None
        self._memories: Mapping[int, SlotMemory] = {}
        self._refused_count = 0
        """Boundaries passed since slots were refused."""
        self._ticket: CopyTicket | None = None
        """Of the copy that was begun last."""
        self._unresumable = ""
        """What could not be observed when it was tried last."""
        self.settled = NONE
        """The step that was captured or abandoned last."""
        self.telling = NONE
        """The step that was captured last, if the copier's thread lets the boundary's word go.

        From the training thread it would wake the agent on
        the core that training needs just then."""

    @property
    def has_slots(self) -> bool:
        """Slots of the present plan are granted."""
        return self._plan is not None and isinstance(self._link.slots, SlotsGranted)

    @property
    def obstacle(self) -> str:
        """Why there will be no slots; empty while there may be."""
        answer = self._link.slots
        return answer.reason if isinstance(answer, SlotsRefused) else self._unresumable if self._plan is None else ""

    def foresee(self) -> None:
        """Ask for slots before the first boundary, where it is known what the first step of each optimizer will add to the state. Once, by `init`."""
        self._ahead = threading.Thread(target=self._map_granted, name="everstep-slots", daemon=True)
        self._ahead.start()
        with contextlib.suppress(Exception):  # said when it is a step that is not kept
            if (foreseen := self._state.foresee()) is not None:
                self._request(foreseen)

    def begin(self, tell: Callable[[], None]) -> None:
        """Map the first slots as soon as they are granted, and have their pages given: at a boundary that would be in the way. Once, by `restore`,
        which does not wait for a thread to begin.

        Args:
            tell: called first, in that thread: on few cores an agent that is woken takes the one that training needs.
        """
        self._tell = tell
        self._may_map.set()

    def _map_granted(self) -> None:
        self._may_map.wait()
        self._tell()
        while not self._is_closed and self._link.slots is None:
            self._link.wait(LOOK_SECONDS)
        if not self._is_closed and isinstance(granted := self._link.slots, SlotsGranted):
            with contextlib.suppress(OSError, ValueError):  # a capture says so, in a place where it matters
                self._map(granted)

    def prepare(self) -> None:
        """Ask for slots if that has not been done, and get those that were granted ready.

        At every boundary, behind a capture.
        """
        if self._plan is None:
            try:
                self._request(self._state.observe())
            except Exception as error:  # the script's own objects are asked for their state
                self._note(_reason(error))
            return
        answer = self._link.slots
        self._refused_count = self._refused_count + 1 if isinstance(answer, SlotsRefused) else 0
        if isinstance(answer, SlotsGranted):
            with contextlib.suppress(OSError, ValueError):  # a capture says so, in a place where it matters
                self._map(answer)
        elif self._refused_count == ASK_AGAIN_BOUNDARIES:
            self._refused_count = 0
            self._ask_for_less(self._plan)

    def forget(self) -> None:
        """The settled step is no longer the proposed one: if it is proposed again (in the final round), it is a new proposal."""
        self.settled = NONE

    def capture(self, step: int, slot: int) -> None:
        """Capture the present boundary into a granted slot; returns when the script may train on.

        Args:
            step: steps finished.
            slot: which of the granted slots.
        """
        begun = time.perf_counter()
        try:
            abandoned = self._capture(_Capture(step, slot, begun))
        except Exception as error:
            # registered at init in order, and changed since; or the script's own code fails when it is asked for its state
            abandoned = _reason(error)
            self._note(abandoned)
        if abandoned:
            self.abandon(step, abandoned)

    def _capture(self, capture: _Capture) -> str:
        """Do it, or return why it cannot be done."""
        observed = self._state.observe()
        if self._plan is None or not self._is_planned(observed):
            self._plan = CapturePlan.make(observed.tensors)
            self._tensors = None
        granted = self._link.slots
        if not isinstance(granted, SlotsGranted):
            return "the agent has gone"
        if not self._plan.fits_into(granted.capacity_bytes, observed.values):
            self._request(observed)
            return "the layout of the state has changed; slots for the new one are asked for"
        try:
            memory = self._map(granted)[capture.slot]
        except (OSError, ValueError, LookupError) as error:
            return f"slot {capture.slot} cannot be mapped: {error}"
        return self._write(capture, observed, self._plan, memory)

    def _is_planned(self, observed: Observed) -> bool:
        """Say whether the plan is one for this state.

        Most boundaries find the very tensors of the one before, and then little is looked at.
        """
        assert self._plan is not None
        if self._tensors is not None and self._tensors.are(observed.lists, self._guard.unstable):
            return self._tensors.count + len(observed.fresh) == len(self._plan.entries) and self._plan.fits_at(
                self._tensors.count, observed.fresh
            )
        self._tensors = None
        return self._plan.fits(observed.tensors)

    def _write(self, capture: _Capture, observed: Observed, plan: CapturePlan, memory: SlotMemory) -> str:
        if self._ticket is not None:
            # on a device training may be ahead of the last copy, at whose end the page says that nobody is at a slot
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
                # Compared with a copy made later, a tensor that changed before it was copied would look as if it had
                # not changed at all.
                self._copier.copy(later)
            index_bytes = memory.write_values(plan, observed.values)
            written = _Written(capture.step, capture.slot, plan.index_offset, index_bytes)
            self._fly(capture, written, plan, memory, later, marks, is_audited=is_audited)
        except BaseException as error:  # what a driver says by torch, among others, or what a signal handler raises
            with contextlib.suppress(Exception):
                self._copier.start(
                    Copies((), ()), lambda _: None
                ).join()  # what was asked for before may still be on its way into the slot
            self._on_copying(NONE)
            self.telling = NONE
            if not isinstance(error, Exception):
                self._answer(capture, self._abandoned(capture.step, f"the copy was broken off: {type(error).__name__}"))
                raise
            return f"the copy failed: {error}"
        return ""

    def abandon(self, step: int, reason: str) -> None:
        """Tell the agent that there is no snapshot of `step`."""
        self.settled = step
        self._link.send(self._abandoned(step, reason))

    def drain(self, limit_seconds: float) -> None:
        """Let a copy that was begun come to its end, for so long at most, and settle it: the step may still be kept.

        For a script that has failed.
        """
        deadline = time.monotonic() + limit_seconds
        self._end_mapping(limit_seconds)
        if self._copier.drain(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(
                RuntimeError
            ):  # what a driver says by torch: the state is out of reach, and so is the step
                self._guard.reach()

    def close(self) -> None:
        """End the copier and let go of the slots."""
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
        written: _Written,
        plan: CapturePlan,
        memory: SlotMemory,
        later: Copies,
        marks: Marks,
        *,
        is_audited: bool,
    ) -> None:
        """Start the deferred copies and put the guard before the next change."""
        assert self._tensors is not None
        sources = self._tensors.later
        is_large = self._tensors.later_bytes >= STREAMED_BYTES
        is_streamed = is_large and not self._is_crowded
        is_prompt = self._copier.is_prompt and not is_audited
        self.telling = written.step if is_prompt else NONE
        cold_bytes = written.payload_bytes - self._tensors.later_bytes
        is_warm = cold_bytes <= max(self._tensors.later_bytes, COLD_BYTES)
        chunks = _WarmDigests(memory, written.payload_bytes) if is_prompt and is_warm and not is_streamed else None

        def settle(changed: Sequence[str], error: BaseException | None) -> None:
            # The step itself was settled when its copy was begun: on a device training may be at another one by now.
            if error is not None:
                self._answer(capture, self._abandoned(written.step, f"the copy failed: {error}"))
            elif changed:
                self._answer(capture, self._abandoned(written.step, f"{changed[0]} changed outside an optimizer step"))
            else:
                told = partial(
                    Captured,
                    chunk_digests=chunks.all() if chunks is not None else b"",
                    seconds=time.perf_counter() - capture.begun,
                )
                self._answer(capture, self._told(written, told))

        verdict = _Verdict(partial(sources.moved, marks), settle)
        has_pauses = self._has_pauses(sources)

        def copied(error: BaseException | None) -> None:  # in the copier's thread
            if chunks is not None and error is None:
                chunks.all()  # before the page says that nobody is at this slot any more
            self._on_copying(NONE)
            if is_audited:
                if is_streamed and error is None:
                    self._hint_capturing(written, written.payload_bytes)
                return
            verdict.end_copy(error)
            if error is None and not (has_pauses and self._await_pause(lambda: self._copier.do_later(verdict.look))):
                self._link.let_go()  # the guard decides; the boundary's word does not wait for it

        def reached(changed: Sequence[str], error: BaseException | None) -> None:
            if is_audited:
                settle(changed, error or ticket.error)
            elif error is not None:
                verdict.fail(error)

        def progress(complete_count: int, piece_bytes: int) -> None:
            if is_large:
                self._link.let_go()  # a short copy's end goes with it: the agent is woken once
            if complete_count == len(sources.positions):
                return
            final_bytes = (
                plan.entries[sources.positions[complete_count]].offset + piece_bytes
            )  # what lies in between is there since the boundary
            if chunks is not None:
                chunks.reach(final_bytes)
            elif is_streamed:
                self._hint_capturing(written, final_bytes)

        is_followed = is_streamed or chunks is not None or (is_prompt and is_large)
        ticket = self._ticket = self._copier.start(
            Copies((), ()) if is_audited else later, copied, progress if is_followed else None
        )
        copies = later.targets if is_audited else None
        moved = partial(sources.moved, marks) if is_audited else verdict.look
        self._guard.arm(Flight(sources, moved, copies, ticket, reached, time.perf_counter() - capture.begun))

    def _has_pauses(self, sources: Sources) -> bool:
        """Say whether a pause of the main thread shows all changes of these tensors.

        A wrapper's are counted late: when Python code of its class has returned, in which there are pauses.
        """
        return is_main_thread() and not sources.has_wrappers

    def _answer(self, capture: _Capture, message: Captured | Abandoned) -> None:
        """Tell the agent what became of a capture, once: one that was broken off may have come to its end, or come to it yet. Any thread."""
        if capture.claim_answer():
            self._link.send(message)

    def _note(self, reason: str) -> None:
        """Say once in the rank's output why its steps are not kept; training goes on."""
        if reason != self._unresumable:
            self._unresumable = reason
            logger.warning("steps are not kept, and a restart goes back to the last one that was: %s", reason)

    def _hint_capturing(self, written: _Written, final_bytes: int) -> None:
        self._link.hint(self._told(written, partial(Capturing, final_bytes=final_bytes)))

    def _abandoned(self, step: int, reason: str) -> Abandoned:
        return Abandoned(generation=self._link.generation, step=Step(step), reason=reason)

    def _told(self, written: _Written, kind: Callable[..., Told]) -> Told:
        return kind(
            generation=self._link.generation,
            step=Step(written.step),
            slot=written.slot,
            layout_hash=self._state.layout_hash,
            payload_bytes=written.payload_bytes,
            index_offset=written.index_offset,
            index_bytes=written.index_bytes,
        )

    def _request(self, observed: Observed) -> None:
        """Plan for this state, and ask for slots of its size."""
        self._plan = CapturePlan.make(observed.tensors)
        self._tensors = None
        capacity_bytes = self._plan.capacity_bytes(observed.values)
        self._link.send(
            SlotsRequest(
                generation=self._link.generation, layout_hash=self._state.layout_hash, capacity_bytes=capacity_bytes
            )
        )

    def _ask_for_less(self, refused: CapturePlan) -> None:
        """Ask for slots once more if the state is smaller than the one whose slots were refused."""
        try:
            observed = self._state.observe()
            if CapturePlan.make(observed.tensors).index_offset < refused.index_offset:
                self._request(observed)
        except Exception as error:  # the script's own objects are asked for their state
            self._note(_reason(error))

    def _map(self, granted: SlotsGranted) -> Mapping[int, SlotMemory]:
        """Map the slots that lie ready; one that still holds an older, smaller state is made anew, and told of, before it is granted."""
        with self._mapping:
            if granted is not self._granted:  # the same paths may be new files
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
