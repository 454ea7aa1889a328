"""A training session: what a script holds in its hand.

    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for batch in session.batches(until_step=10_000):
        …
    session.close()

A step seen from here: `boundary` → `step_rules.decide` on the agent's word → `_capture` → `Copier` → the guard before the next change → `Captured`.

Invariant: the state that a snapshot of step k holds is the state right after the k-th optimizer step; saving trouble abandons a snapshot, never
training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import (
    NONE,
    Abandoned,
    Boundary,
    Captured,
    Phase,
    RankFault,
    RankHalf,
    RankHello,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    Standing,
)
from everstep.training import rng
from everstep.training.adapters.base import Adapter, qualified_name
from everstep.training.adapters.ddp import DDPAdapter
from everstep.training.adapters.deepspeed import DeepSpeedAdapter, is_engine
from everstep.training.adapters.fsdp import FSDPAdapter
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.agent_link import AgentLink, NullLink, UnixAgentLink
from everstep.training.capture import CapturePlan, Copier, CopyPiece, CpuCopier, SlotMemory, StateTensor
from everstep.training.data import DataStream
from everstep.training.errors import CannotResume, RestoreMismatch, SessionMisuse, TrainingError
from everstep.training.exit_watch import ExitWatch
from everstep.training.guard import Flight, Guard, Watched, mark_of
from everstep.training.metrics import MetricRing
from everstep.training.restore import Expected, SlotValues, Snapshot, agree, encode_facts, read_snapshot
from everstep.training.script import Environment
from everstep.training.state_tree import Tree, encode
from everstep.training.step_rules import Decision, RankView, decide, is_final_round_over

LOOK_SECONDS = 0.05
"""A rank that stands still looks at the page at least this often: `WordChanged` may be lost."""

logger = logging.getLogger("everstep.training")


class Stateful(Protocol):
    """A scheduler, a gradient scaler, an average of weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class Control:
    """What the script is told at a boundary."""

    step: int
    """Steps finished."""
    stop: bool
    """All ranks stop here: leave the loop and call `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What the script handed to `init`."""

    adapters: Sequence[Adapter]
    streams: Mapping[str, DataStream]
    objects: Mapping[str, Stateful]
    has_many_streams: bool


@dataclass(frozen=True, slots=True)
class _Observed:
    tensors: list[StateTensor]
    values: bytes


class TrainingSession:
    """One rank's line between a training script and the service; made by `init`.

    Args:
        registered: the script's objects.
        link: to the agent.
        environment: of the rank.
        copier: brings tensors into slots.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        registered: Registered,
        link: AgentLink,
        environment: Environment,
        copier: Copier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registered = registered
        self._link = link
        self._environment = environment
        self._copier = copier
        self._clock = clock
        self._guard = Guard()
        self._ring = MetricRing(link.generation, link.send)
        self._base = Step(0)
        self._boundary = 0
        self._settled = 0
        self._is_restored = False
        self._is_stopped = False
        self._is_closed = False
        self._half_lock = threading.Lock()  # the training thread and the copier both write the page
        self._half = RankHalf(generation=link.generation)
        self._plan: CapturePlan | None = None
        self._granted: SlotsGranted | None = None
        self._memories: dict[int, SlotMemory] = {}
        self._facts = self._gather_facts()
        self._facts_data, self._layout_hash = encode_facts(self._facts)
        self._observe()  # refuses here and now what could not be brought back
        for adapter in registered.adapters:
            for optimizer in adapter.optimizers().values():
                optimizer.register_step_pre_hook(lambda *_: self._guard.reach())
        self._exit_watch = ExitWatch(self.close)

    @property
    def step(self) -> int:
        """The step being made: one more than the steps finished."""
        return self._boundary + 1

    @property
    def data(self) -> Mapping[str, DataStream]:
        """The registered loaders, each iterable over what is left of its epoch, for scripts that own the loop."""
        return self._registered.streams

    @property
    def blocked_seconds(self) -> Sequence[float]:
        """How long each of the newest snapshots held the training thread, boundary and guard together."""
        return tuple(self._guard.blocked_seconds)

    def restore(self) -> int:
        """Bring back the step that the agent names, in place. Collective, all or none; once, after everything is built and before the first forward.

        Returns:
            Steps finished: the script's loop begins behind it. 0 when there is nothing to restore.

        Raises:
            RestoreMismatch: a rank's snapshot does not fit, or the ranks were given different steps; nothing was written.
        """
        if self._is_restored:
            return self._boundary
        self._publish(phase=Phase.RESTORE)
        welcome = self._link.welcome()
        snapshot, problem = None, ""
        if welcome.base_step:
            try:
                snapshot = self._read(welcome.base_step, welcome.base_slot_path)
            except RestoreMismatch as error:
                problem = str(error)
        try:
            agree(welcome.base_step, problem)
        except RestoreMismatch as error:
            self._link.send(RankFault(generation=self._link.generation, code=error.code, message=str(error)))
            raise
        if snapshot is not None:
            self._load(snapshot)
        self._base = welcome.base_step
        self._boundary = self._settled = int(welcome.base_step)
        self._is_restored = True
        self._publish(boundary=self._boundary, phase=Phase.TRAIN)
        self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))
        return self._boundary

    def batches(self, until_step: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield batches across epochs, with a boundary after every step. Restores first where that has not been done.

        Args:
            until_step: steps finished at the end, those before a restart included.
            accumulate: batches to one optimizer step. A DeepSpeed engine says itself when its step is complete.

        Yields:
            A batch; with several loaders a dict of one from each; None without any.
        """
        self.restore()
        while self._boundary < until_step and not self._is_stopped:
            before, count = self._steps_made(), 0
            while count == 0 or not self._is_step_complete(before, count, accumulate):
                yield self._next_batch()
                count += 1
            self.boundary()

    def boundary(self) -> Control:
        """Say that an optimizer step is finished. Every rank, once per step, after everything that belongs to it (scheduler, scaler, averages).

        Returns:
            Where training stands, and whether to stop; all ranks are told to stop at the same step.

        Raises:
            SessionMisuse: before `restore` or after `close`.
        """
        if not self._is_restored or self._is_closed:
            raise SessionMisuse("boundary() belongs between restore() and close()")
        self._guard.reach()
        self._boundary += 1
        for adapter in self._registered.adapters:
            adapter.end_step()
        self._publish(boundary=self._boundary)
        if self._link.has_agent:
            self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))
            decision = self._attend()
            if self._plan is None:
                self._request_slots(self._observe())
            if decision is not None and decision.must_wait:
                decision = self._await_stop()
            if decision is not None and decision.is_stopped:
                self._is_stopped = True
                self._publish(standing=Standing.STOPPED)
        return Control(self._boundary, self._is_stopped)

    def fence(self) -> None:
        """Wait for the copy in flight. Before the script changes registered state outside an optimizer step (weight clipping, swapped averages)."""
        self._guard.reach()

    @contextlib.contextmanager
    def phase(self, name: Literal["train", "eval", "checkpoint"]) -> Iterator[None]:
        """Say what the script is doing, for as long as the context lasts: each phase has a time limit of its own.

        Args:
            name: of the phase.
        """
        before = self._half.phase
        self._publish(phase=Phase[name.upper()])
        try:
            yield
        finally:
            self._publish(phase=before)

    def log(self, **values: float | torch.Tensor) -> None:
        """Log numbers for the step being made. Never blocks; what a full ring cannot take is dropped and counted.

        Args:
            values: numbers, or tensors of one element.
        """
        if self._link.has_agent:
            self._ring.add(Step(self.step), {key: float(value) for key, value in values.items()})

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live model and optimizer tensors by name: what a script may write out as its result."""
        return {state.name: state.tensor.detach() for adapter in self._registered.adapters for state in adapter.observe().tensors}

    def close(self) -> None:
        """End the session: the last step is captured and committed if that is possible soon, then the agent is told. Idempotent.

        Call it right behind the loop, before results are written: a snapshot taken here must still be the state of the last boundary. A script
        that ends with code 0 without it gets it at exit.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._exit_watch.cancel()
        self._guard.reach()
        self._publish(phase=Phase.CLOSE, standing=Standing.CLOSING)
        self._ring.close()
        if self._link.has_agent and self._is_restored:
            self._final_round()
        self._publish(standing=Standing.CLOSED)
        self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))
        self._copier.close()
        self._link.close()
        self._memories.clear()

    def _final_round(self) -> None:
        deadline = self._clock() + self._environment.final_round_seconds
        self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))
        while (left := deadline - self._clock()) > 0:
            half = self._link.poll()
            if half is not None:
                if is_final_round_over(self._boundary, half):
                    return
                self._act(decide(self._view(), half))
                self._guard.reach()
            self._link.wait(min(left, LOOK_SECONDS))
        logger.warning("step %d was not committed within %.0f s of the end", self._boundary, self._environment.final_round_seconds)

    def _await_stop(self) -> Decision | None:
        """Stand at the announced stop until it is confirmed or withdrawn; an agent that restarts meanwhile is waited for."""
        decision: Decision | None = None
        while decision is None or decision.must_wait:
            self._guard.reach()
            self._link.wait(LOOK_SECONDS)
            decision = self._attend()
        return decision

    def _attend(self) -> Decision | None:
        """Look at the agent's word and act on it."""
        half = self._link.poll()
        if half is None:
            return None
        decision = decide(self._view(), half)
        self._act(decision)
        return decision

    def _act(self, decision: Decision) -> None:
        if decision.echo is not None:
            step, echo = decision.echo
            self._publish(echo_step=step, echo=echo)
            self._link.hint(Boundary(generation=self._link.generation, boundary=Step(self._boundary)))
        if decision.abandon is not None:
            step, reason = decision.abandon
            self._abandon(step, reason)
        elif decision.capture_slot is not None:
            self._capture(decision.capture_slot)

    def _view(self) -> RankView:
        answer = self._link.slots
        return RankView(
            boundary=self._boundary,
            base=self._base,
            settled=self._settled,
            echo_step=self._half.echo_step,
            has_slots=self._plan is not None and isinstance(answer, SlotsGranted),
            obstacle=answer.reason if isinstance(answer, SlotsRefused) else "",
        )

    def _capture(self, slot: int) -> None:
        """Capture this boundary into a granted slot: what may change any time now, the rest while training goes on."""
        begun = time.perf_counter()
        step = self._boundary
        observed = self._observe()
        plan = self._plan
        assert plan is not None, "slots are granted for a plan"
        index = plan.index(observed.values) if plan.fits(observed.tensors) else None
        if index is None:
            self._request_slots(observed)
            self._abandon(step, "the state's layout changed; its new slots come with the next proposal")
            return
        try:
            memory = self._memory(slot)
        except (OSError, ValueError) as error:
            self._abandon(step, f"slot {slot} cannot be mapped: {error}")
            return
        self._settled = step
        now: list[CopyPiece] = []
        later: list[CopyPiece] = []
        watched: list[Watched] = []
        for state, target in zip(observed.tensors, memory.views(plan), strict=True):
            piece = CopyPiece(state.tensor.detach(), target)
            if state.is_deferred and state.name not in self._guard.unstable:
                later.append(piece)
                watched.append(Watched(state.name, state.tensor, target, mark_of(state.tensor)))
            else:
                now.append(piece)
        self._publish(copying=step)
        self._copier.copy(now)
        memory.clear(plan.gaps)
        memory.write(plan.index_offset, index)
        self._fly(_Done(step, slot, plan.index_offset, len(index)), later, watched, begun)

    def _fly(self, done: _Done, later: Sequence[CopyPiece], watched: Sequence[Watched], begun: float) -> None:
        """Start the deferred copies and put the guard before the next change."""
        is_audited = self._guard.is_next_audited()

        def settle(changed: Sequence[str], error: BaseException | None = None) -> None:
            if changed or error is not None:
                self._abandon(done.step, f"the copy failed: {error}" if error else f"{changed[0]} changed outside an optimizer step")
            else:
                self._link.send(done.message(self._layout_hash, self._link.generation))

        def copied(error: BaseException | None) -> None:
            # In the copier's thread. What an unaudited snapshot holds is decided now: later changes no longer reach it.
            self._publish(copying=NONE)
            if not is_audited:
                settle([item.name for item in watched if item.has_moved()], error)

        def reached(changed: Sequence[str]) -> None:
            if is_audited:
                settle(changed, ticket.error)

        ticket = self._copier.start(later, copied)
        self._guard.arm(Flight(done.step, watched, is_audited, ticket, reached, time.perf_counter() - begun))

    def _abandon(self, step: int, reason: str) -> None:
        self._settled = step
        self._link.send(Abandoned(generation=self._link.generation, step=Step(step), reason=reason))

    def _request_slots(self, observed: _Observed) -> None:
        self._plan = CapturePlan.make(observed.tensors, observed.values)
        self._granted = None
        self._link.send(SlotsRequest(generation=self._link.generation, layout_hash=self._layout_hash, capacity_bytes=self._plan.capacity_bytes))

    def _memory(self, slot: int) -> SlotMemory:
        granted = self._link.slots
        assert isinstance(granted, SlotsGranted)
        if granted is not self._granted:  # the same paths may be new files
            self._granted = granted
            self._memories = {number: SlotMemory(Path(path), granted.capacity_bytes) for number, path in enumerate(granted.paths)}
        return self._memories[slot]

    def _observe(self) -> _Observed:
        """Return the whole state of this rank, live."""
        tensors: list[StateTensor] = []
        adapter_values: list[Tree] = []
        for adapter in self._registered.adapters:
            state = adapter.observe()
            tensors += state.tensors
            adapter_values.append(state.values)
        tree = encode(
            {
                "adapters": adapter_values,
                "objects": {name: item.state_dict() for name, item in self._registered.objects.items()},
                "data": {name: stream.state_dict() for name, stream in self._registered.streams.items()},
                "rng": rng.observe(),
            },
            "",
        )
        tensors += [StateTensor(f"value{name}", tensor, is_deferred=False) for name, tensor in tree.tensors]
        return _Observed(tensors, msgspec.msgpack.encode(SlotValues(self._facts_data, tree.data)))

    def _read(self, step: Step, path: str | None) -> Snapshot:
        if path is None:
            raise RestoreMismatch(f"the agent names step {step} to restore, and no slot that holds it")
        return read_snapshot(Path(path), Expected(self._environment.run, self._environment.rank, step, self._facts))

    def _load(self, snapshot: Snapshot) -> None:
        tree: Any = snapshot.tree
        for adapter, values in zip(self._registered.adapters, tree["adapters"], strict=True):
            adapter.load(snapshot.tensors, values)
            adapter.synchronize()
        for name, item in self._registered.objects.items():
            item.load_state_dict(tree["objects"][name])
        for name, stream in self._registered.streams.items():
            stream.load_state_dict(tree["data"][name])
        rng.restore(tree["rng"])  # last: everything above may draw

    def _gather_facts(self) -> dict[str, str]:
        facts = {
            "torch": str(torch.__version__),
            "rank": str(self._environment.rank),
            "world size": str(self._environment.world_size),
            "objects": str(sorted(self._registered.objects)),
            "data": str(sorted(self._registered.streams)),
        }
        for adapter in self._registered.adapters:
            facts |= adapter.facts()
        return facts

    def _next_batch(self) -> object:
        streams = self._registered.streams
        if self._registered.has_many_streams:
            return {name: stream.next() for name, stream in streams.items()}
        return next(iter(streams.values())).next() if streams else None

    def _steps_made(self) -> int | None:
        adapters = self._registered.adapters
        return adapters[0].steps_made() if len(adapters) == 1 else None

    def _is_step_complete(self, before: int | None, count: int, accumulate: int) -> bool:
        return count >= accumulate if before is None else self._steps_made() != before

    def _publish(
        self,
        *,
        boundary: int | None = None,
        phase: Phase | None = None,
        copying: int | None = None,
        standing: Standing | None = None,
        echo_step: int | None = None,
        echo: int | None = None,
    ) -> None:
        changes = {"boundary": boundary, "phase": phase, "copying": copying, "standing": standing, "echo_step": echo_step, "echo": echo}
        with self._half_lock:
            self._half = replace(self._half, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]
            self._link.publish(self._half)


@dataclass(frozen=True, slots=True)
class _Done:
    """What is in a slot once the copies have ended."""

    step: int
    slot: int
    index_offset: int
    index_bytes: int

    def message(self, layout_hash: bytes, generation: int) -> Captured:
        return Captured(
            generation=generation,  # type: ignore[arg-type]
            step=Step(self.step),
            slot=self.slot,
            layout_hash=layout_hash,
            payload_bytes=self.index_offset + self.index_bytes,
            index_offset=self.index_offset,
            index_bytes=self.index_bytes,
        )


def init(
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    engine: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    data: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    extra: Mapping[str, Stateful] | None = None,
    guard: Literal["step", "forward"] = "step",
    trusted_optimizers: Sequence[type] = (),
) -> TrainingSession:
    """Register what a run's state is made of. Every rank, once, after wrapping, compiling and building the optimizer, before the first forward.

    Args:
        model: one module, or several by name; wrapped as they will be called.
        optimizer: one, or several by name.
        engine: a DeepSpeed engine, or several by name, instead of model and optimizer.
        scheduler: one, or several by name; with `state_dict` and `load_state_dict` of tensors and plain values.
        data: one loader, or several by name; what kinds can be resumed is in `everstep.training.data`.
        extra: whatever else the run depends on (a gradient scaler, an average of the weights, a record of losses), likewise stateful.
        guard: what the background copy is waited for: "step", the next optimizer step; "forward", the next forward, for optimizers that
            run inside backward or inside a captured CUDA graph.
        trusted_optimizers: classes outside torch.optim that keep all their state in `state` and `param_groups`.

    Returns:
        The session.

    Raises:
        CannotResume: something registered cannot be brought back; named.
        SessionMisuse: neither a model nor an engine, or ranks without a process group.
        AgentUnreachable: the agent that the environment names does not answer.
        StaleGeneration: it runs another generation.
    """
    environment = Environment.read()
    link = _link(environment)
    try:
        if environment.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise SessionMisuse("init() comes after torch.distributed.init_process_group (or deepspeed.init_distributed)")
        link.welcome()
        adapters = _adapters(_named(model), _named(optimizer), _named(engine), trusted_optimizers)
        objects = {f"scheduler/{name}" if name else "scheduler": item for name, item in _named(scheduler).items()}
        objects |= {f"extra/{name}": item for name, item in (extra or {}).items()}
        for name, item in objects.items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise CannotResume(name, f"{qualified_name(type(item))} has no state_dict and load_state_dict")
        seed = torch.initial_seed()
        streams = {
            name or "data": DataStream(f"data/{name}" if name else "data", loader, seed, environment.rank) for name, loader in _named(data).items()
        }
        registered = Registered(adapters=adapters, streams=streams, objects=objects, has_many_streams=isinstance(data, Mapping))
        session = TrainingSession(registered, link, environment, CpuCopier())
    except TrainingError as error:
        link.send(RankFault(generation=link.generation, code=error.code, message=str(error)))
        link.close()
        raise
    if guard == "forward":
        for module in (module for adapter in adapters for module in adapter.modules()):
            module.register_forward_pre_hook(lambda *_: session.fence())
    for adapter in adapters:
        adapter.prepare()
    return session


def _link(environment: Environment) -> AgentLink:
    if environment.agent_socket is None:
        return NullLink()
    hello = RankHello(job=environment.job, run=environment.run, generation=environment.generation, rank=environment.rank, pid=os.getpid())
    return UnixAgentLink(environment.agent_socket, hello)


def _named(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def _adapters(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], engines: Mapping[str, torch.nn.Module], trusted: Sequence[type]
) -> list[Adapter]:
    engines = {**engines, **{name: model for name, model in models.items() if is_engine(model)}}
    models = {name: model for name, model in models.items() if not is_engine(model)}
    adapters: list[Adapter] = [DeepSpeedAdapter(name, engine, trusted) for name, engine in engines.items()]
    if engines:
        optimizers = {}  # an engine brings its own
    if models or optimizers:
        adapters.append(_torch_adapter(models, optimizers, trusted))
    if not adapters:
        raise SessionMisuse("init() needs a model and its optimizer, or a DeepSpeed engine")
    return adapters


def _torch_adapter(models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type]) -> Adapter:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds: set[type[PlainAdapter]] = set()
    for name, model in models.items():
        for module in model.modules():
            if isinstance(module, (FullyShardedDataParallel, torch.nn.DataParallel)):
                raise CannotResume(f"model/{name}", f"{qualified_name(type(module))} is not known to come back bit for bit; use fully_shard or DDP")
            if isinstance(module, DistributedDataParallel):
                kinds.add(DDPAdapter)
            elif isinstance(module, FSDPModule):
                kinds.add(FSDPAdapter)
    if len(kinds) > 1:
        raise CannotResume("model", "DDP and fully_shard in one session are not known to come back bit for bit")
    return (kinds.pop() if kinds else PlainAdapter)(models, optimizers, trusted)
