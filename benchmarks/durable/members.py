"""Runs the nodes and ranks of a job without a control plane, and makes the plans of their generations.

    harness ── plans and commands ──▶ one process per node (`rank.node`)
            ── tasks ───────────────▶ one process per rank, which connects to its node

The control plane's own code selects holders (`placement.plan`), sources, and slots to keep (`recovery.choose`).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.data_plane.launches import Talk, processes
from benchmarks.data_plane.rank.node import ADDRESS, ENTRY, JOB, RUN, SECONDS, SOCKET, archive
from control_plane.core import placement, recovery
from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation, NodeId, Rank
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    ScriptPlan,
    SlotRecord,
    SourceArchive,
    Timeouts,
)
from tests.ports import ReservedPort

NODE = "benchmarks.durable.rank.node"
BUCKET = "bench"
COPIES = 2
"""Copies of each shard. A job with one node has one."""
MNT_DETACH = 2
FIRST = Generation(1)


@dataclass(frozen=True, slots=True)
class Inventories:
    """Sealed slots of each node at the end of the first generation."""

    world_size: int
    """Ranks of the first generation."""
    slots: Mapping[NodeId, tuple[SlotRecord, ...]]


class Members:
    """The nodes of a job, each in its own process. `folders` are on tmpfs, in the order of `talks`."""

    def __init__(self, talks: Sequence[Talk], folders: Sequence[Path]) -> None:
        self._talks = talks
        self._folders = folders
        for talk in talks:
            talk.answer()
        self._ports = [talk.ask(["start"])["port"] for talk in talks]
        self._count = 0
        """Nodes in the open generation: those of the first processes in `talks`."""

    def open(self, generation: int, world_size: int, *, every_steps: int = 0, found: Inventories | None = None) -> None:
        """Open a generation on the first `world_size` nodes, with one rank each.

        `every_steps` 0 means no checkpoints. `found` has the slots to restore from; None begins at step 0.
        """
        self._count = world_size
        plan = self._plan(generation, every_steps, found)
        self._all(["open", *(base64.b64encode(data).decode() for data in (encode(plan), archive()))])

    def load(self) -> float:
        """Make the nodes load their step, and begin the rounds. Return the monotonic start of the load."""
        self._all(["connected"])
        begun = time.monotonic()
        self._all(["load"])
        self._all(["begin"])
        return begun

    def inventories(self, world_size: int) -> Inventories:
        """Return each node's sealed slots. `world_size` is that of the generation that made them."""
        slots = {
            node_id(number): msgspec.convert(each, tuple[SlotRecord, ...])
            for number, each in enumerate(self._all(["inventory"]))
        }
        return Inventories(world_size, slots)

    def drop(self, node: int, rank: int) -> None:
        """Empty one shard's slots on one node."""
        self._talks[node].ask(["drop", rank])

    def close(self) -> None:
        """End the open generation."""
        self._all(["close"])

    def environment(self, rank: int, world_size: int, generation: int, port: int) -> dict[str, str]:
        """Return the environment variables that an agent would set for a rank."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "EVERSTEP_AGENT_SOCKET": str(self._folders[rank] / SOCKET),
            "EVERSTEP_JOB_NAME": JOB,
            "EVERSTEP_RUN_ID": RUN,
            "EVERSTEP_GENERATION": str(generation),
            "BENCH_NODE_PID": str(self._talks[rank].pid),
        }

    def _all(self, words: object) -> list[Any]:
        talks = self._talks[: self._count]
        for talk in talks:
            talk.say(words)
        return [talk.answer() for talk in talks]

    def _plan(self, generation: int, every_steps: int, found: Inventories | None) -> GenerationPlan:
        owners = [node_id(number) for number in range(self._count)]
        worlds = {FIRST: found.world_size} if found else {}
        chosen = recovery.choose(
            recovery.Survey(
                owners=owners,
                inventories={node: found.slots.get(node, ()) if found else () for node in owners},
                path=dict.fromkeys(worlds, recovery.UNBOUNDED),
                worlds=worlds,
            )
        )
        holders = placement.plan(owners, min(COPIES, len(owners))).holders
        place, tree = ObjectReference(bucket=BUCKET, key="bench"), archive()
        return GenerationPlan(
            job=JOB,
            run=RUN,
            generation=Generation(generation),
            parent=Generation(generation - 1),
            base_step=chosen.base_step,
            nodes=tuple(
                PlanNode(
                    node_id=node,
                    address=ADDRESS,
                    peer_port=port,
                    ranks=(Rank(number),),
                    keep=chosen.keep[node],
                )
                for number, (node, port) in enumerate(zip(owners, self._ports, strict=False))
            ),
            ranks=tuple(
                RankPlan(rank=Rank(rank), holders=holders[owner], sources=sources)
                for rank, (owner, sources) in enumerate(zip(owners, chosen.sources, strict=True))
            ),
            coordinator=owners[0],
            master_address=ADDRESS,
            master_port=0,
            script=ScriptPlan(
                source=SourceArchive(object=place, sha256=hashlib.sha256(tree).hexdigest(), bytes=len(tree)),
                entry_point=ENTRY,
                hyperparameters={},
                environment={},
                output=place,
                logs=place,
            ),
            checkpoint=CheckpointPlan(every_steps=every_steps, prefix=place),
            timeouts=Timeouts(**dict.fromkeys(Timeouts.__struct_fields__, SECONDS)),
            relayout=chosen.relayout,
        )


def node_id(number: int) -> NodeId:
    return NodeId(f"i-{number}")


@contextmanager
def started(
    count: int, memory: Path, home: Path, *, mebibytes: int, environment: Mapping[str, str] | None = None
) -> Iterator[Members]:
    """Start the processes of the nodes, with `mebibytes` for slots each, and end them after the `with` block.

    `memory` is in shared memory, `home` for logs. With AWS_ENDPOINT_URL in `environment`, nodes use this S3 server and
    its bucket `BUCKET`. Otherwise, each has its own object store in memory.
    """
    logs = home / "nodes"
    logs.mkdir(parents=True)
    folders = [memory / node_id(number) for number in range(count)]
    commands = [
        [sys.executable, "-m", NODE, node_id(number), str(folder), str(mebibytes)]
        for number, folder in enumerate(folders)
    ]
    try:
        with processes(commands, logs, environment or {}, is_talking=True) as running:
            yield Members([Talk(process, logs) for process in running], folders)
    finally:
        for folder in folders:  # The call has no effect if the node's process was not permitted to mount a tmpfs.
            ctypes.CDLL(None).umount2(os.fsencode(folder), MNT_DETACH)


@contextmanager
def ranks(program: Sequence[str], environments: Sequence[Mapping[str, str]], home: Path) -> Iterator[list[Talk]]:
    """Run `program` (module and arguments) once per environment while the `with` block runs."""
    with ExitStack() as stack:
        talks = []
        for number, environment in enumerate(environments):
            logs = home / f"rank{number}"
            logs.mkdir(parents=True)
            command = [sys.executable, "-m", *program]
            (running,) = stack.enter_context(processes([command], logs, environment, is_talking=True))
            talks.append(Talk(running, logs))
        yield talks


@contextmanager
def meeting_port() -> Iterator[int]:
    """Reserve a port for the ranks' process group while the `with` block runs."""
    with closing(ReservedPort()) as port:
        yield port.number
