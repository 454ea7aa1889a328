"""Makes plans for tests that start ranks, with a script as the only input."""

from __future__ import annotations

from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    ScriptPlan,
    SourceArchive,
    Timeouts,
)

RUN = RunId("ab" * 16)


def rank_plan(
    *,
    entry_point: str = "train.py",
    module: str = "",
    ranks_per_node: int = 1,
    addresses: tuple[str, ...] = ("127.0.0.1",),
    generation: int = 1,
    hyperparameters: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
) -> GenerationPlan:
    """Return a plan whose nodes `i-0`, `i-1` and so on have `ranks_per_node` ranks each."""
    nodes = tuple(
        PlanNode(
            node_id=NodeId(f"i-{index}"),
            address=address,
            peer_port=1,
            ranks=tuple(Rank(index * ranks_per_node + local) for local in range(ranks_per_node)),
        )
        for index, address in enumerate(addresses)
    )
    place = ObjectReference(bucket="bucket", key="jobs/job/")
    return GenerationPlan(
        job=JobName("job"),
        run=RUN,
        generation=Generation(generation),
        parent=Generation(0),
        base_step=Step(0),
        nodes=nodes,
        ranks=tuple(RankPlan(rank=rank, holders=(node.node_id,)) for node in nodes for rank in node.ranks),
        coordinator=nodes[0].node_id,
        master_address=addresses[0],
        master_port=29500,
        script=ScriptPlan(
            source=SourceArchive(object=place, sha256="00" * 32, bytes=1),
            entry_point=entry_point,
            module=module,
            hyperparameters=hyperparameters or {},
            environment=environment or {},
            output=ObjectReference(bucket="bucket", key="jobs/job/output/"),
            logs=ObjectReference(bucket="bucket", key="jobs/job/logs/"),
        ),
        checkpoint=CheckpointPlan(every_steps=0, prefix=ObjectReference(bucket="bucket", key="jobs/job/checkpoints/")),
        timeouts=Timeouts(
            detection_seconds=3,
            lease_seconds=3,
            holder_deadline_seconds=3,
            prepare_deadline_seconds=6,
            gone_seconds=15,
            coordinator_deadline_seconds=15,
            final_round_seconds=30,
            welcome_seconds=30,
            exclude_seconds=60,
            blind_wait_seconds=120,
            stall_seconds=30,
            hang_seconds=90,
            new_phase_seconds=600,
        ),
    )
