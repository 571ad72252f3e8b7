"""--log-requests: one line per event, nothing that a client wrote unescaped, no prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest
from server_harness import run, says, serving, silent

from mamba_eagle.logs import JsonFormatter, Rarely

RID = "a\nFAKE line\x1b[31m\u2028" + "z" * 150
BODY = {
    "text": "secret prompt",
    "rid": RID,
    "sampling_params": {"stop": ["secret stop", "lo"], "temperature": 0.5, "top_k": 3},
}


def logged(caplog: pytest.LogCaptureFixture, log_prompts: bool) -> list[str]:
    async def test() -> None:
        async with serving(says("hello"), log_requests=True, log_prompts=log_prompts) as server:
            await server.post("/generate", **BODY)

    with caplog.at_level(logging.INFO, "mamba_eagle.requests"):
        run(test())
    return [record.getMessage() for record in caplog.records if "requests" in record.name]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_what_clients_send_is_escaped(log_prompts: bool, caplog: pytest.LogCaptureFixture) -> None:
    start, end = logged(caplog, log_prompts)
    for line in (start, end):
        assert line.isprintable()
        assert "a\\nFAKE line\\u001b[31m\\u2028zzz" in line
    assert "temperature=0.5, top_k=3" in start
    assert "2 stop strings" in start
    assert ("secret prompt" in start) == ("secret stop" in start) == log_prompts
    assert ('"lo"' in end) == log_prompts and "secret" not in end


def test_many_samples_have_their_lines_in_turns(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(silent, log_requests=True, max_queued_requests=500) as server:
            asked = server.post("/generate", text="a", rid="many", sampling_params={"n": 500})
            task = asyncio.ensure_future(asked)
            while server.manager.num_live < 500:
                await asyncio.sleep(0)
            assert 0 < len(caplog.records) < 100
            await server.post("/abort_request", rid="many")
            await task

    with caplog.at_level(logging.INFO, "mamba_eagle.requests"):
        run(test())


def test_json_lines_have_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    logged(caplog, log_prompts=False)
    record = [each for each in caplog.records if "requests" in each.name][-1]
    text = JsonFormatter("server").format(record)
    assert text.isascii() and text.isprintable()
    line = json.loads(text)
    assert (line["process"], line["level"], line["finish"]) == ("server", "info", "stop")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (13, 5)
    assert line["rid"].startswith("a\\nFAKE line") and line["seconds"] >= 0


def test_json_lines_have_tracebacks() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("broke",), sys.exc_info())
    line = json.loads(JsonFormatter("runner").format(record))
    assert line["message"] == "it broke" and "two\nlines" in line["exception"]


def test_lines_that_clients_cause_are_rare(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    rarely = Rarely("Invalid HTTP request", seconds=1000)
    log.addFilter(rarely)
    try:
        for _ in range(5):
            log.warning("Invalid HTTP request received.")
        log.warning("another")
    finally:
        log.removeFilter(rarely)
    assert len(caplog.records) == 2


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(says("hello"), log_requests=False) as server:
            body: dict[str, Any] = {**BODY, "rid": "r"}
            assert (await server.post("/generate", **body)).status_code == 200

    with caplog.at_level(logging.INFO):
        run(test())
    assert "secret" not in caplog.text and "requests" not in {r.name for r in caplog.records}
