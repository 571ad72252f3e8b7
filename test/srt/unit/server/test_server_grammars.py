"""Constraints in bodies: every spelling, and every refusal.

Which texts a grammar takes is asked of llguidance itself; what the runner makes of it is tested in
test_runner_grammars.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_harness import TOKENIZER, Harness, run, says, serving

from mamba_eagle.constrain.vocabulary import Vocabulary, tokenizer_json
from mamba_eagle.message import Generate
from mamba_eagle.server.bodies import grammars

VOCABULARY = Vocabulary(tokenizer_json(TOKENIZER.hf), 300, [2])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "a" [0-9]+ | "b"'
TAG = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            },
            {"begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"},
        ],
    },
}


def takes(grammar: str, text: str) -> bool:
    """Whether the text is complete under the grammar."""
    matcher = VOCABULARY.matcher(grammar)
    tokens = VOCABULARY.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# (parameters, texts that fit, texts that do not); the same in sampling_params and on OpenAI routes
SPELLINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": "a/b[/]\\d\n"}, ["a/b/7\n"], ["a/b/7", "x"]),
    ({"json_schema": SCHEMA}, ['{"a":1}', '{"a": 1}'], ["{}", '{"a":"x"}', "1", '{ "a":1}']),
    (
        {"json_schema": SCHEMA, "guided_whitespace_pattern": "[ \n]*"},
        ['{\n "a" : 1 }'],
        ['{\t"a":1}'],
    ),
    (
        {"json_schema": "$$ANY$$"},
        ['{"x": [1, 2]}'],
        ['{"x":  [1]}', '{"x": [1 ]}', '{"x": [1,\n2]}'],
    ),
    ({"json_schema": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    ({"json_schema": "$$ANY$$"}, ["{}", '{"x":[1]}'], ["[]", "1"]),
    ({"json_schema": True}, ["1", "[]", '"x"'], ["x"]),
    ({"ebnf": GBNF}, ["a12", "b"], ["a", "c"]),
    ({"ebnf": 'start: "x" /[0-9]/'}, ["x1"], ["x"]),
    ({"choice": ["yes", 'n"o\\', "ü\n"]}, ["yes", 'n"o\\', "ü\n"], ["ye", "no"]),
    ({"structural_tag": TAG}, ["free", "a <f=a>1</f> b"], ["<f=b>", "<f=a>x</f>"]),
    ({"structural_tag": json.dumps(FORMAT)}, ["free", "<f=a>1</f><f=b>z</f>"], ["<f=c>"]),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, ['{"a":1}'], ['{ "a":1}']),
    ({"guided_regex": "[ab]"}, ["a"], ["c"]),
    ({"guided_choice": ["a", "b"]}, ["a"], ["c"]),
    ({"guided_grammar": GBNF}, ["b"], ["c"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        ['{"a":1}'],
        ['{"a": 1}'],
    ),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"regex": "[ab]", "json": None}}, ["a"], ["c"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["a"], ["c"]),
    ({"structured_outputs": {"grammar": GBNF}}, ["b"], ["c"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ["<f=a>1</f>"], ["<f=b>"]),
]
RESPONSE_FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "json_object"}, ["{}", '{"x": null}'], ["[]", "x"]),
    ({"type": "json_object", "schema": SCHEMA}, ['{"a": 1}'], ["{}"]),
    (
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
        ['{"a": 1}'],
        ["{}"],
    ),
    ({"type": "structural_tag", **TAG}, ["<f=a>1</f>"], ["<f=b>"]),
    (FORMAT, ["<f=b>x</f>"], ["<f=c>"]),
]


def test_every_spelling_becomes_its_grammar() -> None:
    async def test() -> None:
        async with serving(says("hello")) as server:

            async def sent(path: str, **body: Any) -> str:
                reply = await server.post(path, **body)
                assert reply.status_code == 200, reply.text
                return server.engine.of(Generate)[-1].sampling.grammar

            for values, fitting, others in SPELLINGS:
                own = {"text": "a", "sampling_params": {"max_new_tokens": 2, **values}}
                openai = {"prompt": "a", "max_tokens": 2, **values}
                grammar = await sent("/generate", **own)
                assert grammar == await sent("/v1/completions", **openai)
                check(grammar, fitting, others)
            for value, fitting, others in RESPONSE_FORMATS:
                body = {"prompt": "a", "max_tokens": 2, "response_format": value}
                check(await sent("/v1/completions", **body), fitting, others)
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            chat["response_format"] = RESPONSE_FORMATS[2][0]
            check(await sent("/v1/chat/completions", **chat), *RESPONSE_FORMATS[2][1:])

    def check(grammar: str, fitting: list[str], others: list[str]) -> None:
        assert [takes(grammar, text) for text in fitting] == [True] * len(fitting)
        assert [takes(grammar, text) for text in others] == [False] * len(others)

    run(test())


def test_what_asks_for_nothing_constrains_nothing() -> None:
    nothing = [
        {"regex": None, "json_schema": None, "stop_regex": [], "choice": []},
        {"structured_outputs": {}, "guided_json": None},
        {"structured_outputs": {"json_object": False}},
    ]

    async def test() -> None:
        async with serving(says("hello")) as server:
            for values in nothing:
                params = {"max_new_tokens": 2, **values}
                assert (await server.post("/generate", text="a", sampling_params=params)).is_success
            body = {"prompt": "a", "response_format": {"type": "text"}}
            assert (await server.post("/v1/completions", **body)).is_success
            assert {item.sampling.grammar for item in server.engine.of(Generate)} == {""}

    run(test())


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# (parameters, what the message must say)
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"regex": "a", "choice": ["a"]}, ["regex and ", "choice", "two constraints"]),
    ({"regex": "a", "guided_json": "{}"}, ["guided_json", "two constraints"]),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, ["structured_outputs.choice"]),
    ({"regex": ""}, ['regex = ""', "empty"]),
    ({"regex": "a\0b"}, ["regex", "NUL"]),
    ({"regex": "a(?=b)"}, ["regex", "look-around"]),
    ({"regex": "a("}, ["regex", "unclosed group"]),
    ({"regex": 5}, ["regex = 5", "string"]),
    ({"regex": "a{0}"}, ["regex", "nothing but the empty text"]),
    ({"regex": "x" * 10**6}, ["regex", "1000000 characters", "131072"]),
    ({"ebnf": ""}, ["ebnf", "empty"]),
    ({"ebnf": "root ::= missing"}, ["ebnf", "missing"]),
    ({"ebnf": "start: missing"}, ["ebnf", "missing"]),
    ({"ebnf": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000}, ["ebnf", "nested too deeply"]),
    ({"choice": "a"}, ["choice", "list of strings"]),
    ({"choice": ["a", ""]}, ["choice", "empty"]),
    ({"choice": ["a"] * 5000}, ["choice", "5000"]),
    ({"json_schema": "{"}, ["json_schema", "not JSON"]),
    ({"json_schema": 5}, ["json_schema = 5", "object"]),
    ({"json_schema": False}, ["json_schema", "no value fits"]),
    ({"json_schema": json.dumps({"enum": ["x" * 10**6]})}, ["json_schema", "131072"]),
    ({"json_schema": {"enum": ["x" * 10**6]}}, ["json_schema", "131072"]),
    ({"json_schema": nested(110)}, ["json_schema", "nested more than 100"]),
    ({"json_schema": json.dumps(nested(300))}, ["json_schema", "nested more than 100"]),
    ({"json_schema": '{"a":' * 20000 + "1" + "}" * 20000}, ["json_schema", "nested"]),
    ({"json_schema": {"$ref": "#"}}, ["json_schema.$ref", "without end"]),
    (
        {"json_schema": {**SCHEMA, "properties": {"a": {"$ref": "#"}}}},
        ["json_schema.$ref", "without end"],
    ),
    (
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        ["json_schema.$ref", "without end"],
    ),
    ({"json_schema": {"$ref": "#/x"}}, ["json_schema.$ref", "/x"]),
    (
        {"json_schema": {"properties": {"l": {"type": "array", "uniqueItems": True}}}},
        ["json_schema.properties.l.uniqueItems", "Unimplemented"],
    ),
    (
        {"json_schema": {"anyOf": [{"type": "null"}, {"not": {"type": "null"}}]}},
        ["json_schema.anyOf[1].not"],
    ),
    ({"json_schema": {"properties": {"t": {"type": "text"}}}}, ["json_schema.properties.t.type"]),
    ({"json_schema": {"type": "string", "format": "zip"}}, ["json_schema.format", "zip"]),
    ({"json_schema": {"type": "string", "pattern": "a(?!b)"}}, ["json_schema.pattern"]),
    (
        {"json_schema": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}},
        ["json_schema.uniqueItems"],
    ),
    ({"structural_tag": "x"}, ["structural_tag", "not JSON"]),
    ({"structural_tag": {}}, ["structural_tag", "format"]),
    ({"structural_tag": {"format": {"type": "zip"}}}, ["structural_tag.format.type", "zip"]),
    (
        {"structural_tag": {**TAG, "triggers": ["<x"]}},
        ["structural_tag.tags[0].begin", "none of the triggers"],
    ),
    ({"structured_outputs": {"disable_additional_properties": True}}, ["additionalProperties"]),
    ({"structured_outputs": 5}, ["structured_outputs = 5", "object"]),
    ({"guided_json": {"type": "integer"}, "guided_whitespace_pattern": "("}, ["guided_json"]),
]


def test_every_refusal_names_field_and_keyword_and_holds_up_nobody() -> None:
    """The event loop turns while grammars are read: no gap is longer than a body may be decoded."""

    async def test() -> None:
        async with serving(says("hello")) as server:
            for values, parts in REFUSED:
                body = {"text": "a", "sampling_params": values}
                reply = await server.post("/generate", **body)
                assert reply.status_code == 400, (values, reply.text)
                error = json.loads(reply.text)["error"]
                for part in ["sampling_params.", *parts]:
                    assert part in error["message"], error
                assert error["param"].startswith("sampling_params.")
                assert len(error["message"]) < 900
            for wrong, part in (
                ({"type": "xml"}, "response_format.type"),
                ({"type": "json_schema"}, "response_format.json_schema"),
                ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "schema.not"),
            ):
                reply = await server.post("/v1/completions", prompt="a", response_format=wrong)
                assert reply.status_code == 400 and part in reply.text, reply.text
            reply = await server.post("/generate", text="a", regex="a")
            assert reply.status_code == 400 and "belongs in sampling_params" in reply.text
            assert server.engine.received == []

    run(test())


def test_the_event_loop_turns_while_a_grammar_is_compiled() -> None:
    """A schema that takes a while: other requests are answered in the meantime."""

    def slow(number: int) -> dict[str, Any]:
        names = [f"{number}p{i}" for i in range(600)]
        properties = {name: {"type": "string", "maxLength": 50} for name in names}
        return {"json_schema": {"type": "object", "properties": properties}}

    async def answers_meanwhile(server: Harness, sampling: dict[str, Any]) -> int:
        first = asyncio.ensure_future(server.post("/generate", text="a", sampling_params=sampling))
        answered = 0
        while not first.done():
            assert (await server.client.get("/health")).is_success
            answered += 1
            await asyncio.sleep(0.001)
        assert (await first).is_success
        return answered

    async def test() -> None:
        async with serving(says("hello")) as server:
            # The compilation took most of the time, and did not keep the interpreter. Somebody else
            # may have kept it, but not each time.
            counts = []
            while max(counts, default=0) < 5:
                counts.append(await answers_meanwhile(server, slow(len(counts))))
                assert len(counts) < 20, counts

    run(test())


@pytest.mark.parametrize("reason", ["no tokenizer", "no end token"])
def test_a_server_that_cannot_constrain_says_why(reason: str) -> None:
    missing = reason == "no tokenizer"

    async def test() -> None:
        async with serving(says("hello"), tokenizer=None if missing else TOKENIZER) as server:
            if not missing:
                server.manager.engine.eos_token_ids.clear()
            body = {"input_ids": [5], "sampling_params": {"regex": "a", "max_new_tokens": 2}}
            reply = await server.post("/generate", **body)
            wanted = "--skip-tokenizer-init" if missing else "eos_token_id"
            assert reply.status_code == 400 and wanted in reply.text, reply.text

    run(test())


def test_a_request_may_have_more_grammars_than_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of them are forgotten before the last ones are known."""
    monkeypatch.setattr(grammars, "REMEMBERED", 2)
    texts = [str(number) for number in range(5)]
    readings = []
    wanted = grammars.read_constraint
    monkeypatch.setattr(
        grammars, "read_constraint", lambda *own: readings.append(own) or wanted(*own)
    )

    async def test() -> None:
        async with serving(says("hello")) as server:
            asked = [{"regex": text, "max_new_tokens": 1} for text in texts]
            reply = await server.post("/generate", text=texts, sampling_params=asked)
            assert reply.status_code == 200, reply.text
            assert len(readings) == 2 * len(texts)  # before the verdicts, and with them

    run(test())
