"""/openapi.json says what the parsers read: no field less, no field more."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
from chat_samples import HERMES
from rich_bodies import RIGHT
from server_harness import Harness, run
from test_server_chat import chatting, ends

from mamba_eagle.server import anthropic_body
from mamba_eagle.server.chat_translation import ChatBody
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.openapi import BODIES

KINDS = {
    "integer": "integer",
    "number": "number",
    "flag": "boolean",
    "text": "string",
    "texts": "string",
    "integers": "array",
    "object": "object",
    "raw": "",
}
# Read, but of no consequence: for messages alone, or where another route has the field.
IDLE = {
    ("/generate", "sampling_params.response_format.type"),
    ("/v1/completions", "max_completion_tokens"),
}
Reads = dict[str, set[str]]  # paths, and the kinds as which they were read


@contextmanager
def recorded(reads: Reads) -> Iterator[None]:
    """What is read of bodies, but not of the chats that other bodies are translated to."""
    patch = pytest.MonkeyPatch()
    inside = [0]

    def watch(name: str) -> None:
        original = getattr(Fields, name)

        def read(self: Fields, field: str, *arguments: Any) -> Any:
            if not inside[0]:
                path = re.sub(r"\[\d+\]", "[]", self.where + field)
                reads[path.replace("sampling_params[]", "sampling_params")].add(KINDS[name])
            return original(self, field, *arguments)

        patch.setattr(Fields, name, read)

    def leave_out(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            inside[0] += 1
            try:
                return original(*arguments)
            finally:
                inside[0] -= 1

        patch.setattr(owner, name, call)

    with patch.context():
        for name in KINDS:
            watch(name)
        leave_out(ChatBody, "parse")
        leave_out(anthropic_body, "render_chat")
        try:
            yield
        finally:
            patch.undo()


def flat(schema: dict[str, Any], models: dict[str, Any], path: str = "") -> dict[str, set[str]]:
    """Paths of all fields that are declared, with the kinds that each may have. What may hold any
    fields has the path ``*`` below it."""
    made: dict[str, set[str]] = defaultdict(set)
    if "$ref" in schema:
        return flat(models[schema["$ref"].rsplit("/", 1)[1]], models, path)
    if path and "type" in schema:
        made[path].add(schema["type"])
    if path and "enum" in schema:
        made[path].add("string")
    parts = [(inner, path) for inner in schema.get("anyOf", []) + schema.get("allOf", [])]
    parts += [(inner, f"{path}.{name}".lstrip(".")) for name, inner in _properties(schema)]
    if "items" in schema:
        parts.append((schema["items"], f"{path}[]"))
    if schema.get("type") == "object" and "properties" not in schema:
        made[f"{path}.*"].add("")
    for inner, own in parts:
        made[own]  # declared, whatever its kind
        for name, kinds in flat(inner, models, own).items():
            made[name] |= kinds
    return made


def _properties(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(schema.get("properties", {}).items())


def declares(declared: dict[str, set[str]], path: str) -> bool:
    heads = [path[:end] for end in range(len(path)) if path[end] in ".["]
    return path in declared or any(f"{head}.*" in declared for head in heads)


async def document(server: Harness) -> Any:
    reply = await server.client.get("/openapi.json")
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(server: Harness, path: str, body: dict[str, Any], name: str) -> bool:
    """Whether a field's presence is an error that names it."""
    *outer, name = name.split(".")
    for value in (["x"], "x", True):
        wrong = {**body, name: value}
        if outer:
            wrong = {**body, outer[0]: {**body.get(outer[0], {}), name: value}}
        reply = await server.post(path, **wrong)
        if reply.status_code != 400 or name not in reply.text:
            return False
    return True


def test_the_fields_of_each_route_are_those_that_its_parser_reads() -> None:
    async def test() -> None:
        settings = {"schedule_policy": "priority", "max_running_requests": 8}
        async with chatting(ends(HERMES), **settings) as server:
            models = (await document(server))["components"]["schemas"]
            bodies = [(path, right) for path, right in RIGHT if path in BODIES]
            assert {path for path, _ in bodies} == set(BODIES) - {"/v1/tokenize", "/v1/detokenize"}
            reads: dict[str, Reads] = defaultdict(lambda: defaultdict(set))
            for path, right in bodies:
                right = {name: value for name, value in right.items() if name != "thinking_budget"}
                with recorded(reads[path]):
                    reply = await server.post(path, **right)
                assert reply.status_code == 200, (path, reply.text)
            problems = []
            for path, own in reads.items():
                declared = flat(BODIES[path], models)
                for name, kinds in own.items():
                    if (path, name) in IDLE:
                        continue
                    if not declares(declared, name):
                        right = next(right for at, right in bodies if at == path)
                        if not await refused(server, path, right, name):
                            problems.append((path, name, "is not declared"))
                        continue
                    known = declared.get(name, set())
                    if known and not kinds - {""} <= known:
                        problems.append((path, name, kinds, known))
                tops = {name for name in declared if re.fullmatch(r"(sampling_params\.)?\w+", name)}
                problems += [(path, name, "is never read") for name in tops - set(own)]
            assert not problems, "\n".join(map(str, problems))

    run(test())


def test_the_description_is_whole_and_right_bodies_fit_it() -> None:
    async def test() -> None:
        async with chatting(ends("x"), api_key="secret", root_path="/llm") as server:
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
            assert served - set(BODIES) == {"/flush_cache"}  # which takes no body
            for path, right in RIGHT:
                body = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                schema = {**body["schema"], "components": made["components"]}
                jsonschema.Draft202012Validator.check_schema(schema)
                jsonschema.Draft202012Validator(schema).validate(right)

    run(test())


def test_the_page_asks_this_server_alone() -> None:
    async def test() -> None:
        async with chatting(ends("x"), api_key="secret") as server:
            page = await server.client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "http:" not in page.text and "https:" not in page.text
            assert "innerHTML" not in page.text and "/openapi.json" in page.text

    run(test())
