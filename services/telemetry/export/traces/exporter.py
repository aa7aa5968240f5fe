"""Spans by OTLP over HTTP, with the SDK of OpenTelemetry."""

from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rolloutmq.services.telemetry.export.traces.spans import Span

TIMEOUT_S: Final = 10.0
"""Longest time of the receiver for one request, its retries included."""
SPANS: Final = 512
"""Most spans of a request."""
_NS: Final = 1_000_000_000
_SCOPE: Final = InstrumentationScope("rolloutmq")


class SpanExporter:
    """Sends finished spans.

    Args:
        url: Receiver.
        run: Name of the run.
    """

    def __init__(self, url: str, run: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": "rolloutmq", "service.instance.id": run})

    def send(self, spans: Sequence[Span]) -> bool:
        """Send spans, and return whether the receiver took them. Blocks for up to `TIMEOUT_S` a request."""
        taken = True
        for start in range(0, len(spans), SPANS):
            batch = [self._readable(span) for span in spans[start : start + SPANS]]
            taken &= self._exporter.export(batch) is SpanExportResult.SUCCESS
        return taken

    def close(self) -> None:
        """End the connection."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.CLIENT if span.name == "call" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.problem) if span.problem else Status(StatusCode.UNSET),
            start_time=int(span.began_at * _NS),
            end_time=int(span.ended_at * _NS),
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
