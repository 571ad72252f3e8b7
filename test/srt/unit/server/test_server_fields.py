"""No field of an API is accepted and ignored, unless docs/clients.md says that it has no effect.

rigs/client_fields.json: the fields that the clients' own types declare, by source and route.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server_harness import BODIES, run, says, serving

from mamba_eagle.server.apis.generate.body import GenerateSampling
from mamba_eagle.server.bodies.kinds import Body, read
from mamba_eagle.server.errors import RequestError

DECLARED = json.loads((Path(__file__).parents[2] / "rigs/client_fields.json").read_text())
PAGE = (Path(__file__).parents[4] / "docs/clients.md").read_text()
MODELS: dict[str, type[Body]] = {**BODIES, "sampling_params": GenerateSampling}
CASES = [
    pytest.param(MODELS[route], names.split(), id=f"{source}{route}")
    for source, routes in DECLARED.items()
    for route, names in routes.items()
    if route != "version"
]


def becomes(model: type[Body], name: str) -> str:
    if name in model.FIELDS:
        return "served"
    try:
        read(model, {name: {"value": 1}})
    except RequestError as error:
        if error.param == name or str(error).startswith(f"{name} = "):
            return "refused"
    return "ignored"


@pytest.mark.parametrize("model, names", CASES)
def test_a_field_of_a_client_is_served_or_refused_or_listed_as_harmless(
    model: type[Body], names: list[str]
) -> None:
    ignored = [name for name in names if becomes(model, name) == "ignored"]
    assert set(ignored) <= model.HARMLESS
    assert [name for name in ignored if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_all_that_is_harmless_is_on_the_page_and_is_no_field(model: type[Body]) -> None:
    assert [name for name in model.HARMLESS if f"`{name}`" not in PAGE] == []
    assert not model.HARMLESS & (model.FIELDS | model.REFUSED.keys())


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "a", "return_logprobs": True}, "did you mean return_logprob?"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"max_tokens": 2}},
        "sampling_params.max_tokens",
    ),
    ("/generate", {"text": "a", "temperature": 0}, "belongs in sampling_params"),
    ("/v1/completions", {"prompt": "a", "temprature": 0}, "did you mean temperature?"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage"),
    ("/v1/embeddings", {"input": "a", "lora_path": "b"}, "as model"),
    ("/v1/embeddings", {"input": "a", "\x00\u2028" + "k" * 10**6: 1}, "is not a field"),
]


def test_an_unknown_field_is_named_unless_the_server_accepts_any() -> None:
    async def test() -> None:
        async with serving(says("b")) as server:
            for path, body, said in UNKNOWN:
                reply = await server.post(path, **body)
                assert reply.status_code == 400 and said in reply.text, reply.text
        async with serving(says("b"), allow_unknown_fields=True) as server:
            for path, body, said in UNKNOWN:
                reply = await server.post(path, **body)
                assert reply.status_code == (
                    400 if "as model" in said or "belongs" in said else 200
                )

    run(test())


def test_another_model_is_not_found() -> None:
    async def test() -> None:
        async with serving(says("b"), served_model_name="mine") as server:
            for name, status in (("mine", 200), ("default", 200), ("", 200), ("gpt-4", 404)):
                reply = await server.post("/v1/completions", prompt="a", model=name)
                assert reply.status_code == status, reply.text
            assert reply.json()["error"]["param"] == "model" and "mine" in reply.text

    run(test())
