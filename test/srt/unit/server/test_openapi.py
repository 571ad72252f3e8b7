"""/openapi.json and the tables of docs/http.md come from the models that read bodies."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chat_samples import HERMES
from rich_bodies import RIGHT
from server_harness import BODIES, Harness, run
from test_server_chat import chatting, ends

from mamba_eagle.core import SamplingParams, declared
from mamba_eagle.server.apis import openapi
from mamba_eagle.server.apis.generate.body import GenerateSampling
from mamba_eagle.server.apis.openai.body import CompletionBody
from mamba_eagle.server.apis.openai.chat_body import ChatBody
from mamba_eagle.server.bodies.kinds import Body, described
from mamba_eagle.server.bodies.served import Served

PAGE = Path(__file__).parents[4] / "docs/http.md"
# What the models of routes read, but only say to whom it belongs.
UNSAID = {"n", "seed", "sampling_seed"}


def field_table(model: type[Body]) -> str:
    """The fields of a body as docs/http.md shows them."""
    lines = ["| Field | May be | Default | What |", "|---|---|---|---|"]
    for name, schema in described(model)["properties"].items():
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
        lines.append(f"| `{name}` | {kinds_of(schema)} | {default} | {schema['description']} |")
    return "\n".join(lines)


def kinds_of(schema: dict[str, Any]) -> str:
    kinds = schema.get("anyOf", [schema])
    text = " or ".join(dict.fromkeys(kind.get("type", "object") for kind in kinds))
    limits = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤", "maxItems": "items ≤"}
    bounds = (
        f"{sign} {schema[name]:g}" if abs(schema[name]) < 1e6 else f"{sign} {schema[name]}"
        for name, sign in limits.items()
        if name in schema
    )
    return ", ".join([text, *bounds])


async def document(server: Harness) -> Any:
    reply = await server.client.get("/openapi.json")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_every_field_of_every_body_says_what_it_is_for() -> None:
    for path, model in BODIES.items():
        properties = described(model)["properties"]
        assert set(properties) == {
            field.alias or name for name, field in model.model_fields.items()
        }, path
        assert all(one.get("description") or "$ref" in one for one in properties.values()), path


@pytest.mark.parametrize("model", [GenerateSampling, CompletionBody, ChatBody])
def test_a_declared_parameter_is_a_field_with_its_default_and_bounds(model: type[Body]) -> None:
    properties = described(model)["properties"]
    default = SamplingParams()
    renamed = {"max_new_tokens", "min_new_tokens"} if model is not GenerateSampling else set()
    for name, (kind, parameter) in declared().items():
        if name in renamed | UNSAID:
            continue
        assert properties[name]["description"] == parameter.about
        assert model.model_fields[name].get_default(call_default_factory=True) == getattr(
            default, name
        )
        if kind in (int, float):
            least = properties[name].get("minimum", properties[name].get("exclusiveMinimum"))
            assert least is not None and not parameter.fits(least - 1)
            if "maximum" in properties[name]:
                assert parameter.fits(properties[name]["maximum"])
                assert not parameter.fits(properties[name]["maximum"] + 1)


def test_the_tables_of_the_page_are_those_of_the_models() -> None:
    page = PAGE.read_text()
    for model in (Served, GenerateSampling):
        table = field_table(model)
        assert table in page, f"docs/http.md should have this table:\n{table}"


def test_the_description_is_whole_and_right_bodies_fit_it() -> None:
    async def test() -> None:
        async with chatting(ends(HERMES), api_key="secret", root_path="/llm") as server:
            made = await document(server)  # without the key
            assert made["servers"] == [{"url": "/llm"}]
            models = made["components"]["schemas"]
            names = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(made))
            assert names and set(names) <= set(models)
            operations = [one for path in made["paths"].values() for one in path.values()]
            ids = [one["operationId"] for one in operations]
            assert len(ids) == len(set(ids))
            for path in BODIES:
                assert "requestBody" in made["paths"][path]["post"]
            served = {
                route.path.replace(":path}", "}")
                for route in server.app.state.routes
                if "POST" in route.methods
            }
            bare = {"/start_weight_update", "/start_draft_weight_update"}
            bare |= {"/flush_cache", "/stop_profile", "/reset_prefix_cache", "/sleep", "/wake_up"}
            bare |= {"/v1/files", "/v1/batches/{id}/cancel"}  # a form, and nothing
            bare |= {"/import_prefix"}  # bytes
            bare |= {"/pause", "/resume", "/continue_generation"}
            bare |= {"/get_weight_version", "/weight_version", "/update_weights_from_tensor"}
            assert served - set(BODIES) == bare  # no bodies
            for path in BODIES:
                body = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                for field in body["schema"]["properties"].values():
                    if "default" in field:
                        field = {**field, "components": made["components"]}
                        jsonschema.validate(field["default"], field)
            for path, right in RIGHT:
                body = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                schema = {**body["schema"], "components": made["components"]}
                jsonschema.Draft202012Validator.check_schema(schema)
                jsonschema.Draft202012Validator(schema).validate(right)
                top = set(right) - set(body["schema"]["properties"])
                assert not top, (path, top)

    run(test())


def test_the_description_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, describe = [], openapi.describe
    monkeypatch.setattr(openapi, "describe", lambda *given: made.append(0) or describe(*given))

    async def test() -> None:
        async with chatting(ends("x")) as server:
            first, second = await asyncio.gather(document(server), document(server))
            assert first == second == await document(server)

    run(test())
    assert len(made) == 1


def test_the_page_asks_this_server_alone() -> None:
    async def test() -> None:
        async with chatting(ends("x"), api_key="secret") as server:
            page = await server.client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "http:" not in page.text and "https:" not in page.text
            assert "innerHTML" not in page.text and "/openapi.json" in page.text

    run(test())
