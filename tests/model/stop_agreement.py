"""Explicit-state model of the agreed stop, the rehearsal and the end of training.

The real `Coordinator`, `Shard` and rank rules make the decisions; docs/design.md#agreed-stop and
docs/design/rehearsal.md contain the rules.

Training is synchronous: a rank passes boundary k+1, the point after step k+1, only after all other ranks have passed
boundary k. Each agent has one rank and no replicas. A report or an announcement arrives at any moment, and contains the
sender's state at this moment. With `--fine`, messages are in transit for a while and may be outdated on arrival. The
control plane requests a stop at any moment and repeats its request. The coordinator's agent restarts, uploads pin
slots, and the final round may be abandoned. The control plane also orders a rehearsal at any moment. The ranks end it
only together.

    python -m tests.model.stop_agreement RANKS STEPS RESTARTS [--bug NAME] [--every K] [--slots 2|3] [--no-stop]
    [--hurry] [--fine] [--rehearse N]

The end must be reachable from every reachable state, so that no process waits forever.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_UNABLE,
    ECHO_YES,
    FINISHED,
    AgentHalf,
    RankHalf,
    RankStanding,
    StopState,
    Vote,
)
from everstep.protocol.rounds import RankRound
from everstep.protocol.slot import SlotState
from everstep.training import step_rules
from tests.model.explore import Event, Explored, Found, every_interleaving
from tests.model.world import NONE, put
from worker.core.rounds import Coordinator, Shard, echo_of
from worker.core.slots import EMPTY, Content, SlotView, being_written, find_sealed, is_superseded, kept, writable

GENERATION = Generation(1)
RARELY = {
    "ask": 0.1,
    "restart": 0.03,
    "halt": 0.02,
    "give up": 0.01,
    "end final round": 0.01,
    "uploaded": 0.3,
    "unable": 0.2,
}
"""Weights of the kinds of events in a random walk; 1 for all others."""


class Violation(Exception):
    """A state violates an invariant."""


class Mode(IntEnum):
    """Position of a rank.

    AT: a step has just ended. BETWEEN: the rank is in a step. WAITING: at an announced stop. STOPPED: at a confirmed
    stop. CLOSING: inside `close()`. CLOSED: after it. REHEARSING: it repeats steps, without a connection to its agent.
    """

    AT = 0
    BETWEEN = 1
    WAITING = 2
    STOPPED = 3
    CLOSING = 4
    CLOSED = 5
    REHEARSING = 6


STANDING = {Mode.STOPPED: RankStanding.STOPPED, Mode.CLOSING: RankStanding.CLOSING, Mode.CLOSED: RankStanding.CLOSED}


class Process(NamedTuple):
    """A rank, with the half of its shared-memory page that the rank writes."""

    mode: Mode = Mode.AT
    boundary: int = 0
    settled: int = NONE
    echo: tuple[int, int] = (NONE, 0)
    outcome: tuple[int, bool] | None = None
    """The message (step, captured) that is in transit from the rank to its agent."""
    is_late: bool = False
    rehearsal: tuple[int, int] = (NONE, 0)
    """The announced rehearsal that the rank has answered, and its answer."""
    rehearsed: int = NONE
    """The step of the rank's last rehearsal."""
    kept: int = NONE
    """The step of the state that the rank keeps for a rehearsal."""

    @property
    def standing(self) -> RankStanding:
        return STANDING.get(self.mode, RankStanding.MOVING)


class Word(NamedTuple):
    """The content of the coordinator's announcement."""

    committed: int
    proposed: int
    persist: int
    stop: int
    stop_state: StopState
    is_finished: bool
    rehearsal: int = NONE
    rehearsal_state: StopState = StopState.NONE
    rehearsal_steps: int = 0


NOTHING = Word(NONE, NONE, NONE, NONE, StopState.NONE, False)


class Agent(NamedTuple):
    """A rank's agent, with the half of the shared-memory page that the agent writes, and its slots."""

    shard: Shard
    word: Word = NOTHING
    granted: int = NONE
    rehearsal_steps: int = 0
    """The number of steps to repeat, on the page."""
    slots: tuple[SlotView, ...] = (EMPTY, EMPTY)
    pinned: int = NONE
    begun: int = NONE
    """The newest step whose upload has started."""
    uploaded: int = NONE
    """The newest step in S3."""
    cancelled: int = NONE
    """The newest step whose upload was cancelled so that the final step could be uploaded."""
    down: Word | None = None
    """The announcement that is in transit to this agent."""
    up: RankRound | None = None
    """The report that is in transit from this agent to the coordinator."""


class World(NamedTuple):
    """One state of the model."""

    coordinator: Coordinator
    agents: tuple[Agent, ...]
    processes: tuple[Process, ...]
    is_asked: bool = False
    """True after a person or the control plane has requested a stop."""
    restarts: int = 0
    is_hurried: bool = False
    """True if a final round was abandoned, or if a rank closed before the final round had ended."""
    confirmed: int = NONE
    """Step of the stop that the coordinator has confirmed in this job, if any."""
    is_ordered: bool = False
    """True after the control plane has ordered a rehearsal."""
    rehearsed: int = NONE
    """Step of the last rehearsal that the coordinator has confirmed, if any."""


@dataclass(frozen=True)
class Options:
    """Sizes of the model and the events that may occur."""

    ranks: int
    steps: int
    restarts: int = 0
    every_steps: int = 0
    slot_count: int = 2
    may_stop: bool = True
    may_hurry: bool = False
    """True if final rounds can be abandoned and ranks can end by themselves."""
    may_hang: bool = False
    """True if a requested stop may never be reached because ranks hang. The control plane then kills the ranks."""
    has_slow_uploads: bool = False
    """True if no upload ends before all ranks have closed."""
    has_uploads: bool = False
    """True if agents upload the steps that the coordinator marks for a checkpoint in S3.

    With `every_steps`, agents upload these steps whatever this option is.
    """
    is_fine: bool = False
    """True if a message is sent and received in two separate events, also between a rank and its agent.

    False if every message is received immediately.
    """
    rehearsed_steps: int = 0
    """Number of steps that the ranks repeat in a rehearsal; 0 if the control plane orders none."""
    may_refuse: bool = False
    """True if a rank may be unable to rehearse."""
    keeps_steps: bool = True
    """True if an agent keeps the number of steps to repeat when a restarted coordinator does not know it."""
    revokes: bool = True
    """True if an agent revokes the grant of a filled slot when its rank connects again."""
    coordinator: type[Coordinator] = Coordinator
    echo_of: Callable[[RankHalf, Step, StopState], tuple[Step, int]] = echo_of
    decide: Callable[[step_rules.RankView, AgentHalf], step_rules.StepDecision] = step_rules.decide
    begins_again: bool = True
    """True if an agent that finishes an upload then starts the upload that the coordinator marked meanwhile."""

    @property
    def uploads(self) -> bool:
        return self.has_uploads or self.every_steps > 0


class Model:
    """The agreed stop as a model: every possible event in a state, and the state after the event."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ranks = range(options.ranks)

    def first(self) -> World:
        """Return the first state of a first generation."""
        options = self.options
        begun = options.coordinator(
            world_size=options.ranks, base=Step(0), every_steps=options.every_steps, slot_count=options.slot_count
        ).begin()
        agent = Agent(Shard.begin(Step(0), ()), slots=(EMPTY,) * options.slot_count)
        return World(begun, (agent,) * options.ranks, (Process(),) * options.ranks)

    def moves(self, world: World) -> Iterator[tuple[Event, World]]:
        """Yield every possible event with the state after it."""
        for event, after in self._all_moves(world):
            yield event, after if self.options.is_fine else self._at_once(after)

    def _all_moves(self, world: World) -> Iterator[tuple[Event, World]]:
        for rank in self.ranks:
            yield from self._line(world, rank)
            if self.options.is_fine:
                yield from self._agent(world, rank)
            yield from self._uploads(world, rank)
            yield from self._process(world, rank)
        yield from self._around(world)

    def _at_once(self, world: World) -> World:
        """Unless `is_fine` is set, let every agent grant its slot and every waiting rank read its page immediately.

        Other processes do not observe these events.
        """
        while True:
            stepped = world
            for rank in self.ranks:
                stepped = _last(self._agent(stepped, rank), stepped)
                if stepped.processes[rank].mode in (Mode.WAITING, Mode.CLOSING):
                    stepped = _last(self._process(stepped, rank), stepped)
            if stepped == world:
                return world
            world = stepped

    # -- events of the connections between agents and coordinator

    def _line(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        agent = world.agents[rank]
        report = self.round(world, rank)
        core = world.coordinator
        word = word_of(core)
        if not self.options.is_fine:
            is_over = core.is_finished and self.options.restarts == world.restarts
            if not is_over and all(each != report for each in core.ranks):
                yield ("report", rank), self._coordinated(world, core.report(report))
            if not core.is_recovering and word != agent.word:
                yield ("hear", rank, *word), self._heard(world, rank, word)
            return
        if agent.up is not None:
            arrived = self._with(world, rank, agent._replace(up=None))
            yield ("report", rank), self._coordinated(arrived, core.report(agent.up))
        elif all(each != report for each in core.ranks):
            yield ("send report", rank), self._with(world, rank, agent._replace(up=report))
        if agent.down is not None:
            yield (
                ("hear", rank, *agent.down),
                self._heard(self._with(world, rank, agent._replace(down=None)), rank, agent.down),
            )
        elif not core.is_recovering and word != agent.word:
            yield ("announce", rank), self._with(world, rank, agent._replace(down=word))

    def round(self, world: World, rank: int) -> RankRound:
        agent, process = world.agents[rank], world.processes[rank]
        half = RankHalf(GENERATION, process.boundary, echo_step=process.echo[0], echo=process.echo[1])
        is_confirmed = agent.word.rehearsal_state is StopState.CONFIRMED
        echo_step, echo = self.options.echo_of(half, Step(agent.word.stop), agent.word.stop_state)
        return RankRound(
            rank=Rank(rank),
            boundary=Step(process.boundary),
            committed=agent.shard.committed,
            proposed=agent.shard.proposed,
            vote=agent.shard.vote,
            standing=process.standing,
            echo_step=echo_step,
            echo=echo,
            confirmed_stop=Step(agent.word.stop) if agent.word.stop_state is StopState.CONFIRMED else Step(NONE),
            heard_stop=Step(agent.word.stop),
            rehearsal_step=Step(process.rehearsal[0]),
            rehearsal_echo=process.rehearsal[1],
            confirmed_rehearsal=Step(agent.word.rehearsal) if is_confirmed else Step(NONE),
            heard_rehearsal=Step(agent.word.rehearsal),
            pinned_steps=() if agent.pinned == NONE else (Step(agent.pinned),),
            is_late=agent.shard.is_late,
        )

    @staticmethod
    def _with(world: World, rank: int, agent: Agent) -> World:
        return world._replace(agents=put(world.agents, rank, agent))

    def _coordinated(self, world: World, coordinator: Coordinator) -> World:
        before = world.coordinator
        if not before.is_recovering and coordinator.committed < before.committed:
            raise Violation(f"C falls from {before.committed} to {coordinator.committed}")
        if coordinator.committed > min(process.boundary for process in world.processes):
            raise Violation(f"step {coordinator.committed} is committed before all have made it")
        confirmed = coordinator.stop if coordinator.stop_state is StopState.CONFIRMED else NONE
        if world.confirmed != NONE and confirmed not in (NONE, world.confirmed):
            raise Violation(f"a stop at {confirmed} is confirmed after one at {world.confirmed}")
        rehearsed = world.rehearsed
        if coordinator.rehearsal.state is StopState.CONFIRMED:
            rehearsed = coordinator.rehearsal.step
            if rehearsed != world.rehearsed != NONE and any(
                process.rehearsed != world.rehearsed for process in world.processes
            ):
                raise Violation(f"a rehearsal at {rehearsed} is confirmed during one at {world.rehearsed}")
        return world._replace(coordinator=coordinator, confirmed=max(world.confirmed, confirmed), rehearsed=rehearsed)

    def _heard(self, world: World, rank: int, word: Word) -> World:
        """Return the state after an agent has received an announcement.

        The agent starts a due upload, then updates its shard and its page.

        `Member._apply_announcement` and `RankConnections.apply_announcement` are the code that this models.
        """
        agent = self._upload_if_due(world.agents[rank]._replace(word=word))
        if word.rehearsal_steps or not self.options.keeps_steps:
            agent = agent._replace(rehearsal_steps=word.rehearsal_steps)
        shard = agent.shard.apply_announcement(Step(word.committed), Step(word.proposed))
        granted = NONE if shard.proposed != agent.shard.proposed else agent.granted
        return self._with(world, rank, agent._replace(shard=shard, granted=granted))

    def _upload_if_due(self, agent: Agent) -> Agent:
        """Start a due upload, as `Member._upload_if_due` does."""
        step = agent.word.persist
        index = find_sealed(agent.slots, self._content(step))
        if (
            not self.options.uploads
            or step <= agent.begun
            or step != agent.word.committed
            or agent.pinned != NONE
            or index is None
        ):
            return agent
        return agent._replace(
            slots=put(agent.slots, index, replace(agent.slots[index], is_pinned=True)), pinned=step, begun=step
        )

    @staticmethod
    def _content(step: int) -> Content:
        return Content(GENERATION, Step(step))

    # -- events of the agent

    def _agent(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        agent, process = world.agents[rank], world.processes[rank]
        step = agent.shard.proposed
        can_capture = process.boundary < step or (
            process.boundary == step and process.standing is not RankStanding.MOVING
        )
        if step != NONE and step not in agent.shard.sealed and agent.granted == NONE and can_capture:
            keep = kept(self._content(agent.shard.committed) if agent.shard.committed != NONE else None, (), None)
            index = being_written(agent.slots, self._content(step))
            if index is None:
                index = writable(agent.slots, keep)
            if index is not None:
                slots = put(agent.slots, index, SlotView(SlotState.WRITING, self._content(step)))
                gone = {each for each in agent.shard.sealed if find_sealed(slots, self._content(each)) is None}
                shard = replace(agent.shard, sealed=agent.shard.sealed - gone)
                yield (
                    ("grant", rank, step),
                    self._with(world, rank, agent._replace(slots=slots, granted=index, shard=shard)),
                )
        if process.outcome is not None:
            yield ("deliver", rank), self._delivered(world, rank, *process.outcome)

    def _uploads(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        agent = world.agents[rank]
        slots = tuple(replace(view, is_pinned=False) for view in agent.slots)
        if is_superseded(
            Step(agent.pinned),
            committed=Step(agent.word.committed),
            proposed=Step(agent.word.proposed),
            persist=Step(agent.word.persist),
        ):
            yield (
                ("cancelled", rank, agent.pinned),
                self._with(world, rank, agent._replace(slots=slots, pinned=NONE, cancelled=agent.pinned)),
            )
        if agent.pinned != NONE and (self.is_done(world) or not self.options.has_slow_uploads):
            ended = agent._replace(slots=slots, pinned=NONE, uploaded=agent.pinned)
            after = self._upload_if_due(ended) if self.options.begins_again else ended
            yield ("uploaded", rank, agent.pinned), self._with(world, rank, after)

    def _delivered(self, world: World, rank: int, step: int, is_captured: bool) -> World:
        agent, process = world.agents[rank], world.processes[rank]
        world = world._replace(processes=put(world.processes, rank, process._replace(outcome=None)))
        if not is_captured:
            return self._with(
                world, rank, agent._replace(shard=agent.shard.abandon(Step(step), "", late=process.is_late))
            )
        index = being_written(agent.slots, self._content(step))
        if index is None:
            return world
        slots = put(agent.slots, index, SlotView(SlotState.SEALED, self._content(step)))
        return self._with(world, rank, agent._replace(slots=slots, shard=agent.shard.seal(Step(step))))

    # -- events of the rank

    def _half(self, agent: Agent) -> AgentHalf:
        shard = agent.shard
        return AgentHalf(
            GENERATION,
            shard.committed,
            FINISHED if agent.word.is_finished else shard.proposed,
            agent.granted,
            agent.word.stop,
            agent.word.stop_state,
            NONE if shard.vote is Vote.NONE else shard.proposed,
            shard.vote,
            rehearsal=agent.word.rehearsal,
            rehearsal_state=agent.word.rehearsal_state,
            rehearsal_steps=agent.rehearsal_steps,
        )

    def _process(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        process, agent = world.processes[rank], world.agents[rank]
        match process.mode:
            case Mode.AT if process.boundary < self.options.steps:
                yield ("go", rank), self._moved(world, rank, process._replace(mode=Mode.BETWEEN))
            case Mode.AT | Mode.STOPPED:
                yield ("close", rank), self._moved(world, rank, process._replace(mode=Mode.CLOSING))
            case Mode.BETWEEN:
                others = [world.processes[other] for other in self.ranks if other != rank]
                ahead = all(
                    (each.boundary, each.mode is Mode.BETWEEN) >= (process.boundary, True)
                    or each.boundary > process.boundary
                    for each in others
                )
                if ahead:
                    passed = process._replace(mode=Mode.AT, boundary=process.boundary + 1)
                    if NONE < world.confirmed < passed.boundary:
                        raise Violation(
                            f"rank {rank} passes {passed.boundary} although a stop at {world.confirmed} is confirmed"
                        )
                    yield ("boundary", rank, passed.boundary), self._moved(world, rank, self._look(agent, passed))
            case Mode.WAITING:
                looked = self._look(agent, process._replace(mode=Mode.AT))
                if looked != process:
                    yield ("look", rank), self._moved(world, rank, looked)
            case Mode.REHEARSING:
                are_together = all(
                    each.rehearsed == process.boundary or each.mode is Mode.REHEARSING for each in world.processes
                )
                if are_together and process.outcome is None:
                    yield ("rehearsed", rank), self._rehearsed(world, rank)
            case Mode.CLOSING:
                half = self._half(agent)
                if step_rules.is_final_round_over(process.boundary, half):
                    yield ("leave", rank), self._moved(world, rank, process._replace(mode=Mode.CLOSED))
                elif (looked := self._look(agent, process)) != process:
                    yield ("look", rank), self._moved(world, rank, looked)

        step, echo = process.rehearsal
        is_early = process.mode is Mode.AT and process.boundary <= step - self.options.rehearsed_steps
        if self.options.may_refuse and echo == ECHO_YES and is_early:
            refused = process._replace(rehearsal=(step, ECHO_UNABLE))
            yield ("unable", rank), self._moved(world, rank, refused)

    def _rehearsed(self, world: World, rank: int) -> World:
        """Return the state after a rank has ended its rehearsal, and its new process has connected to the agent.

        The new process does not know what the old process has captured (`RankSlots.revoke_captured`).
        """
        process, agent = world.processes[rank], world.agents[rank]
        if self.options.revokes and agent.shard.proposed in agent.shard.sealed:
            agent = agent._replace(granted=NONE)
        world = self._with(world, rank, agent)
        back = process._replace(mode=Mode.AT, settled=NONE, rehearsed=process.boundary, kept=NONE)
        return self._moved(world, rank, self._look(agent, back))

    def _moved(self, world: World, rank: int, process: Process) -> World:
        world = world._replace(processes=put(world.processes, rank, process))
        return (
            world if process.outcome is None or self.options.is_fine else self._delivered(world, rank, *process.outcome)
        )

    def _look(self, agent: Agent, process: Process) -> Process:
        """Return the rank after it has read its page and acted.

        A session reads its page after each step and while it waits.
        """
        half = self._half(agent)
        if half.proposed != process.settled:
            process = process._replace(settled=NONE)
        view = step_rules.RankView(
            process.boundary,
            0,
            process.settled,
            echo_step=process.echo[0],
            rehearsal=process.rehearsal,
            rehearsed=process.rehearsed,
            has_slots=True,
        )
        decision = self.options.decide(view, half)
        if decision.rehearsal_echo is not None:
            process = process._replace(rehearsal=decision.rehearsal_echo)
        first = NONE if decision.keeps_from is None else decision.keeps_from
        process = process._replace(kept=first if first in (process.kept, process.boundary) else NONE)
        if decision.echo is not None:
            process = process._replace(echo=decision.echo)
        if decision.abandon is not None:
            process = process._replace(settled=decision.abandon[0], outcome=(decision.abandon[0], False), is_late=True)
        elif decision.capture_slot is not None:
            is_sealed = find_sealed(agent.slots, self._content(process.boundary)) is not None
            if is_sealed and process.standing is RankStanding.MOVING:
                raise Violation(f"step {process.boundary} is captured again")
            process = process._replace(settled=process.boundary, outcome=(process.boundary, True), is_late=False)
        if process.mode is Mode.CLOSING:
            return process
        if decision.is_stopped:
            return process._replace(mode=Mode.STOPPED)
        if decision.rehearses:
            return process._replace(mode=Mode.REHEARSING)
        return process._replace(mode=Mode.WAITING) if decision.must_wait else process

    # -- events outside of ranks and agents: requests, restarts, uploads and timeouts

    def _around(self, world: World) -> Iterator[tuple[Event, World]]:
        core = world.coordinator
        if self.options.may_stop and not world.is_asked:
            asked = world._replace(is_asked=True)
            yield ("ask",), asked if self.options.restarts else self._coordinated(asked, core.request_stop())
        if world.is_asked and not core.stop_requested:
            yield ("request stop",), self._coordinated(world, core.request_stop())
        steps = self.options.rehearsed_steps
        if steps and not world.is_ordered:
            ordered = world._replace(is_ordered=True)
            yield (
                ("order",),
                ordered if self.options.restarts else self._coordinated(ordered, core.request_rehearsal(1, steps)),
            )
        if world.is_ordered and not core.rehearsal.number:
            yield ("request rehearsal",), self._coordinated(world, core.request_rehearsal(1, steps))
        if world.restarts < self.options.restarts:
            yield ("restart",), self._restarted(world)
        if self.options.may_hurry:
            if core.final != NONE and not core.is_finished:
                yield ("end final round",), self._coordinated(world._replace(is_hurried=True), core.end_final_round())
            for rank in self.ranks:
                if world.processes[rank].mode is Mode.CLOSING:
                    left = self._moved(world, rank, world.processes[rank]._replace(mode=Mode.CLOSED))
                    yield ("give up", rank), left._replace(is_hurried=True)
        if self.options.may_hang and core.stop_requested and not self.is_done(world):
            killed = tuple(process._replace(mode=Mode.CLOSED, outcome=None) for process in world.processes)
            yield ("halt",), self._coordinated(world._replace(processes=killed, is_hurried=True), core.halt())

    def _restarted(self, world: World) -> World:
        """Restart the coordinator's agent.

        All connections break, its own uploads are lost, and the coordinator asks every agent again.
        """
        options = self.options
        core = options.coordinator(
            world_size=options.ranks, base=Step(0), every_steps=options.every_steps, slot_count=options.slot_count
        ).recover()
        agents = tuple(agent._replace(up=None, down=None) for agent in world.agents)
        word = agents[0].word._replace(persist=NONE)  # all other state is read from the page
        own = agents[0]._replace(
            pinned=NONE, begun=NONE, word=word, slots=tuple(replace(view, is_pinned=False) for view in agents[0].slots)
        )
        # A restarted coordinator knows of a confirmed stop only from agents that have received the confirmation. If
        # no agent has received it, the stop no longer counts as confirmed.
        heard = max(agent.word.stop if agent.word.stop_state is StopState.CONFIRMED else NONE for agent in agents)
        # The same holds for a confirmed rehearsal, until the agents receive that it is over.
        is_received = any(
            agent.word.rehearsal == world.rehearsed and agent.word.rehearsal_state is StopState.CONFIRMED
            for agent in agents
        )
        has_begun = any(process.rehearsed == world.rehearsed for process in world.processes)
        return world._replace(
            coordinator=core,
            agents=(own, *agents[1:]),
            restarts=world.restarts + 1,
            confirmed=heard,
            rehearsed=world.rehearsed if is_received or has_begun else NONE,
        )

    # -- invariants of every state

    def check(self, world: World) -> None:
        """Check where the ranks stop, and that the last step is committed and uploaded.

        All ranks stop after the same step, and no rank has passed a confirmed stop. If all ranks close without a fault,
        the last step is committed. Where a final upload is due, that step is in S3.

        Raises:
            Violation: one of these conditions does not hold.
        """
        stopped = {process.boundary for process in world.processes if process.mode is Mode.STOPPED}
        if len(stopped) > 1:
            raise Violation(f"ranks stop at {sorted(stopped)}")
        if world.confirmed != NONE and any(process.boundary > world.confirmed for process in world.processes):
            raise Violation(f"a stop at {world.confirmed} is confirmed and a rank has passed it")
        for rank, process in enumerate(world.processes):
            if process.mode is Mode.REHEARSING:
                self._check_rehearsal(world, process, world.agents[rank].rehearsal_steps)
            if NONE < world.rehearsed < process.boundary and process.rehearsed != world.rehearsed:
                raise Violation(f"rank {rank} passes {world.rehearsed} without the rehearsal")
        core = world.coordinator
        is_told = all(
            agent.word == word_of(core) and agent.pinned == NONE and agent.down is None for agent in world.agents
        )
        must_leave = core.is_finished and not core.is_recovering
        if self.options.uploads and self.is_done(world) and is_told and must_leave:
            left = {agent.uploaded for agent in world.agents}
            if left != {core.committed}:
                raise Violation(f"steps {sorted(left)} are left in S3, and C is {core.committed}")
        if self.is_done(world) and not world.is_hurried and not world.restarts:
            boundary = world.processes[0].boundary
            if world.coordinator.committed != boundary:
                raise Violation(f"all left at {boundary}, and C is {world.coordinator.committed}")

    def _check_rehearsal(self, world: World, rehearsing: Process, steps: int) -> None:
        step = rehearsing.boundary
        if step != world.rehearsed or rehearsing.rehearsal != (step, ECHO_YES):
            raise Violation(f"a rank rehearses at {step}, and {world.rehearsed} is confirmed")
        if steps != self.options.rehearsed_steps or rehearsing.kept != step - steps:
            raise Violation(f"a rank repeats {steps} steps from {rehearsing.kept}")
        for rank, process in enumerate(world.processes):
            is_there = process.boundary == step and process.mode in (Mode.WAITING, Mode.REHEARSING)
            if process.rehearsed != step and not is_there:
                raise Violation(f"rank {rank} is missing from the rehearsal at {step}")

    def is_done(self, world: World) -> bool:
        """Return whether every rank has closed."""
        return all(process.mode is Mode.CLOSED for process in world.processes)


def word_of(core: Coordinator) -> Word:
    return Word(
        core.committed,
        core.proposed,
        core.persist,
        core.stop,
        core.stop_state,
        core.is_finished,
        core.rehearsal.step,
        core.rehearsal.state,
        core.rehearsal.steps,
    )


def _last(moves: Iterator[tuple[Event, World]], world: World) -> World:
    """Return the state after the last of these events. Without events, return the given state."""
    for _, after in moves:
        world = after
    return world


class FewSnapshots(Coordinator):
    """A coordinator that proposes only the final step, so that a model has fewer states."""

    __slots__ = ()

    def _propose(self) -> Coordinator:
        return super()._propose() if self.final != NONE else self


class OnePhase(Coordinator):
    """Planted bug: the coordinator confirms a stop at once, although a rank may already have passed its step."""

    __slots__ = ()

    def _stopping(self) -> Coordinator:
        announced = super()._stopping()
        return (
            replace(announced, stop_state=StopState.CONFIRMED)
            if announced.stop_state is StopState.ANNOUNCED
            else announced
        )


class NeverWithdraws(Coordinator):
    """Planted bug: after a rank has passed the announced stop, the coordinator waits forever for that rank's
    agreement.
    """

    __slots__ = ()

    def _stopping(self) -> Coordinator:
        if self.stop_state is StopState.ANNOUNCED and any(
            each.echo == ECHO_NO and each.echo_step == self.stop for each in self.ranks
        ):
            return self
        return super()._stopping()


class ForgetsConfirmed(Coordinator):
    """Planted bug: a restarted coordinator forgets a stop that agents have received as confirmed."""

    __slots__ = ()

    def _recovered(self) -> Coordinator:
        recovered = super()._recovered()
        return recovered if recovered is self else replace(recovered, stop=Step(NONE), stop_state=StopState.NONE)


class ReusesNumber(Coordinator):
    """Planted bug: a restarted coordinator forgets an announced stop to which ranks may already have agreed."""

    __slots__ = ()

    def _recovered(self) -> Coordinator:
        recovered = super()._recovered()
        return (
            recovered
            if recovered is self or recovered.stop_state is StopState.CONFIRMED
            else replace(recovered, stop=Step(NONE))
        )


class LeavesNothing(Coordinator):
    """Planted bug: the coordinator marks the committed step for upload only if it is the final step.

    It is not the final step if, for example, the final step was abandoned or the ranks waited too long for its commit.
    """

    __slots__ = ()

    def _left_behind(self) -> Coordinator:
        return super()._left_behind() if self.final == self.committed else self


class UploadsFirst(Coordinator):
    """Planted bug: the coordinator delays the final step while an upload uses the only slot that is free for
    the step.
    """

    __slots__ = ()

    def _propose(self) -> Coordinator:
        is_full = any(len({*each.pinned_steps} - {self.committed}) >= self.slot_count - 1 for each in self.ranks)
        return self if is_full else super()._propose()


class ForgetsCancelled(Coordinator):
    """Planted bug: if training ends without a stop, the coordinator does not mark the last committed step for upload.

    Agents may have cancelled the upload of an earlier step in favour of the final step. If the final step is then
    abandoned, S3 can lack both steps.
    """

    __slots__ = ()

    def _left_behind(self) -> Coordinator:
        return super()._left_behind() if self._is_stopping else self


class MostEchoes(Coordinator):
    """Planted bug: the coordinator confirms a stop while the answer of one rank is missing."""

    __slots__ = ()

    def _stopping(self) -> Coordinator:
        echoes = [each.echo for each in self.ranks if each.echo_step == self.stop]
        if (
            self.stop_state is StopState.ANNOUNCED
            and len(echoes) >= self.world_size - 1
            and all(echo == ECHO_YES for echo in echoes)
        ):
            return replace(self, stop_state=StopState.CONFIRMED)
        return super()._stopping()


class RehearsesEarly(FewSnapshots):
    """Planted bug: the coordinator confirms a rehearsal when all ranks have agreed, before they wait at its step."""

    __slots__ = ()

    def _rehearsing(self) -> Coordinator:
        return _confirmed(self) if self.is_complete and all(_agrees(self)) else super()._rehearsing()


class RehearsesWithOne(FewSnapshots):
    """Planted bug: the coordinator confirms a rehearsal when the first rank has agreed."""

    __slots__ = ()

    def _rehearsing(self) -> Coordinator:
        return _confirmed(self) if any(_agrees(self)) else super()._rehearsing()


class NeverWithdrawsRehearsal(FewSnapshots):
    """Planted bug: after a rank has passed the first step of a rehearsal, the coordinator waits for its agreement."""

    __slots__ = ()

    def _rehearsing(self) -> Coordinator:
        is_rejected = any(
            (each.rehearsal_step, each.rehearsal_echo) == (self.rehearsal.step, ECHO_NO) for each in self.ranks
        )
        return self if is_rejected and self.rehearsal.state is StopState.ANNOUNCED else super()._rehearsing()


class ForgetsRehearsal(FewSnapshots):
    """Planted bug: a restarted coordinator forgets a rehearsal that agents have received as confirmed."""

    __slots__ = ()

    def _recovered(self) -> Coordinator:
        recovered = super()._recovered()
        return (
            recovered
            if recovered is self
            else replace(recovered, rehearsal=replace(recovered.rehearsal, state=StopState.NONE))
        )


class ReusesRehearsal(FewSnapshots):
    """Planted bug: a restarted coordinator forgets an announced rehearsal to which ranks may already have agreed."""

    __slots__ = ()

    def _recovered(self) -> Coordinator:
        recovered = super()._recovered()
        return (
            recovered
            if recovered is self or recovered.rehearsal.state is StopState.CONFIRMED
            else replace(recovered, rehearsal=replace(recovered.rehearsal, step=NONE))
        )


def _agrees(core: Coordinator) -> list[bool]:
    """Return for each rank whether it has agreed to the announced rehearsal."""
    rehearsal = core.rehearsal
    is_announced = rehearsal.state is StopState.ANNOUNCED
    return [
        is_announced and (each.rehearsal_step, each.rehearsal_echo) == (rehearsal.step, ECHO_YES) for each in core.ranks
    ]


def _confirmed(core: Coordinator) -> Coordinator:
    return replace(core, rehearsal=replace(core.rehearsal, state=StopState.CONFIRMED, announcements_left=0))


def _walks_on(view: step_rules.RankView, half: AgentHalf) -> step_rules.StepDecision:
    """Planted bug: a rank that agreed to an announced stop does not wait there."""
    return replace(step_rules.decide(view, half), must_wait=False)


REHEARSAL: dict[str, object] = {"may_stop": False, "rehearsed_steps": 1}
BUGS: dict[str, dict[str, object]] = {
    "one-phase": {"coordinator": OnePhase},
    "never-withdraws": {"coordinator": NeverWithdraws},
    "forgets-confirmed": {"coordinator": ForgetsConfirmed, "restarts": 1},
    "reuses-number": {"coordinator": ReusesNumber, "restarts": 1},
    "leaves-nothing": {"coordinator": LeavesNothing, "has_uploads": True, "may_hang": True},
    "forgets-mark": {"begins_again": False, "every_steps": 1, "slot_count": 3},
    "uploads-first": {"coordinator": UploadsFirst, "every_steps": 1, "may_stop": False, "has_slow_uploads": True},
    "forgets-cancelled": {
        "coordinator": ForgetsCancelled,
        "every_steps": 1,
        "may_stop": False,
        "may_hurry": True,
        "has_slow_uploads": True,
    },
    "most-echoes": {"coordinator": MostEchoes},
    "walks-on": {"decide": _walks_on},
    "rehearses-early": {"coordinator": RehearsesEarly, **REHEARSAL},
    "rehearses-with-one": {"coordinator": RehearsesWithOne, **REHEARSAL},
    "never-withdraws-rehearsal": {"coordinator": NeverWithdrawsRehearsal, **REHEARSAL},
    "forgets-rehearsal": {"coordinator": ForgetsRehearsal, "restarts": 1, **REHEARSAL},
    "reuses-rehearsal": {"coordinator": ReusesRehearsal, "restarts": 1, **REHEARSAL},
    "forgets-steps": {"coordinator": FewSnapshots, "restarts": 1, "keeps_steps": False, **REHEARSAL},
    "captures-again": {"revokes": False, **REHEARSAL},
    "rank-alone": {"echo_of": lambda half, stop, state: (Step(half.echo_step), half.echo)},
}


def explore(options: Options) -> Explored:
    """Visit every state and check that the end is reachable from each.

    Raises Found for a violation, or for a state in which a process waits forever.
    """
    return every_interleaving(Model(options), must_end=True)


def main(arguments: Sequence[str]) -> int:
    """Explore with the options of the command line and print the counts, or the events of a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.stop_agreement")
    for name in ("ranks", "steps", "restarts"):
        parser.add_argument(name, type=int)
    parser.add_argument("--bug", choices=sorted(BUGS))
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--no-stop", action="store_true")
    parser.add_argument("--fine", action="store_true", help="messages travel, and may be stale when they arrive")
    parser.add_argument("--rehearse", type=int, default=0, metavar="N", help="steps that the ranks repeat once")
    parser.add_argument("--hurry", action="store_true", help="final rounds are given up, ranks leave on their own")
    chosen = parser.parse_args(arguments)
    options = Options(
        chosen.ranks,
        chosen.steps,
        chosen.restarts,
        chosen.every,
        chosen.slots,
        may_stop=not chosen.no_stop,
        may_hurry=chosen.hurry,
        is_fine=chosen.fine,
        rehearsed_steps=chosen.rehearse,
    )
    try:
        seen = explore(replace(options, **BUGS.get(chosen.bug, {})))  # type: ignore[arg-type]
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"{seen.states} states, all stop together and nobody waits for ever; {dict(seen.most_common())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
