"""A prompt that one engine has run, in another one, and sessions, by the routes of servers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import PATIENCE, need_weights

from mamba_eagle import Engine
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many apples has Tom?\n" * 4 + "Answer:"
SAMPLING = {"max_new_tokens": 24, "temperature": 0}
KEY = {"x-api-key": "admin"}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    need_weights(EMBEDDED_MODEL, EMBEDDED_HEADS["EAGLE"])
    settings: dict[str, Any] = {"device": "cpu", "max_running_requests": 2, "in_process": True}
    settings |= {"speculative_algorithm": "EAGLE", "host_cache_gb": 0.5, "admin_api_key": "admin"}
    settings["speculative_adaptive"] = False
    with Engine(**settings) as one, Engine(**settings) as other:
        yield one, other


def call(engine: Engine, method: str, path: str, **arguments: Any) -> httpx.Response:
    """To the engine's HTTP application, without a socket."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=engine._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **arguments)

    return engine._wait(send())


def post(engine: Engine, path: str, **arguments: Any) -> httpx.Response:
    return call(engine, "POST", path, **arguments)


def test_one_runs_the_prompt_and_the_other_one_answers(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    body = {"text": PROMPT, "sampling_params": SAMPLING}
    exported = post(prefill, "/export_prefix", json=body, headers=KEY)
    assert exported.status_code == 200, exported.text
    tokens = int(exported.headers["x-prefix-tokens"])
    torn = post(decode, "/import_prefix", content=exported.content[:-1], headers=KEY)
    assert torn.status_code == 400 and "whole" in torn.text
    imported = post(decode, "/import_prefix", content=exported.content, headers=KEY)
    assert imported.json() == {"success": True, "tokens": tokens}
    reply = decode.generate(PROMPT, SAMPLING)
    own = decode.generate(PROMPT, SAMPLING, cache_salt="of its own")
    assert reply["text"] == own["text"]
    facts, others = reply["meta_info"], own["meta_info"]
    assert facts["cached_tokens"] == tokens == facts["prompt_tokens"] - 1
    assert others["cached_tokens"] == 0
    assert facts["spec_verify_ct"] == others["spec_verify_ct"] < facts["completion_tokens"]


def test_a_prefix_is_read_from_the_other_ones_memory(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    body = {"text": "By another way. " + PROMPT, "sampling_params": SAMPLING}
    if importlib.util.find_spec("nixl_cu13") is None:
        refused = post(prefill, "/export_prefix?transport=nixl", json=body, headers=KEY)
        assert refused.status_code == 400 and "pip install" in refused.text
        pytest.skip("needs the extra nixl")
    offered = post(prefill, "/export_prefix?transport=nixl", json=body, headers=KEY)
    assert offered.status_code == 200 and len(offered.content) < 10_000, offered.text
    json = {**KEY, "content-type": "application/json"}
    foreign = post(decode, "/import_prefix", content=b'{"agent": 3}', headers=json)
    assert foreign.status_code == 400 and "transport=nixl" in foreign.text
    taken = post(decode, "/import_prefix", content=offered.content, headers=json)
    tokens = int(offered.headers["x-prefix-tokens"])
    assert taken.json() == {"success": True, "tokens": tokens}, taken.text
    reply = decode.generate(body["text"], SAMPLING)
    assert reply["meta_info"]["cached_tokens"] == tokens
    assert reply["text"] == decode.generate(body["text"], SAMPLING, cache_salt="own")["text"]


def test_an_unknown_transport_is_refused(engines: tuple[Engine, Engine]) -> None:
    refused = post(engines[0], "/export_prefix?transport=mail", json={"text": "x"}, headers=KEY)
    assert refused.status_code == 400 and "must be nixl" in refused.text


def test_both_routes_take_the_admin_key(engines: tuple[Engine, Engine]) -> None:
    for path in ("/export_prefix", "/import_prefix"):
        assert post(engines[0], path, json={"text": PROMPT}).status_code == 401


def test_a_session_is_opened_named_and_closed_once(engines: tuple[Engine, Engine]) -> None:
    one = engines[0]

    def pinned() -> int:
        return int(call(one, "GET", "/cache").json()["kv_slots"]["pinned"])

    name = post(one, "/open_session", json={"capacity_of_str_len": 1000}).json()
    again = post(one, "/open_session", json={"session_id": name})
    assert again.status_code == 400 and "open already" in again.text
    reply = one.generate(PROMPT, SAMPLING, session_id=name)["meta_info"]
    tokens = reply["prompt_tokens"] + reply["completion_tokens"] - 1
    deadline = time.monotonic() + PATIENCE
    while pinned() != tokens and time.monotonic() < deadline:
        pass  # the output is in the cache a step after it is answered
    assert pinned() == tokens
    assert post(one, "/close_session", json={"session_id": name}).json() == {"success": True}
    assert pinned() == 0
    assert post(one, "/close_session", json={"session_id": name}).status_code == 400
    one.generate(PROMPT, SAMPLING, session_id=name)  # no longer open: let through
    assert pinned() == 0
