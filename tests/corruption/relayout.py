"""Corruptions of shards of an earlier launch, which nodes load after the number of ranks has changed."""

from __future__ import annotations

import random
from pathlib import Path

from msgspec import structs

from everstep.protocol.ids import Rank, Step
from everstep.protocol.plan import GenerationPlan
from tests.corruption.group import RANKS, SLOT_COUNT, STEPS, Group, Node
from tests.corruption.outcomes import Counts, Outcome
from tests.fakes.storage import MemoryObjectStore
from worker.member.base_loading import BaseLoading
from worker.member.earlier_shards import EarlierShards
from worker.member.faults import ReportedFaults
from worker.member.retained_steps import RetainedSteps
from worker.shm.slot_file import SlotFile


class EarlierLoads:
    """Nodes that load earlier shards from their own slots, from other nodes, and by parity.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self.group = Group(folder, draw)
        """The nodes, with the shards and shares of the earlier launch."""

    async def prepare(self) -> None:
        """Make all shards and shares, and check that each node loads each shard without a corruption."""
        await self.group.prepare()
        for lost in (None, *RANKS):
            if lost is not None:
                await self.group.lose(lost)
            plan = self.plan(STEPS[-1])
            assert plan is not None
            for rank in RANKS:
                for here in self.group.nodes.values():
                    assert await self.loaded(here, rank, plan) == (Outcome.HARMLESS, "")
            await self.group.mend(self.group.nodes.values())

    async def close(self) -> None:
        """End all sessions and close all slots."""
        await self.group.close()

    async def load(self, kind: str, counts: Counts) -> None:
        """Plant a corruption in the memory of the earlier launch's nodes, and load one of its shards on any node."""
        draw, group = self._draw, self.group
        lost, step = draw.choice((None, *RANKS)), draw.choice(STEPS)
        if lost is not None:
            await group.lose(lost)
        nodes = [node for node in group.nodes.values() if node.rank != lost]
        if draw.random() < 0.5:
            place = await group.plant(kind, nodes, step)
            plan = self.plan(step)
        else:
            plan = self.plan(step)
            place = await group.plant(kind, nodes, step)
        here, rank = draw.choice([*group.nodes.values()]), draw.choice(RANKS)
        outcome, difference = Outcome.REFUSED, ""
        if plan is not None:  # Otherwise, the control plane restores an older step.
            outcome, difference = await self.loaded(here, rank, plan)
        description = f"rank {rank} step {step} on {here.id}, lost {lost}, {place}: {difference}"
        counts.add("earlier shard", kind, outcome, description)
        await group.mend(group.nodes.values())

    async def loaded(self, here: Node, rank: Rank, plan: GenerationPlan) -> tuple[Outcome, str]:
        """Load an earlier shard on a node. Return the outcome, and the difference from the owner's shard."""
        nodes = self.group.nodes.values()
        for node in nodes:
            node.earlier = self._earlier(node, plan)
        assert here.earlier is not None
        answer = await here.earlier.fetch(rank, ReportedFaults(lambda: None))
        for node in nodes:
            await node.idle()
            node.earlier = None
        if answer is None:
            return Outcome.REFUSED, ""
        assert not answer.problem, answer
        file = SlotFile.adopt(answer.path, here.store.files)
        with file.payload() as view:
            difference = self.group.difference((file.header, bytes(view)), rank, plan.base_step)
        file.close()
        return (Outcome.LOADED if difference else Outcome.HARMLESS), difference

    def plan(self, step: Step) -> GenerationPlan | None:
        """Return the plan of the control plane, or None if it restores an older step."""
        restore = self.group.restore(step, lost=None, new_world=2 * len(RANKS))
        if restore.base_step != step:
            return None
        plan = self.group.plan
        nodes = tuple(structs.replace(node, keep=restore.keep[node.node_id]) for node in plan.nodes)
        return structs.replace(plan, base_step=step, nodes=nodes, relayout=restore.relayout)

    def _earlier(self, node: Node, plan: GenerationPlan) -> EarlierShards:
        here = plan.node(node.id)
        contents = RetainedSteps(plan, here)
        loading = BaseLoading(
            plan,
            here,
            {},
            store=node.store,
            objects=MemoryObjectStore(),
            sessions=self.group.sessions[node.rank],
            contents=contents,
            slot_count=SLOT_COUNT,
            arrived=lambda *_: None,
        )
        return EarlierShards(plan, here, loading, node.store, contents)
