"""Adapters over HTTP: who may load them, which names choose them, what is listed."""

from __future__ import annotations

from typing import Any

import pytest
from server_harness import run, says, serving

from mamba_eagle.message import Generate, LoadAdapter

LOAD = {"lora_name": "sums", "lora_path": "/adapters/sums"}
ADMIN = {"x-api-key": "admin"}


def adapters_asked(server: Any) -> list[str]:
    return [item.adapter for item in server.engine.received if isinstance(item, Generate)]


def test_a_loaded_adapter_is_listed_and_chosen_by_its_name() -> None:
    async def test() -> None:
        async with serving(says("x"), lora_modules=("first=/adapters/first",)) as server:
            reply = await server.post("/load_lora_adapter", **LOAD)
            assert reply.json()["loaded_adapters"] == {
                "first": "/adapters/first",
                "sums": "/adapters/sums",
            }
            models = (await server.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in models[1:]] == ["first", "sums"]
            assert models[2]["root"] == "/adapters/sums"
            assert models[2]["parent"] == models[0]["id"]
            assert (await server.client.get("/v1/models/sums")).json() == models[2]
            for path, body in (
                ("/v1/completions", {"prompt": "hello", "model": "sums"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}],
                                          "model": "sums"}),
                ("/v1/completions", {"prompt": "hello", "model": "default"}),
                ("/generate", {"text": "hello", "lora_path": "first"}),
                ("/generate", {"text": ["a", "b"], "lora_path": ["sums", None]}),
                ("/generate", {"text": "hello"}),
            ):  # fmt: skip
                assert (await server.post(path, **body)).status_code == 200, path
            assert adapters_asked(server) == ["sums", "sums", "", "first", "sums", "", ""]

            assert (await server.post("/unload_lora_adapter", lora_name="sums")).status_code == 200
            assert (await server.client.get("/v1/models/sums")).status_code == 404
            reply = await server.post("/generate", text="hello", lora_path="sums")
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert 'lora_path = "sums": is not loaded; loaded adapters: ["first"]' in message

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        ("/load_lora_adapter", {"lora_name": "sums"}, "lora_path = null"),
        ("/load_lora_adapter", {**LOAD, "lora_name": ""}, "must be a name of its own"),
        ("/load_lora_adapter", {**LOAD, "lora_name": "default"}, "must be a name of its own"),
        ("/v1/load_lora_adapter", {**LOAD, "lora_path": "/wrong"}, "its shapes are wrong"),
        ("/unload_lora_adapter", {"lora_name": "sums"}, "is not loaded"),
        ("/v1/unload_lora_adapter", {}, "lora_name = null"),
        ("/generate", {"text": "a", "lora_path": ["x", "y"]}, "2 entries for 1 prompts"),
    ],
)
def test_what_is_refused_changes_nothing(path: str, body: dict[str, Any], remedy: str) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            reply = await server.post(path, **body)
            assert reply.status_code == 400
            assert remedy in reply.json()["error"]["message"]
            assert len((await server.client.get("/v1/models")).json()["data"]) == 1

    run(test())


@pytest.mark.parametrize(
    ("flags", "headers", "status"),
    [
        ({}, {}, 200),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"host": "0.0.0.0", "api_key": "key"}, {"x-api-key": "key"}, 403),
        ({"admin_api_key": "admin"}, {}, 401),
        ({"host": "0.0.0.0", "admin_api_key": "admin"}, ADMIN, 200),
    ],
)
def test_who_reaches_the_server_from_elsewhere_needs_the_admin_key(
    flags: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    async def test() -> None:
        async with serving(says("x"), **flags) as server:
            reply = await server.client.post("/load_lora_adapter", json=LOAD, headers=headers)
            assert reply.status_code == status
            loaded = [item for item in server.engine.received if isinstance(item, LoadAdapter)]
            assert len(loaded) == (status == 200)

    run(test())
