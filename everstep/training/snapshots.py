"""Snapshots of a rank's state: from a proposed step and a granted slot to `Captured`, or to `Abandoned` and why.

    boundary                      forward and backward              before the next optimizer step
    observe; copy what may ──────▶ the copier copies the rest ─────▶ the guard waits for it, checks it
    change any time; index         then `Captured`                   (audited: all is copied at the boundary, `Captured` only now)

Invariant: a snapshot is said to be captured only when every byte of it is of its own step. No failure in here reaches the training script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import NONE, Abandoned, Captured, SlotsGranted, SlotsRefused, SlotsRequest
from everstep.protocol.slot import HEADER_BYTES
from everstep.training.agent_link import AgentLink
from everstep.training.capture import CapturePlan, Copier, CopyPiece, SlotMemory
from everstep.training.errors import CannotResume
from everstep.training.guard import Flight, Guard, Watched, mark_of
from everstep.training.state import Observed, RankState

logger = logging.getLogger("everstep.training")


@dataclass(frozen=True, slots=True)
class _Written:
    """What will be in a slot once the copies have ended."""

    step: int
    slot: int
    index_offset: int
    index_bytes: int


class Snapshotter:
    """Takes snapshots of one rank. Used by the training thread; one owner: the session.

    Args:
        state: of the rank.
        link: to the agent.
        copier: brings tensors into slots.
        guard: stands before the next change.
        on_copying: told the step whose copier runs, and `NONE` when it has stopped; called from any thread.
    """

    def __init__(self, state: RankState, link: AgentLink, copier: Copier, guard: Guard, on_copying: Callable[[int], None]) -> None:
        self._state = state
        self._link = link
        self._copier = copier
        self._guard = guard
        self._on_copying = on_copying
        self._plan: CapturePlan | None = None
        self._granted: SlotsGranted | None = None
        self._memories: Mapping[int, SlotMemory] = {}
        self._unresumable = ""
        """What could not be observed when it was tried last."""
        self.settled = NONE
        """The step that was captured or abandoned last."""

    @property
    def has_slots(self) -> bool:
        """Slots of the present plan are granted."""
        return self._plan is not None and isinstance(self._link.slots, SlotsGranted)

    @property
    def obstacle(self) -> str:
        """Why there will be no slots; empty while there may be."""
        answer = self._link.slots
        return answer.reason if isinstance(answer, SlotsRefused) else self._unresumable if self._plan is None else ""

    def prepare(self) -> None:
        """Ask for slots if that has not been done, and get those that were granted ready. At every boundary, behind a capture.

        Not before the first boundary: until then optimizers have no state to plan for.
        """
        if self._plan is None:
            try:
                self._request(self._state.observe())
            except CannotResume as error:
                self._note(error)
            return
        granted = self._link.slots
        if isinstance(granted, SlotsGranted):
            with contextlib.suppress(OSError, ValueError):  # a capture says so, in a place where it matters
                self._map(granted)

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
            observed = self._state.observe()
        except CannotResume as error:  # registered at init in order, and changed into this since
            self._note(error)
            self.abandon(step, str(error))
            return
        index = self._plan.index(observed.values) if self._plan is not None and self._plan.fits(observed.tensors) else None
        if self._plan is None or index is None:
            self._request(observed)
            self.abandon(step, "the layout of the state has changed; slots for the new one are asked for")
            return
        granted = self._link.slots
        if not isinstance(granted, SlotsGranted):
            self.abandon(step, "the agent has gone")
            return
        try:
            memory = self._map(granted)[slot]
        except (OSError, ValueError, LookupError) as error:
            self.abandon(step, f"slot {slot} cannot be mapped: {error}")
            return
        self.settled = step
        now: list[CopyPiece] = []
        later: list[CopyPiece] = []
        watched: list[Watched] = []
        for item, target in zip(observed.tensors, memory.views(self._plan), strict=True):
            # The detached tensor keeps the memory of this moment, even if the script gives the live one other memory.
            piece = CopyPiece(item.tensor.detach(), target)
            if item.is_deferred and item.name not in self._guard.unstable:
                later.append(piece)
                watched.append(Watched(item.name, item.tensor, target, mark_of(item.tensor)))
            else:
                now.append(piece)
        is_audited = self._guard.is_next_audited()
        if is_audited:
            # Compared with a copy made later, a tensor that changed before it was copied would look as if it had not changed at all.
            now, later = now + later, []
        self._on_copying(step)
        self._copier.copy(now)
        memory.clear(self._plan.gaps)
        memory.write(self._plan.index_offset, index)
        self._fly(_Written(step, slot, self._plan.index_offset, len(index)), later, watched, is_audited=is_audited, begun=begun)

    def abandon(self, step: int, reason: str) -> None:
        """Tell the agent that there is no snapshot of `step`. Any thread."""
        self.settled = step
        self._link.send(Abandoned(generation=self._link.generation, step=Step(step), reason=reason))

    def close(self) -> None:
        """End the copier and let go of the slots."""
        self._copier.close()
        self._memories = {}

    def _fly(self, written: _Written, later: Sequence[CopyPiece], watched: Sequence[Watched], *, is_audited: bool, begun: float) -> None:
        """Start the deferred copies and put the guard before the next change."""

        def settle(changed: Sequence[str], error: BaseException | None) -> None:
            if error is not None:
                self.abandon(written.step, f"the copy failed: {error}")
            elif changed:
                self.abandon(written.step, f"{changed[0]} changed outside an optimizer step")
            else:
                self._send_captured(written)

        def copied(error: BaseException | None) -> None:
            # In the copier's thread. What an unaudited snapshot holds is decided now: no later change can reach it. (A change in flight at
            # this very moment is counted only when it ends; tensors that change in forward are known from the audits before it comes to that.)
            self._on_copying(NONE)
            if not is_audited:
                settle([item.name for item in watched if item.has_moved()], error)

        def reached(changed: Sequence[str]) -> None:
            if is_audited:
                settle(changed, ticket.error)

        ticket = self._copier.start(later, copied)
        self._guard.arm(Flight(written.step, watched, is_audited, ticket, reached, time.perf_counter() - begun))

    def _note(self, error: CannotResume) -> None:
        """Say once in the rank's output why its steps are not kept; training goes on."""
        if str(error) != self._unresumable:
            self._unresumable = str(error)
            logger.warning("steps are not kept, and a restart goes back to the last one that was: %s", error)

    def _send_captured(self, written: _Written) -> None:
        self._link.send(
            Captured(
                generation=self._link.generation,
                step=Step(written.step),
                slot=written.slot,
                layout_hash=self._state.layout_hash,
                payload_bytes=written.index_offset + written.index_bytes,
                index_offset=written.index_offset,
                index_bytes=written.index_bytes,
            )
        )

    def _request(self, observed: Observed) -> None:
        self._plan = CapturePlan.make(observed.tensors, observed.values)
        self._link.send(SlotsRequest(generation=self._link.generation, layout_hash=self._state.layout_hash, capacity_bytes=self._plan.capacity_bytes))

    def _map(self, granted: SlotsGranted) -> Mapping[int, SlotMemory]:
        """Map the slots that lie ready; one that still holds an older, smaller state is made anew, and told of, before it is granted."""
        if granted is not self._granted:  # the same paths may be new files
            self._granted = granted
            self._memories = {
                slot: SlotMemory(Path(path), granted.capacity_bytes)
                for slot, path in enumerate(granted.paths)
                if os.stat(path).st_size >= HEADER_BYTES + granted.capacity_bytes
            }
            for memory in self._memories.values():
                self._copier.prepare(memory)
        return self._memories
