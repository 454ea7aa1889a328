"""Provides a node with the log files of its ranks and a store in memory."""

from __future__ import annotations

from pathlib import Path

from everstep.protocol.ids import Generation, Rank
from everstep.protocol.plan import GenerationPlan
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import RUN as RUN
from tests.unit.worker.rank_plans import rank_plan
from worker.logs.outputs import RankOutputs
from worker.provisioning.source import SourceArchives
from worker.ranks.files import RankFiles

PREFIX = "jobs/job/"


class Bench:
    def __init__(self, state: Path, ranks_per_node: int = 2) -> None:
        self.state = state
        self.objects = MemoryObjectStore("bucket")
        self.plan: GenerationPlan = rank_plan(ranks_per_node=ranks_per_node, generation=3)
        self.here = self.plan.nodes[0]
        self.archives = SourceArchives(state / "sources" / "archives", self.objects)
        self.outputs = RankOutputs(state, self.objects, self.archives.files)

    def files(self, rank: int) -> RankFiles:
        files = RankFiles(self.state, RUN, Generation(3), Rank(rank))
        files.make()
        return files

    @property
    def stored(self) -> dict[str, bytes]:
        return {key.removeprefix(PREFIX): data for key, data in self.objects.objects["bucket"].items()}
