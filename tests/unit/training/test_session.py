"""Tests what a session writes to its page and what it measures, with an agent that sends no answers."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from everstep.protocol.ids import Generation, JobName, Rank, RunId
from everstep.protocol.rank_messages import Phase, RankHalf, RankStanding
from everstep.training import session as sessions
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.agent_link import NullLink
from everstep.training.copier import CpuCopier
from everstep.training.data import DataStream
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.gloo_threads import settle_gloo_threads
from everstep.training.guard import Guard
from everstep.training.resume_changes import FUNCTIONS_EVERY
from everstep.training.script import Environment
from everstep.training.session import TrainingSession
from everstep.training.state import RankState


class Link(NullLink):
    """A link that records the published messages."""

    def __init__(self) -> None:
        self.published: list[RankHalf] = []
        self.handler: Callable[[], None] | None = None
        """Called once during the next `publish`, as a signal handler could be."""

    def publish(self, half: RankHalf) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        self.published.append(half)


class AgentLink(Link):
    has_agent = True


def adapter_of(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> PlainAdapter:
    """Return the adapter of a small model with this optimizer."""
    model = torch.nn.Linear(2, 2)
    return PlainAdapter({"": model}, {"": optimizer(model.parameters())})  # type: ignore[call-arg]


_sessions: list[TrainingSession] = []
"""Sessions of the running test."""


@pytest.fixture(autouse=True)
def _close_sessions() -> Iterator[None]:
    """Close the test's sessions, also after a failure, because an open session changes the results of later tests."""
    yield
    while _sessions:
        _sessions.pop().close()


def session_of(
    link: Link,
    adapter: PlainAdapter | None = None,
    *,
    stream: DataStream | None = None,
    world_size: int = 1,
    local_rank: int = 0,
    **options: Any,
) -> TrainingSession:
    environment = Environment(
        Rank(local_rank),
        world_size,
        None,
        JobName("job"),
        RunId("ab" * 16),
        Generation(0),
        1.0,
        30.0,
        local_rank=local_rank,
    )
    streams = {} if stream is None else {"data": stream}
    state = RankState([adapter or adapter_of()], {}, streams, environment)
    _sessions.append(TrainingSession(state, link, environment, CpuCopier(), **options))
    return _sessions[-1]


def test_what_a_signal_handler_publishes_in_the_middle_of_something_else_stays() -> None:
    link = Link()
    session = session_of(link)
    link.handler = session.close
    with session.phase("eval", limit_seconds=7):
        assert link.published[-1] == RankHalf(0, phase=Phase.CLOSE, standing=RankStanding.CLOSED)


@pytest.mark.parametrize(("world_size", "local_rank", "profiler_count"), [(1, 0, 0), (4, 0, 1), (4, 1, 0)])
def test_the_network_is_profiled_by_the_rank_that_speaks_for_its_node(
    world_size: int, local_rank: int, profiler_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(sessions, "NetworkProfiler", lambda *_: made.append(None))
    session_of(AgentLink(), world_size=world_size, local_rank=local_rank).close()
    assert len(made) == profiler_count


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_step_that_must_be_one_graph_is_refused_at_its_first_call_with_the_reason() -> None:
    """A compiled Adafactor step with `fullgraph` is refused at its first call.

    The test uses Adafactor, because the steps of most other optimizers of torch never compile to a single graph.
    """
    torch._dynamo.reset()
    adapter = adapter_of(torch.optim.Adafactor)
    session_of(Link(), adapter)
    optimizer = adapter.optimizers()[""]
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported,
        match=r"reason: Everstep waits here for the copy of the state: compile optimizer\.step",
    ):
        step()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_check_of_an_unregistered_optimizer_in_one_graph_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    adapter = adapter_of(torch.optim.SGD)
    session_of(Link(), adapter)
    (model,) = adapter.modules()
    forgotten = torch.optim.Adafactor(model.parameters())
    step = torch.compile(forgotten.step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reason: Everstep checks here whether this optimizer"):
        step()


def test_a_container_of_registered_optimizers_may_step() -> None:
    """An optimizer that only calls registered optimizers may step, although it is not registered itself.

    Such a container, as in torchtitan, has the parameters of its optimizers in `param_groups`.
    """

    class Container(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
            self.optimizers = optimizers
            super().__init__(model.parameters(), {})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for optimizer in self.optimizers:
                optimizer.step()

    adapter = adapter_of(torch.optim.SGD)
    session_of(Link(), adapter)
    (registered,), (model,) = adapter.optimizers().values(), adapter.modules()
    Container(model, registered).step()
    for refused in (Container(model, registered, torch.optim.SGD(model.parameters())), Container(model)):
        with pytest.raises(CannotResume, match="was not given this optimizer"):
            refused.step()


# torch imports a module with this warning when it compiles
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor])
def test_the_guard_waits_in_every_compiled_step(
    optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    adapter = adapter_of(optimizer)
    reached: list[None] = []
    monkeypatch.setattr(Guard, "reach", lambda _: reached.append(None))
    session_of(Link(), adapter)
    (model,) = adapter.modules()
    step = torch.compile(adapter.optimizers()[""].step, backend="eager")
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        step()
    assert len(reached) == 3


@pytest.mark.parametrize("place", ["alone", "under an agent", "closed"])
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("loss", "low", "str is not a real number"),
        ("loss", None, "NoneType is not a real number"),
        ("loss", 1j, "complex is not a real number"),
        ("loss", torch.ones(2), r"of shape \[2\]"),
        ("loss", torch.ones((), dtype=torch.complex64), "complex64"),
        ("everstep/loss", 1.0, "names that begin with everstep/"),
        ("x" * 256, 1.0, "1 to 255 characters"),
        ("", 1.0, "1 to 255 characters"),
    ],
)
def test_log_refuses_the_same_values_everywhere(place: str, name: str, value: Any, reason: str) -> None:
    """`log` rejects the same values with an agent, without an agent and after `close`.

    A trial run without an agent therefore raises each error that would end a long run with an agent.
    """
    session = session_of(AgentLink() if place == "under an agent" else Link())
    if place == "closed":
        session.close()
    with pytest.raises(SessionMisuse, match=reason):
        session.log(**{name: value})
    session.log(loss=float("nan"), tensor=torch.ones(1, requires_grad=True), whole=3)


def test_the_page_keeps_the_moment_of_the_first_step_that_a_launch_made() -> None:
    link = Link()
    moments = iter([7.5, 9.0])
    session = session_of(link, clock=lambda: next(moments, 10.0))
    session.restore()
    assert link.published[-1].first_passed == 0
    for boundary in (1, 2):
        session.boundary()
        assert (link.published[-1].boundary, link.published[-1].first_passed) == (boundary, 7_500_000)


def test_the_page_counts_first_passes_over_the_data_and_changes_of_modules_and_groups() -> None:
    link, model = Link(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adapter = PlainAdapter({"": model}, {"": optimizer})
    session = session_of(link, adapter, stream=DataStream("data", [torch.zeros(1)] * 2, 0))
    session.restore()

    def change(name: str) -> None:
        if name == "module":
            model[1] = torch.nn.Linear(2, 2)
            adapter.observe()  # as a snapshot does
        if name == "group":
            optimizer.add_param_group({"params": list(model[1].parameters())})

    counts = []
    changes = iter(("", "", "", "", "", "module", "", "group", ""))
    for _ in session.batches(until_step=9):
        change(next(changes))
        counts.append(link.published[-1].resume_revision)
    assert [*counts, link.published[-1].resume_revision] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]


class Activated(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.activation: object = torch.relu


def _hook(*_: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_forward_hook(_hook),
        lambda model: model.weight.register_hook(lambda gradient: gradient),
        lambda model: setattr(model, "activation", torch.tanh),
        lambda model: setattr(model, "forward", lambda inputs: inputs),
    ],
)
def test_the_page_counts_a_change_of_hooks_and_functions_once(change: Callable[[Activated], object]) -> None:
    link, model = Link(), Activated()
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
    session = session_of(link, adapter)
    session.restore()
    for step in range(1, 3 * FUNCTIONS_EVERY):
        if step == 2:
            change(model)
        model.register_forward_pre_hook(_hook).remove()
        session.boundary()
        assert link.published[-1].resume_revision == (step > FUNCTIONS_EVERY)


def test_a_restart_in_a_later_pass_over_the_data_is_no_change() -> None:
    link, stream = Link(), DataStream("data", [torch.zeros(1)] * 2, 0)
    session = session_of(link, stream=stream)
    stream.epoch = 1  # as a restore sets it
    session.restore()
    session.boundary()
    assert link.published[-1].resume_revision == 0


def test_a_process_with_a_session_waits_for_gloos_threads_also_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []

    def unregister(registered: Callable[[], object]) -> None:
        at_exit[:] = [each for each in at_exit if each != registered]

    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", unregister)
    session_of(Link()).close()
    assert at_exit == [settle_gloo_threads]
