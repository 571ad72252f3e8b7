"""OpenTelemetry spans of requests: one per sample, with queue, prefill and decode inside.

Imported with --otlp-traces-endpoint only, since its packages are an extra. Spans are made when a
sample ends, of times that are measured anyway, and sent by a thread of the exporter. Attribute
names are those of OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mamba_eagle import __version__

if TYPE_CHECKING:
    from mamba_eagle.tokenizer.sample import Sample

NANO = 1_000_000_000


class Tracer:
    """Sends spans to a collector, over HTTP."""

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint: such as http://localhost:4318/v1/traces."""
        resource = Resource.create({"service.name": "mamba-eagle", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("mamba_eagle")
        self._model = model

    def ended(self, sample: Sample) -> None:
        """The spans of a sample that has just ended."""
        live = sample.request
        caller = TraceContextTextMapPropagator().extract({"traceparent": live.trace_parent})
        start, end = live.arrival, sample.finish_time
        span = self._tracer.start_span(
            "generate", caller, start_time=_ns(start), attributes=self._attributes(sample)
        )
        inside = set_span_in_context(span)
        first = sample.first_token_time or end
        admitted = min(start + sample.last.queue_time, first)
        for name, begin, until in (
            ("queue", start, admitted),
            ("prefill", admitted, first),
            ("decode", first, end),
        ):
            part = self._tracer.start_span(name, inside, start_time=_ns(begin))
            part.end(_ns(until))
        span.end(_ns(end))

    def _attributes(self, sample: Sample) -> dict[str, Any]:
        sampling, counters = sample.prompt.sampling, sample.last
        assert sample.finish is not None
        known = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": sample.rid[:256],
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": len(sample.prompt.token_ids),
            "gen_ai.usage.output_tokens": len(sample.output_ids),
            "gen_ai.response.finish_reasons": [sample.finish.kind],
            "mamba_eagle.cached_tokens": counters.cached_tokens,
        }
        if counters.verify_steps:
            known["mamba_eagle.verify_steps"] = counters.verify_steps
        return known

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * NANO)
