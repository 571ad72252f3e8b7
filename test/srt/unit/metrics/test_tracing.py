"""Spans arrive at a collector, under the span of whoever asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_harness import run, says, serving

from mamba_eagle.metrics.tracing import Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.received.append(ExportTraceServiceRequest.FromString(body))  # type: ignore
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_has_its_spans(collector: HTTPServer) -> None:
    tracer = Tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", "tiny")

    async def test() -> None:
        async with serving(says("hello")) as server:
            server.manager.recorder.tracer = tracer  # type: ignore[attr-defined]
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            body = {"text": "hi", "rid": "mine", "sampling_params": {"n": 2}}
            reply = await server.client.post("/generate", json=body, headers=headers)
            assert reply.status_code == 200

    run(test())
    tracer.close()
    spans = [
        span
        for request in collector.received  # type: ignore[attr-defined]
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    roots = [span for span in spans if span.name == "generate"]
    assert len(roots) == 2 and len(spans) == 8
    for root in roots:
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
        values = {each.key: each.value for each in root.attributes}
        assert values["gen_ai.usage.output_tokens"].int_value == 5
        assert values["gen_ai.response.id"].string_value.startswith("mine")
        parts = [span for span in spans if span.parent_span_id == root.span_id]
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        times = [parts[0].start_time_unix_nano, *[part.end_time_unix_nano for part in parts]]
        assert times == sorted(times)
        assert (times[0], times[-1]) == (root.start_time_unix_nano, root.end_time_unix_nano)
