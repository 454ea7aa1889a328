"""Traces of jobs for OpenTelemetry, from a request to the end of a recovery.

    trace of a job    its id is the job's RunId, so no context is stored: a recovery joins the trace of the request that
                      created the job, also days later, after a restart, and on another server
    spans             requests, changes of the job's state, messages to agents, calls to AWS, recoveries

A span contains names, ids and reasons only. Another thread exports, so tracing never delays a background loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_SECONDS = 5.0
"""Limit of one request to the collector. A server that stops waits for its last one."""


class TracingUnavailable(Exception):
    """The settings name an endpoint for traces, but the extra `otel` is not installed."""


class Tracer:
    """Exports spans with the OpenTelemetry SDK, or nothing without a provider, which the tracer owns."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider

    @property
    def is_recording(self) -> bool:
        """Whether `record` exports its spans."""
        return self._provider is not None

    def record(
        self,
        name: str,
        run_id: str,
        begun_at: float,
        ended_at: float,
        attributes: Mapping[str, str | int],
        failure: str = "",
    ) -> None:
        """Record a span, from and to Unix seconds, in the trace of a job. Without a RunId, the span is dropped.

        Names of `attributes` get the prefix `everstep.`. `failure` is empty after a success.
        """
        if self._provider is None or len(run_id) != 32:
            return
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            Status,
            StatusCode,
            TraceFlags,
            set_span_in_context,
        )

        # The parent has no span of its own. Its id is derived from the RunId, so all spans of a job are siblings.
        root = SpanContext(int(run_id, 16), int(run_id[:16], 16) or 1, is_remote=True, trace_flags=TraceFlags(1))
        span = self._provider.get_tracer("everstep").start_span(
            name,
            set_span_in_context(NonRecordingSpan(root)),
            attributes={f"everstep.{key}": value for key, value in {"run_id": run_id, **attributes}.items()},
            start_time=int(begun_at * 1e9),
        )
        if failure:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(int(max(begun_at, ended_at) * 1e9))

    def close(self) -> None:
        """Export the remaining spans, and stop the thread. Blocks for at most a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def otlp_tracer(endpoint: str, version: str) -> Tracer:
    """Return a tracer that exports to an OTLP/HTTP collector, which the caller closes. Empty `endpoint`: nothing.

    Raises TracingUnavailable if the extra `otel` is not installed.
    """
    if not endpoint:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise TracingUnavailable("--otlp-endpoint needs OpenTelemetry: pip install 'everstep[otel]'") from error
    resource = Resource.create({"service.name": "everstep-control-plane", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)
