"""Tests from which step a generation starts, in random histories of a job whose number of ranks changes.

Every generation captures a few steps on its nodes, and some nodes are lost. The next generation has another number of
ranks. A reference computes by brute force which steps are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import recovery
from control_plane.core.observed.steps import NO_GENERATION, CheckpointRecord, GenerationRecord
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import ShardSource, SlotRecord

NODES = tuple(NodeId(f"n{i}") for i in range(4))
SLOTS = 2


def digest(rank: int, origin: int, step: int) -> bytes:
    return bytes([rank, origin, step]) + bytes(13)


@dataclass
class Story:
    """A simulated job that runs on all its nodes, with one rank per node."""

    nodes: list[NodeId]
    slots: dict[NodeId, list[SlotRecord]] = field(default_factory=dict)
    lineage: list[GenerationRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    committed: Step = NO_STEP
    base: Step = FIRST_STEP
    base_origin: Generation = NO_GENERATION
    """The generation whose ranks made the shards of the step `base`.

    0 if another number of ranks made that step, and for step 0.
    """

    @property
    def path(self) -> recovery.Path:
        return recovery.path_of(self.lineage, recovery.newest_started(self.lineage))

    @property
    def worlds(self) -> dict[int, int]:
        return {int(record.generation): record.world_size for record in self.lineage}

    def survey(self) -> recovery.Survey:
        return recovery.Survey(
            owners=self.nodes,
            inventories={node: tuple(self.slots.get(node, ())) for node in self.nodes},
            path=self.path,
            worlds=recovery.worlds_of(self.lineage),
            checkpoints=tuple(self.checkpoints),
            committed=self.committed,
            slot_count=SLOTS,
        )

    def launch(self) -> recovery.Restore:
        """Start a generation on the present nodes according to the plan.

        Empty all slots that the plan does not keep.
        """
        restore = recovery.choose(self.survey())
        self.check(restore)
        number = Generation(len(self.lineage) + 1)
        self.lineage.append(
            GenerationRecord(
                generation=number,
                parent=recovery.newest_started(self.lineage),
                base_step=restore.base_step,
                world_size=len(self.nodes),
                was_started=True,
            )
        )
        self.base, self.committed = restore.base_step, Step(-1)
        self.base_origin = next((each[0].origin_generation for each in restore.sources if each), Generation(0))
        for node in self.nodes:
            keep = {(each.owner_rank, each.origin_generation, each.step) for each in restore.keep[node]}
            self.slots[node] = [
                slot
                for slot in self.slots.get(node, [])
                if (slot.owner_rank, slot.origin_generation, slot.step) in keep
            ]
        for rank, sources in enumerate(restore.sources):  # each owner loads the shard of its rank
            if sources:
                self.receive(self.nodes[rank], rank, sources[0].origin_generation, restore.base_step)
        return restore

    def kept(self, node: NodeId, rank: int) -> set[tuple[Generation, Step]]:
        """Return generation and step of each slot of a shard that a node must keep: the committed step.

        Before the first commit, the node must keep all steps up to the start step.
        """
        newest = self.lineage[-1].generation
        held = [slot for slot in self.slots[node] if slot.owner_rank == rank]
        if self.committed != -1:
            return {(newest if self.committed > self.base else self.base_origin, self.committed)}
        return {(slot.origin_generation, slot.step) for slot in held if slot.step <= self.base}

    def receive(self, node: NodeId, rank: int, origin: Generation, step: Step) -> bool:
        """Store a shard of one step on a node. Return False if no slot of the node may be overwritten.

        Without a free slot, the shard replaces the oldest step that the node need not keep.
        """
        held = [slot for slot in self.slots[node] if slot.owner_rank == rank]
        if any((slot.origin_generation, slot.step) == (origin, step) for slot in held):
            return True
        if len(held) >= SLOTS:
            keep = self.kept(node, rank)
            free = [slot for slot in held if (slot.origin_generation, slot.step) not in keep]
            if not free:
                return False
            self.slots[node].remove(min(free, key=lambda slot: slot.step))
        self.slots[node].append(
            SlotRecord(
                owner_rank=Rank(rank),
                origin_generation=origin,
                step=step,
                payload_bytes=1,
                digest=digest(rank, origin, step),
                layout_hash=bytes(16),
            )
        )
        return True

    def train(self, step: Step, captured: list[bool], *, commits: bool, stores: bool) -> None:
        """Let the nodes store the shards of one step.

        A rank's shard belongs on the rank's own node and, as a replica, on the next node. If `commits`, all of these
        nodes store it, and the step is committed. Otherwise `captured` says which of them store it.

        The step from which the generation started is committed first, if the same number of ranks made it.

        Args:
            step: the step.
            captured: whether a node stores a shard, by the number of the pair of node and shard. Shorter lists repeat.
            commits: True if the step is committed.
            stores: True if the committed step also becomes a complete checkpoint in S3.
        """
        newest, world = self.lineage[-1].generation, len(self.nodes)
        holders = [(self.nodes[(rank + copy) % world], rank) for rank in range(world) for copy in range(min(2, world))]
        if self.base_origin and self.committed == -1:
            if not commits:
                return
            assert all(self.receive(node, rank, self.base_origin, self.base) for node, rank in holders)
            self.committed = self.base
        done = [
            self.receive(node, rank, newest, step)
            for number, (node, rank) in enumerate(holders)
            if commits or captured[number % len(captured)]
        ]
        if not commits:
            return
        assert all(done), "a slot must be free for a step of the new generation"
        self.committed = step
        if stores:
            shards = tuple(
                ManifestShard(
                    rank=Rank(rank),
                    key=f"{step}/{rank}",
                    object_bytes=1,
                    etag="",
                    payload_bytes=1,
                    payload_digest=digest(rank, newest, step).hex(),
                    layout_hash="",
                    origin_generation=newest,
                )
                for rank in range(world)
            )
            self.checkpoints.append(CheckpointRecord(generation=newest, step=step, bucket="b", shards=shards))

    # -- invariants of every restore

    def complete_steps(self) -> set[int]:
        """Return all complete steps in the job's present history, by brute force.

        A step of a generation is complete if nodes or checkpoints hold the shards of all ranks of that generation.
        """
        found = set()
        for record in self.lineage:
            held = {
                (slot.step, slot.owner_rank)
                for node in self.nodes
                for slot in self.slots.get(node, ())
                if slot.origin_generation == record.generation
            }
            held |= {
                (checkpoint.step, shard.rank)
                for checkpoint in self.checkpoints
                for shard in checkpoint.shards
                if shard.origin_generation == record.generation
            }
            last = self.path.get(record.generation, -1)
            found |= {
                step
                for step in {step for step, _ in held}
                if step <= last and all((step, rank) in held for rank in range(record.world_size))
            }
        return found

    def check(self, restore: recovery.Restore) -> None:
        assert restore.base_step == max(self.complete_steps(), default=0)
        shards: tuple[tuple[ShardSource, ...], ...] = restore.sources
        if restore.relayout is not None:
            assert restore.base_step > 0
            assert restore.sources == ((),) * len(self.nodes)
            assert restore.relayout.world_size == len(restore.relayout.shards) != len(self.nodes)
            shards = restore.relayout.shards
        assert all(bool(sources) == (restore.base_step > 0) for sources in shards)
        origins = {source.origin_generation for sources in shards for source in sources}
        assert len(origins) <= 1, "shards of two generations"
        for origin in origins:
            assert self.worlds[origin] == len(shards), "shards of two worlds"
            assert restore.base_step <= self.path[origin], "a source off the path"
        for rank, sources in enumerate(shards):
            for source in sources:
                assert source.step == restore.base_step
                assert source.digest == digest(rank, source.origin_generation, source.step)
                assert (source.kind == "local") <= (restore.relayout is None and source.node_id == self.nodes[rank])
        for node, references in restore.keep.items() if restore.relayout is not None else ():
            per_rank = [each.owner_rank for each in references]
            assert all(per_rank.count(rank) < SLOTS for rank in per_rank), "no slot for the first step"
            base = {
                slot.owner_rank
                for slot in self.slots.get(node, ())
                if slot.step == restore.base_step and slot.origin_generation in origins
            }
            assert base <= {each.owner_rank for each in references if each.step == restore.base_step}, "base given up"


members = st.sets(st.sampled_from(NODES), min_size=1).map(sorted)
steps = st.lists(st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.booleans(), st.booleans()), max_size=3)


@given(st.lists(st.tuples(members, steps), min_size=1, max_size=5))
def test_the_base_is_the_newest_complete_step_of_one_world_and_one_path(
    story: list[tuple[list[NodeId], list[tuple[list[bool], bool, bool]]]],
) -> None:
    job = Story(nodes=story[0][0])
    for nodes, trained in story:
        for lost in set(job.nodes) - set(nodes):
            job.slots.pop(lost, None)
        job.nodes = nodes
        job.launch()
        step = job.base
        for captured, commits, stores in trained:
            step = Step(step + 1)
            job.train(step, captured, commits=commits, stores=stores)


@given(members, members, st.lists(st.booleans(), min_size=4, max_size=4), st.data())
def test_a_loss_before_the_first_commit_of_the_new_layout_restores_the_same_base(
    before: list[NodeId], after: list[NodeId], captured: list[bool], data: st.DataObject
) -> None:
    job = Story(nodes=before)
    job.launch()
    for step in (1, 2):
        job.train(Step(step), [True], commits=True, stores=False)
    job.nodes = after
    base = job.launch().base_step
    job.train(Step(base + 1), captured, commits=False, stores=False)
    job.nodes = sorted(data.draw(st.sets(st.sampled_from(after), min_size=1)))
    held = {
        slot.owner_rank
        for node in job.nodes
        for slot in job.slots[node]
        if (slot.origin_generation, slot.step) == (1, base)
    }
    again = job.launch()
    if len(held) == len(before):
        assert again.base_step >= base
