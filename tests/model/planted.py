"""Bugs planted into the step protocol, each in one rule.

The model must find every one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from control_plane.core import recovery
from everstep.protocol.ids import Generation, NodeId, Step
from everstep.protocol.rank_messages import Vote
from tests.model.step_protocol import Rules
from tests.model.stop_agreement import UploadsFirst
from worker.core.rounds import NONE, Coordinator, Shard
from worker.core.slots import Content, SlotView, kept, writable


class OwnerAcks(Shard):
    """Planted bug: the owner acknowledges a step when its own slot is sealed, before other holders have the step."""

    __slots__ = ()

    def _settled(self) -> Shard:
        ready = self.vote is Vote.NONE and self.proposed != NONE and self.proposed in self.sealed
        return replace(self, vote=Vote.ACKED) if ready else self


class CountsCaptures(Shard):
    """Planted bug: an owner counts a step as sealed while the step is still being captured."""

    __slots__ = ()

    def capture(self, step: Step) -> Shard:
        return self.seal(step) if super().capture(step) != self else self


class OwnersOnly(Shard):
    """Planted bug: at the start of a generation, votes wait only for each shard's owner and for no other holder."""

    __slots__ = ()

    @classmethod
    def begin(cls, base: Step, peers: tuple[NodeId, ...], *, has_parity: bool = False) -> Shard:
        return replace(
            super().begin(base, peers, has_parity=has_parity), view=frozenset() if base else frozenset(peers)
        )


class ReturnsUnconfirmed(Shard):
    """Planted bug: a holder that the owner has dropped counts again after acknowledging any step, without having the
    committed one.
    """

    __slots__ = ()

    def _confirmed(self, peer: NodeId) -> Shard:
        return replace(self, view=self.view | {peer}) if peer in self.peers else self


class NeverRevokes(Shard):
    """Planted bug: an acknowledgement counts forever, even after the holder has lost the step."""

    __slots__ = ()

    def inventory(self, peer: NodeId, steps: frozenset[Step]) -> Shard:
        return replace(self, held=self.held | {(peer, step) for step in steps})._confirmed(peer)._settled()


class ForgetsPage(Shard):
    """Planted bug: a restarted agent ignores the committed step, the proposal and the vote on its rank's page."""

    __slots__ = ()

    @classmethod
    def adopt(cls, base: Step, peers: tuple[NodeId, ...], **known: object) -> Shard:
        return super().adopt(base, peers, **{**known, "committed": NONE, "proposed": NONE, "vote": Vote.NONE})  # type: ignore[arg-type]


class CommitsMajority(Coordinator):
    """Planted bug: the coordinator commits a step when one acknowledgement is still missing."""

    __slots__ = ()

    def _decided(self) -> Coordinator:
        acked = [each for each in self.ranks if each.proposed == self.proposed and each.vote is Vote.ACKED]
        if not self.is_recovering and self.proposed != NONE and len(acked) >= max(1, self.world_size - 1):
            return replace(self, committed=self.proposed, proposed=NONE)
        return super()._decided()


class Forgets(Coordinator):
    """Planted bug: a restarted coordinator continues after the newest committed step of any agent.

    It may reuse the number of a step that was proposed.
    """

    __slots__ = ()

    def _recovered(self) -> Coordinator:
        if not self.is_recovering or not self.is_complete:
            return self
        heard = max(each.committed for each in self.ranks)
        return replace(self, is_recovering=False, committed=heard, newest=heard)


class RecoversEarly(Coordinator):
    """Planted bug: a restarted coordinator continues after the report of the first agent, without all other reports."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return bool(self.ranks) if self.is_recovering else len(self.ranks) == self.world_size


def recycle_oldest(slots: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Planted bug: overwrite the slot with the oldest step, even if this step is the committed step."""
    free = [index for index, slot in enumerate(slots) if not slot.is_busy]
    return min(free, key=lambda index: slots[index].content.step if slots[index].content else -1, default=None)  # type: ignore[union-attr]


def overwrite_pinned(slots: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Planted bug: overwrite a slot that an upload still reads, if its step need not be kept."""
    return writable([replace(slot, is_pinned=False) for slot in slots], keep)


def upload_always(step: Step, *, begun: Step, uploading: Collection[Step], max_uploads: int) -> bool:
    """Planted bug: begin every marked upload, even if `max_uploads` uploads run already."""
    return step > begun


class MarksAlways(Coordinator):
    """Planted bug: the coordinator marks a due checkpoint, even if `max_uploads` uploads run already."""

    __slots__ = ()

    @property
    def uploads_in_flight(self) -> frozenset[Step]:
        return frozenset()


def keep_base_only(committed: Content | None, planned: Collection[Content], base: Content | None) -> frozenset[Content]:
    """Planted bug: keep only the generation's start step and the committed step.

    The plan lists further steps to keep.
    """
    return kept(committed, frozenset(), base)


def choose_newest_per_rank(survey: recovery.Survey) -> recovery.Restore:
    """Planted bug: choose the newest slots of each rank, even if they are from different histories of the job."""
    everything = {record.origin_generation: Step(2**62) for listed in survey.inventories.values() for record in listed}
    return recovery.choose(replace(survey, path=everything))


def believe_the_record(path: recovery.Path, recorded: Step, reported: Iterable[tuple[Generation, Step]]) -> Step:
    """Planted bug: plan with the committed step in the control plane's record, although nodes report a newer one."""
    return recorded


BUGS: Mapping[str, Rules] = {
    "early-recycle": Rules(writable=recycle_oldest),
    "owner-ack": Rules(shard=OwnerAcks),
    "counts-captures": Rules(shard=CountsCaptures),
    "ends-early": Rules(ends_sealed=False),
    "majority": Rules(coordinator=CommitsMajority),
    "base-committed": Rules(starts_committed=True),
    "owners-only": Rules(shard=OwnersOnly),
    "unconfirmed-return": Rules(shard=ReturnsUnconfirmed),
    "never-revokes": Rules(shard=NeverRevokes),
    "forgets-page": Rules(shard=ForgetsPage),
    "no-promise": Rules(has_promises=False),
    "coordinator-forgets": Rules(coordinator=Forgets),
    "coordinator-early": Rules(coordinator=RecoversEarly),
    "keep-base-only": Rules(kept=keep_base_only),
    "no-lineage": Rules(choose=choose_newest_per_rank),
    "stale-floor": Rules(committed=believe_the_record),
    "untold": Rules(tells_committed=False),
    "uploads-first": Rules(coordinator=UploadsFirst),
    "overwrites-pinned": Rules(writable=overwrite_pinned),
    "unpinned-helpers": Rules(pins_helped=False),
    "helps-for-ever": Rules(ends_helping=False),
    "uploads-without-limit": Rules(coordinator=MarksAlways, may_upload=upload_always),
    "unpins-all-uploads": Rules(unpins_own_step=False),
}
