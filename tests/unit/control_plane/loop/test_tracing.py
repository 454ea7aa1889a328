"""The trace of a job's RunId contains its request, its launches, calls to AWS and recoveries."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from control_plane.core.states import JobState
from control_plane.loop.runner import Runner
from control_plane.tracing import Tracer, TracingUnavailable, otlp_tracer
from everstep.protocol.agent_messages import NodeFault
from tests.sim.world import World


def recording() -> tuple[Tracer, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider), exporter


async def test_a_recovery_is_in_the_trace_of_the_jobs_run_also_after_a_restart(world: World) -> None:
    tracer, exporter = recording()
    start_server = world.start_server

    def restart() -> None:
        start_server()
        world.context = replace(world.context, tracer=tracer)
        world.runner = Runner(world.context)

    restart()
    world.submit()
    await world.running()
    await world.train(10)
    run_id = world.job().run_id
    assert [span.name for span in exporter.get_finished_spans()].count("send Prepare") == 4
    exporter.clear()
    restart()
    world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(2)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {run_id}
    names = [span.name for span in spans]
    assert {"job preparing", "send HaltRanks", "send Prepare", "send Load", "send Start", "recovery"} <= {*names}
    assert names.count("send Prepare") == 4, "a repeated message is recorded once"
    recovery = next(span for span in spans if span.name == "recovery")
    assert recovery.attributes["everstep.cause"] == "rank_exit"
    assert recovery.start_time == int(world.incidents()[0].failed_at.timestamp() * 1e9)
    tracer.close()


async def test_a_call_to_aws_about_a_faulty_node_is_in_the_trace_of_its_job(world: World) -> None:
    tracer, exporter = recording()
    world.context = replace(world.context, tracer=tracer)
    world.runner = Runner(world.context)
    world.submit()
    await world.running()
    await world.train(10)
    faulty = world.team()[1]
    faulty.node_faults = (NodeFault(code="gpu_lost", message="a GPU is lost", is_permanent=True),)
    await world.until(lambda: world.is_stopped)
    world.finish()
    aws = {"TerminateInstanceInAutoScalingGroup", "RebootInstances"}
    await world.until(lambda: any(span.name in aws for span in exporter.get_finished_spans()), 100)
    call = next(span for span in exporter.get_finished_spans() if span.name in aws)
    assert call.attributes["everstep.node_id"] == faulty.node_id
    assert f"{call.context.trace_id:032x}" == world.job().run_id
    tracer.close()


def test_a_failure_is_an_error_and_a_span_without_a_run_is_dropped() -> None:
    tracer, exporter = recording()
    tracer.record("call", "a" * 32, 1.0, 2.0, {}, "throttled")
    tracer.record("call", "", 1.0, 2.0, {})
    (span,) = exporter.get_finished_spans()
    assert (span.status.description, span.start_time, span.end_time) == ("throttled", 10**9, 2 * 10**9)
    tracer.close()


def test_without_an_endpoint_nothing_is_recorded() -> None:
    assert type(otlp_tracer("", "1")) is Tracer
    assert not Tracer().is_recording


def test_an_endpoint_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match=r"everstep\[otel\]"):
        otlp_tracer("http://127.0.0.1:4318", "1")
