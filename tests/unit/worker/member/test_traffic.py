"""Tests decisions that an agent makes from the durations of its ranks' iterations.

The agent decides whether to pace transfers, and at which interval the coordinator proposes steps. A paced transfer is
sent only while the network is idle. The pacing trial measures whether pacing makes iterations shorter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rank_messages import Boundary, IdleSpan, IdleSpans, Phase, RankHalf, RankStanding, Vote
from everstep.protocol.rounds import Pacing, RankRound
from tests.unit.worker.replication.wire import Wire
from worker.core.budget import ENOUGH, Budget
from worker.core.chunks import Link
from worker.core.pacing_trial import RUN_STEPS, PacingTrial, is_tried_paced
from worker.core.rounds import Coordinator
from worker.member.traffic import ALPHA_SECONDS, Traffic
from worker.replication.pacing import ENOUGH_TRANSFERS, SpanPacer, Unpaced

MOVING = RankHalf(generation=1, phase=Phase.TRAIN)
SPANS = IdleSpans(generation=Generation(1), iteration_seconds=1.0, spans=(IdleSpan(0.2, 0.4, 0.0),))


class Node:
    """A simulated node with ranks 4 and 5, whose iterations and transfers the test controls."""

    def __init__(self, max_slowdown: float = 0.01, *, replica_count: int = 2) -> None:
        self.wire = Wire(10_000_000.0)
        self.pacer = self.wire.pacer
        self.distances: list[int] = []
        self.pacings: list[Pacing] = []
        self.traffic = Traffic(
            [Rank(5), Rank(4)],
            self.pacer,
            replica_count=replica_count,
            max_slowdown=max_slowdown,
            on_distance=self.keep_distance,
            on_pacing=self.keep_pacing,
        )
        self.now = 100.0
        self.step = 0

    @classmethod
    def profiled(cls) -> Node:
        """Return a node that has measured its link and its idle spans."""
        node = cls()
        node.transfers()
        node.traffic.spans(Rank(4), SPANS)
        return node

    def keep_distance(self, distance: int) -> None:
        self.distances.append(distance)

    def keep_pacing(self, pacing: Pacing) -> None:
        """Record the node's decision, and announce it to the node immediately, in place of the coordinator."""
        self.pacings.append(pacing)
        self.traffic.apply_announcement(pacing)

    def iterate(
        self,
        seconds: float = 1.0,
        *,
        captured: bool = False,
        sending: bool = False,
        blocked: float = 0.0,
        rank: int = 4,
    ) -> None:
        if captured:
            self.traffic.captured(Rank(rank))
        self.now += seconds
        self.step += 1
        message = Boundary(
            generation=Generation(1), boundary=Step(self.step), at_seconds=self.now, blocked_seconds=blocked
        )
        self.traffic.boundary(Rank(rank), message, MOVING, is_sending=sending)

    def try_pacing(self, gained: float = 0.1) -> None:
        """Run iterations with snapshots until the node has decided about pacing.

        An unpaced iteration takes `gained` seconds longer than a paced iteration.
        """
        while self.traffic.trial.verdict is None:
            self.iterate(1.0 if isinstance(self.pacer.current, SpanPacer) else 1.0 + gained, captured=True)

    def try_late_pacing(self) -> None:
        """Run iterations until the node has decided between paced and unpaced transfers.

        A paced iteration takes 1.0 s, and an unpaced iteration 1.1 s. A transfer that begins in a paced iteration is
        late, so the rank captures nothing in the next iteration.
        """
        is_late = False
        while self.traffic.trial.verdict is None:
            is_paced = isinstance(self.pacer.current, SpanPacer)
            was_late, is_late = is_late, is_paced and not is_late
            self.iterate(1.0 if is_paced else 1.1, captured=not was_late, sending=is_late)

    def transfers(self, seconds: float = 0.1, *, at_once: int = 1) -> None:
        """Send a million bytes in `seconds` seconds, often enough to measure the link.

        `at_once` is the number of transfers that share the link.
        """
        self.wire.bytes_per_second = 1_000_000 / seconds
        for _ in range(ENOUGH_TRANSFERS):
            self.wire.carry(*[1_000_000] * at_once)


def with_loop(work: Callable[[], None]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


def test_replicas_are_paced_once_spans_and_link_are_known() -> None:
    def work() -> None:
        node = Node()
        node.traffic.spans(Rank(4), SPANS)
        node.iterate()
        assert isinstance(node.pacer.current, Unpaced)
        node.transfers()
        node.try_pacing()
        paced = node.pacer.current
        assert isinstance(paced, SpanPacer)
        node.iterate()
        assert node.pacer.current is paced
        node.traffic.spans(Rank(4), SPANS)  # profile again, because the iterations have changed
        node.iterate()
        assert isinstance(node.pacer.current, Unpaced), (
            "what the link carried before it was paced says nothing of it now"
        )
        node.transfers(0.15)
        node.iterate()
        assert isinstance(node.pacer.current, SpanPacer)
        assert (paced.link, node.pacer.current.link) == (
            Link(pytest.approx(1e7), ALPHA_SECONDS),
            Link(pytest.approx(1e6 / 0.15), ALPHA_SECONDS),
        )

    with_loop(work)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_shards_of_a_node_that_leave_at_one_boundary_are_not_counted_one_after_the_other(count: int) -> None:
    def work() -> None:
        node = Node(replica_count=count)
        # all transfers together take 0.3 s on the link, and the idle span has room for 0.34 s
        node.transfers(0.3 / count, at_once=count)
        node.traffic.spans(Rank(4), SPANS)
        node.try_pacing()
        assert isinstance(node.pacer.current, SpanPacer)
        assert node.pacer.current.link.bandwidth_bytes_per_second == pytest.approx(count * 1_000_000 / 0.3)

    with_loop(work)


@pytest.mark.parametrize(
    ("spans", "transfer_seconds"),
    [
        ((), 0.1),  # iterations without idle spans: they have no common pattern or use no network
        ((IdleSpan(0.2, 0.4, 0.2),), 0.1),  # the start of the span varies by more than the span's length
        (SPANS.spans, 0.001),  # a transfer of 1 ms is too short to slow down training
    ],
)
def test_chunks_go_at_once_where_pacing_has_nothing_to_gain(
    spans: tuple[IdleSpan, ...], transfer_seconds: float
) -> None:
    def work() -> None:
        node = Node()
        node.transfers(transfer_seconds)
        node.traffic.spans(Rank(4), IdleSpans(generation=Generation(1), iteration_seconds=1.0, spans=spans))
        for _ in range(2 * RUN_STEPS):
            node.iterate(captured=True)
            assert isinstance(node.pacer.current, Unpaced)
        assert node.traffic.trial == PacingTrial()

    with_loop(work)


def test_chunks_go_at_once_where_iterations_are_no_shorter_for_pacing() -> None:
    """If pacing does not make iterations shorter, the node sends chunks immediately.

    Pacing has no effect, for example, if agents and ranks compete for the CPU cores and not for the network.
    """

    def work() -> None:
        node = Node.profiled()
        for _ in range(4 * RUN_STEPS):
            node.iterate()
        assert node.traffic.trial == PacingTrial(), "nothing was sent"
        node.try_pacing(gained=-0.05)
        assert node.traffic.trial.verdict is False
        for _ in range(4 * RUN_STEPS):
            node.iterate(captured=True)
            assert isinstance(node.pacer.current, Unpaced)

    with_loop(work)


def test_what_was_found_out_holds_until_iterations_take_a_time_that_is_quite_another() -> None:
    def work() -> None:
        node = Node.profiled()
        node.try_pacing(gained=-0.05)
        # profile again, because the iterations have changed
        node.traffic.spans(Rank(4), replace(SPANS, iteration_seconds=1.3))
        node.iterate()
        assert node.traffic.trial.verdict is False
        node.traffic.spans(Rank(4), replace(SPANS, iteration_seconds=1.6))
        node.iterate()
        assert node.traffic.trial == PacingTrial()
        node.try_pacing()
        assert isinstance(node.pacer.current, SpanPacer)

    with_loop(work)


def test_an_iteration_that_began_with_chunks_of_the_other_way_counts_for_neither() -> None:
    def work() -> None:
        node = Node.profiled()
        ways = []
        for _ in range(4 * RUN_STEPS):
            ways.append(isinstance(node.pacer.current, SpanPacer))
            node.iterate(captured=True, sending=True)
        unlike = sum(way != before for before, way in itertools.pairwise(ways[1:]))
        assert unlike >= 2
        trial = node.traffic.trial
        assert trial.verdict is None
        # An iteration counted in `unlike` does not count for the trial, because its first chunks were still sent in the
        # other way (paced or at once). Three further iterations do not count: the first, whose start is unknown; the
        # second, before the trial began; and the last, which has not ended.
        counted = len(ways) - 3 - unlike
        assert len(trial.paced.seconds) + len(trial.at_once.seconds) == counted

    with_loop(work)


class Steady(Budget):
    """A budget whose interval never changes."""

    def iteration(self, seconds: float, *, blocked_seconds: float, is_loaded: bool, has_begun: bool) -> Budget:
        return self


@pytest.mark.parametrize("interval", [1, 2])
def test_waiting_does_not_pay_where_it_costs_steps(interval: int) -> None:
    """A node decides against pacing if late transfers cost commits.

    With pacing, every second transfer is late. This costs commits if the coordinator proposes every step. If it
    proposes every second step, the node decides for pacing, because pacing shortens iterations.
    """

    def work() -> None:
        node = Node.profiled()
        node.traffic.budget = Steady(max_slowdown=0.01, interval=interval)
        node.try_late_pacing()
        assert node.traffic.trial.verdict is (interval > 1)
        assert node.pacings == [Pacing.TRIED, Pacing.IN_IDLE_SPANS if interval > 1 else Pacing.AT_ONCE]

    with_loop(work)


@pytest.mark.parametrize(("sending", "lost"), [(True, [0, 0, 2]), (False, [0, 0])])
def test_each_step_that_is_lost_to_a_snapshot_counts_and_none_that_was_put_off_by_something_else(
    sending: bool, lost: list[int]
) -> None:
    def work() -> None:
        node = Node.profiled()
        for _ in range(2):
            node.iterate()
        node.traffic.budget = Steady(max_slowdown=0.01)
        for captured, is_late in (
            (True, False),
            (True, False),
            (True, sending),
            (False, sending),
            (False, False),
            (True, False),
        ):
            node.iterate(captured=captured, sending=is_late)
        assert sorted([*node.traffic.trial.paced.lost, *node.traffic.trial.at_once.lost]) == lost

    with_loop(work)


def test_what_is_found_where_every_step_is_proposed_holds_for_steps_that_are_further_apart_but_for_those_lost() -> None:
    def work() -> None:
        node = Node.profiled()
        node.traffic.budget = every = Steady(max_slowdown=0.01)
        node.try_late_pacing()
        known = node.traffic._trials[False]
        assert (node.traffic.trial.verdict, known.verdict) == (False, None)
        for _ in range(2 * ENOUGH):
            node.iterate(0.8, captured=True)
        assert node.traffic._trials[False] == known, "iterations of one way alone say nothing more"
        for budget in (dataclasses.replace(every, interval=2), every):
            node.traffic.budget = budget
            node.iterate()
            assert node.traffic.trial is node.traffic._trials[False], (
                "also when every step is proposed again: the budget could not pay for that"
            )
        assert node.pacings[-1] is Pacing.TRIED

    with_loop(work)


def test_a_node_is_ready_to_pace_what_others_pace() -> None:
    """A node paces its transfers if the coordinator announces pacing.

    This node alone would decide against pacing, because its idle spans are too short for its snapshots.
    """

    def work() -> None:
        node = Node()
        node.transfers(0.2)  # two transfers of 0.2 s exceed the usable part of the span, 0.85 × 0.4 s
        node.traffic.spans(Rank(4), SPANS)
        for _ in range(2):
            node.iterate()
        assert isinstance(node.pacer.current, Unpaced)
        node.traffic.apply_announcement(Pacing.IN_IDLE_SPANS)
        # this node is not the coordinator's, so no announcement follows its decision
        node.traffic.on_pacing = lambda _: None
        node.iterate()
        assert isinstance(node.pacer.current, SpanPacer)

    with_loop(work)


def test_a_node_goes_by_what_the_coordinator_announces_and_not_by_what_it_finds() -> None:
    """All nodes follow the coordinator's decision about pacing, whatever they decided themselves.

    If each node followed its own decision, transfers of a step would end at different times, and steps would be
    skipped.
    """

    def work() -> None:
        node = Node.profiled()
        node.try_pacing(gained=-0.05)
        for pacing, is_paced in ((Pacing.IN_IDLE_SPANS, True), (Pacing.AT_ONCE, False)):
            node.traffic.apply_announcement(pacing)
            for _ in range(4 * RUN_STEPS):
                node.iterate(captured=True)
                assert isinstance(node.pacer.current, SpanPacer) is is_paced
        node.traffic.apply_announcement(Pacing.TRIED)
        ways = set()
        for _ in range(4 * RUN_STEPS):
            node.iterate(captured=True)
            ways.add((is_tried_paced(Step(node.step)), isinstance(node.pacer.current, SpanPacer)))
        assert ways == {(True, True), (False, False)}

    with_loop(work)


def test_an_iteration_behind_which_ranks_stop_iterating_counts_for_neither() -> None:
    def work() -> None:
        node = Node.profiled()
        for _ in range(2):
            node.iterate(captured=True)
        eval_half = RankHalf(generation=1, phase=Phase.EVAL)
        node.traffic.boundary(
            Rank(4), Boundary(generation=Generation(1), boundary=Step(node.step)), eval_half, is_sending=False
        )
        node.iterate()
        node.iterate(captured=True)
        assert node.traffic.trial == PacingTrial()

    with_loop(work)


def test_what_waits_for_a_span_waits_no_longer_when_chunks_are_to_go_at_once() -> None:
    async def work() -> None:
        node = Node.profiled()
        node.now = asyncio.get_running_loop().time() - 0.1
        while not isinstance(node.pacer.current, SpanPacer):
            node.iterate(0.0001)
        # This chunk would use the link for a second. No idle span is that long.
        waiting = asyncio.create_task(node.pacer.admit(10_000_000))
        await asyncio.sleep(0)
        assert not waiting.done()
        while isinstance(node.pacer.current, SpanPacer):
            node.iterate(0.0001)
        for _ in range(10):
            await asyncio.sleep(0)
        assert waiting.done(), "without waiting for any span"

    asyncio.run(work())


def test_a_snapshot_that_the_spans_cannot_hold_is_spread_over_them_only_when_the_budget_is_exceeded() -> None:
    def work() -> None:
        node = Node(max_slowdown=0.1)
        node.transfers(0.2)  # two transfers of 0.2 s exceed the usable part of the span, 0.85 × 0.4 s
        node.traffic.spans(Rank(4), SPANS)
        node.iterate()
        for _ in range(ENOUGH):
            node.iterate(1.0)
        assert isinstance(node.pacer.current, Unpaced)
        for _ in range(ENOUGH + 1):
            node.iterate(1.4, captured=True)
        assert node.traffic.budget.interval > 1
        node.try_pacing()
        assert isinstance(node.pacer.current, SpanPacer)

    with_loop(work)


def test_another_rank_of_the_node_changes_nothing() -> None:
    def work() -> None:
        node = Node()
        node.transfers()
        node.traffic.spans(Rank(5), SPANS)
        for _ in range(2 * ENOUGH):
            node.iterate(rank=5, captured=True, blocked=0.5)
            node.iterate(rank=5)
        assert isinstance(node.pacer.current, Unpaced)
        assert (node.traffic.budget.newest, node.traffic.budget.quiet) == (None, ())
        assert node.distances == []

    with_loop(work)


@pytest.mark.parametrize(
    "half",
    [
        RankHalf(generation=1, phase=Phase.EVAL),
        RankHalf(generation=1, phase=Phase.TRAIN, standing=RankStanding.CLOSING),
    ],
)
def test_a_rank_that_does_not_iterate_leaves_the_network_to_snapshots(half: RankHalf) -> None:
    async def work() -> None:
        node = Node.profiled()
        node.now = asyncio.get_running_loop().time() - 0.1
        while not isinstance(node.pacer.current, SpanPacer):
            node.iterate(0.0001)
        # This chunk would use the link for a second. No idle span is that long.
        waiting = asyncio.create_task(node.pacer.admit(10_000_000))
        await asyncio.sleep(0)
        assert not waiting.done()
        node.traffic.boundary(Rank(4), Boundary(generation=Generation(1), boundary=Step(1)), half, is_sending=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert waiting.done(), "without waiting for any span"

    asyncio.run(work())


@pytest.mark.covers("CreateTrainingJob.Protection.MaxSlowdown")
def test_snapshots_that_cost_more_than_the_budget_come_less_often() -> None:
    node = Node(max_slowdown=0.1)
    node.iterate()
    for _ in range(ENOUGH):
        node.iterate(1.0)
    for _ in range(ENOUGH + 1):
        node.iterate(1.2, captured=True)
    assert node.distances == [2]
    assert node.traffic.budget.interval == 2


def test_an_iteration_in_which_a_holder_is_still_owed_something_is_a_loaded_one() -> None:
    node = Node()
    node.iterate()
    node.iterate(captured=True)
    node.iterate(sending=True)
    node.iterate()
    snapshot = node.traffic.budget.newest
    assert snapshot is not None
    assert snapshot.iterations == 3, "it was sent in the last one, too, and ended before its boundary"
    node.iterate()
    assert (node.traffic.budget.newest, len(node.traffic.budget.quiet)) == (snapshot, 1)


def test_a_snapshot_of_another_rank_loads_no_iteration() -> None:
    node = Node()
    node.iterate()
    node.traffic.captured(Rank(5))
    node.iterate()
    assert (node.traffic.budget.newest, len(node.traffic.budget.quiet)) == (None, 1)


def test_time_spent_otherwise_is_no_iteration() -> None:
    node = Node()
    node.iterate()
    node.traffic.boundary(
        Rank(4),
        Boundary(generation=Generation(1), boundary=Step(1)),
        RankHalf(generation=1, phase=Phase.EVAL),
        is_sending=False,
    )
    node.iterate(500.0)
    node.iterate(1.0)
    assert node.traffic.budget.quiet == (1.0,)


def test_news_that_is_late_or_says_no_time_is_not_counted() -> None:
    node = Node()
    node.iterate()
    for at in (0.0, node.now - 5.0):
        message = Boundary(generation=Generation(1), boundary=Step(1), at_seconds=at)
        node.traffic.boundary(Rank(4), message, MOVING, is_sending=False)
    node.iterate(1.0)
    assert node.traffic.budget.quiet == (1.0,)


class Training(Node):
    """A node whose coordinator proposes steps at the interval that the node has chosen.

    A snapshot takes 0.3 s of the link. The part that does not fit into idle spans delays training.
    """

    def __init__(self) -> None:
        self.core = Coordinator(world_size=1, base=Step(0), every_steps=0).begin()
        super().__init__(max_slowdown=0.01)

    def keep_distance(self, distance: int) -> None:
        self.core = self.core.keep_distance(distance)

    def report(self, vote: Vote) -> None:
        known = RankRound(
            rank=Rank(4),
            boundary=Step(self.step),
            committed=self.core.committed,
            proposed=self.core.proposed,
            vote=vote,
        )
        self.core = self.core.report(known)

    def train(self, count: int, *, idle_seconds: float) -> tuple[list[Step], float]:
        """Simulate `count` iterations, which take 1 s without a snapshot.

        Return the committed steps and the slowdown.
        """
        committed, begun_at = [], self.now
        for _ in range(count):
            self.report(Vote.NONE)
            is_captured = self.core.proposed == self.step
            if is_captured:
                self.report(Vote.ACKED)  # the rank's agent votes before the next step ends
                committed.append(self.core.committed)
            self.iterate(1.0 + is_captured * max(0.0, 0.3 - idle_seconds), captured=is_captured)
        return committed, (self.now - begun_at) / count - 1.0


@pytest.mark.covers("CreateTrainingJob.Protection.MaxSlowdown")
def test_steps_are_proposed_less_often_with_too_little_idle_time_and_more_often_again_when_there_is_room() -> None:
    training = Training()
    committed, slowdown = training.train(ENOUGH, idle_seconds=0.2)
    assert len(committed) == ENOUGH - 1, "every step, as long as nothing is known"
    assert slowdown > 0.09
    # The node learns how much a snapshot slows training down. The coordinator then proposes one step in ten.
    training.train(1000, idle_seconds=0.2)
    committed, slowdown = training.train(300, idle_seconds=0.2)
    assert len(committed) == 30
    assert slowdown == pytest.approx(0.01)
    training.train(500, idle_seconds=0.4)
    committed, slowdown = training.train(300, idle_seconds=0.4)
    assert len(committed) >= 0.97 * 300
    assert slowdown == pytest.approx(0.0)
