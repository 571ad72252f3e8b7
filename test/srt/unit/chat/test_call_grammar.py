"""Grammars of calls: whatever they let through is read as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_rig import NAMES, TOOLS, tool

from mamba_eagle.chat.call_grammar import CallableTool, CallGrammars, opening
from mamba_eagle.chat.family import FAMILIES, Tags, read_family
from mamba_eagle.chat.parse import FamilyParser, ToolCall
from mamba_eagle.chat.schema import closed, readable_tools
from mamba_eagle.chat.thinking import Budget, thinking_first, token_set
from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import Grammar, text_grammar
from mamba_eagle.constrain.vocabulary import Vocabulary, read_tokenizer
from mamba_eagle.embedded import EMBEDDED_MODEL

EOS = 2
EVERY = [CallableTool(name, schema) for name, schema in zip(NAMES, TOOLS)]
Choose = Callable[[list[int]], int]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(read_tokenizer(str(EMBEDDED_MODEL)), 2048, [EOS])


def allowed(vocabulary: Vocabulary, matcher: Any) -> list[int]:
    mask = np.zeros(vocabulary.words, dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    text: str = vocabulary.tokens.decode_bytes(tokens).decode()
    return text


def walk(vocabulary: Vocabulary, grammar: Grammar, rng: random.Random) -> str | None:
    """A random text of the grammar that tends to end; None if it does not within 600 tokens."""
    matcher = vocabulary.matcher(grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    while len(tokens) < 600:
        options = allowed(vocabulary, matcher)
        if options == [EOS] or (EOS in options and rng.random() < 0.6):
            return text_of(vocabulary, tokens)
        options = [token for token in options if token != EOS]
        ends = [t for t in options if text_of_one(vocabulary, t)[:1] in '"<\n}],01/>']
        token = rng.choice(ends if ends and rng.random() < 0.8 else options)
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
    return None


def text_of_one(vocabulary: Vocabulary, token: int) -> str:
    text: str = vocabulary.tokens.decode_bytes([token]).decode("utf-8", "replace")
    return text


def calls_in(family: str, text: str) -> list[ToolCall]:
    read = read_family(family)
    prefix = "<think></think>" if read.reads_reasoning else ""
    parser = FamilyParser(read, prefix, readable_tools([tool(name) for name in NAMES]))
    pieces = parser.feed(text) + parser.finish()
    assert all(isinstance(piece, ToolCall) for piece in pieces), (text, pieces)
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_read_and_fit(family: str, parallel: bool, vocabulary: Vocabulary) -> None:
    grammar = CallGrammars(read_family(family)).forced(EVERY, parallel)
    rng = random.Random(f"{family} {parallel}")
    done = 0
    for _ in range(6):
        text = walk(vocabulary, grammar, rng)
        if text is None:
            continue
        done += 1
        calls = calls_in(family, text)
        assert len(calls) == 1 or parallel
        for call in calls:
            schema = dict(zip(NAMES, TOOLS))[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
    assert done


@pytest.mark.parametrize("family", FAMILIES)
def test_what_begins_like_a_call_is_one(family: str, vocabulary: Vocabulary) -> None:
    """Free text with strict tools: after the tag only a call can follow."""
    makers = CallGrammars(read_family(family))
    grammar = makers.allowed([CallableTool("ping", None)], parallel=True)
    matcher = vocabulary.matcher(grammar.text)
    call = walk(vocabulary, makers.forced([CallableTool("ping", None)], False), random.Random(1))
    assert call is not None
    for text in ("Well, 1 < 2. ", call, " and "):
        tokens = vocabulary.tokens.tokenize_str(text)
        assert matcher.try_consume_tokens(tokens) == len(tokens), text
    assert EOS in allowed(vocabulary, matcher)
    tokens = vocabulary.tokens.tokenize_str(opening(makers.form) + "oops")
    assert matcher.try_consume_tokens(tokens) < len(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_has_no_arguments_that_its_schema_does_not_name(
    family: str, vocabulary: Vocabulary
) -> None:
    """Schemas of clients seldom say additionalProperties: false, and there is no end then."""
    pair = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"pair": pair, "list": {"items": pair}}}
    grammar = CallGrammars(read_family(family)).forced([CallableTool("weather", schema)], False)
    rng = random.Random(5)
    texts = [text for _ in range(8) if (text := walk(vocabulary, grammar, rng)) is not None]
    assert texts
    for call in (call for text in texts for call in calls_in(family, text)):
        given = json.loads(call.arguments)
        assert set(given) <= {"pair", "list"} and set(given.get("pair", ())) <= {"x"}


def test_what_a_schema_says_of_other_properties_stays() -> None:
    schema = {"properties": {"a": {"type": "object", "properties": {}, "allOf": [{}]}}}
    assert closed(schema)["properties"] == schema["properties"]
    for other in ({"additionalProperties": {"type": "integer"}}, {"required": ["b"]}):
        assert closed({"properties": {}, **other}) == {"properties": {}, **other}


def test_a_tool_that_is_not_strict_has_any_arguments(vocabulary: Vocabulary) -> None:
    loose = CallableTool("weather", TOOLS[1], strict=False)
    for family in ("qwen3", "nemotron_3"):
        grammar = CallGrammars(read_family(family)).forced([loose], False)
        rng = random.Random(3)
        texts = [text for _ in range(4) if (text := walk(vocabulary, grammar, rng)) is not None]
        assert texts
        for text in texts:
            assert len(calls_in(family, text)) == 1


@pytest.mark.parametrize(
    "schema, path",
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "required"),
        ({"type": "object", "properties": {"<a>": {}}}, "properties"),
    ],
)
def test_what_tags_cannot_say_is_refused_by_path(schema: dict[str, Any], path: str) -> None:
    makers = CallGrammars(read_family("nemotron_3"))
    with pytest.raises(GrammarError) as error:
        makers.arguments(CallableTool("f", schema))
    assert error.value.path == path


# ── reasoning ────────────────────────────────────────────────────────────────────────────────

ANSWER = text_grammar("yes")


def accepts(vocabulary: Vocabulary, grammar: Grammar | None, text: str) -> bool:
    """Whether it is a whole text of the grammar."""
    assert grammar is not None
    matcher = vocabulary.matcher(grammar.text)
    tokens = vocabulary.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_reasoning_comes_first_where_the_prompt_begins_it(vocabulary: Vocabulary) -> None:
    tags = Tags("<think>", "</think>")
    makers = {
        state: thinking_first(ANSWER, tags, state, {}, "<tool_call>")
        for state in ("open", "possible", "over")
    }
    assert accepts(vocabulary, makers["open"], "Let me </thi see.</think>\n\nyes")
    assert not accepts(vocabulary, makers["open"], "yes")
    assert not accepts(vocabulary, makers["open"], "a <tool_call> b</think>yes")
    assert accepts(vocabulary, makers["possible"], "<think>a</think>yes")
    assert accepts(vocabulary, makers["possible"], "yes")
    assert accepts(vocabulary, makers["over"], "yes")
    assert not accepts(vocabulary, makers["over"], "a</think>yes")
    assert thinking_first(None, tags, "open") is None


def budget_of(vocabulary: Vocabulary, tokens: int, end: int, special: bool) -> Budget:
    return Budget(tokens, end, special, token_set(set(range(2048)) - {end, EOS}))


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("body", [None, ANSWER])
def test_a_budget_is_kept_to_the_token(
    limit: int, body: Grammar | None, vocabulary: Vocabulary
) -> None:
    (end,) = vocabulary.tokens.tokenize_str("####")
    tags = Tags("<think>", "####")
    budget = budget_of(vocabulary, limit, end, False)
    grammar = thinking_first(body, tags, "open", {}, "", budget)
    (word,) = vocabulary.tokens.tokenize_str(" questions")
    for length in range(limit + 1):
        matcher = vocabulary.matcher(grammar.text)  # type: ignore[union-attr]
        assert matcher.try_consume_tokens([word] * length) == length
        options = allowed(vocabulary, matcher)
        assert end in options and EOS not in options
        assert (word in options) == (length < limit)
        if length == limit:
            assert {text_of_one(vocabulary, token)[0] for token in options} == {"#"}
        assert matcher.try_consume_tokens([end]) == 1
        if body is None:
            assert len(allowed(vocabulary, matcher)) == 2048  # anything, or the end
        else:
            tokens = vocabulary.tokens.tokenize_str("yes")
            assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("special", [False, True])
def test_tokens_taken_back_are_not_counted(special: bool, vocabulary: Vocabulary) -> None:
    """As a walk over a draft tree does; llguidance 1.9 loses count in some forms."""
    rng = random.Random(5)
    end = 1 if special else vocabulary.tokens.tokenize_str("####")[0]
    tags = Tags("<think>", "<s>" if special else "####")
    special_tokens = {"<s>": 1} if special else {}
    budget = budget_of(vocabulary, 3, end, special)
    text = thinking_first(None, tags, "open", special_tokens, "", budget).text  # type: ignore[union-attr]
    for _ in range(8):
        pool = [end, end, *(rng.randrange(3, 2048) for _ in range(6))]
        matcher, path = vocabulary.matcher(text), list[int]()
        for _ in range(20):
            if path and rng.random() < 0.35:
                back = min(len(path), rng.randint(1, 4))
                assert matcher.rollback(back), matcher.get_error()
                del path[-back:]
            else:
                token = rng.choice(pool)
                if token in allowed(vocabulary, matcher):
                    assert matcher.try_consume_tokens([token]) == 1
                    path.append(token)
            fresh = vocabulary.matcher(text)
            assert fresh.try_consume_tokens(path) == len(path)
            assert allowed(vocabulary, fresh) == allowed(vocabulary, matcher)


def test_sets_of_tokens_are_written_as_ranges() -> None:
    assert token_set([5, 1, 2, 3, 9]) == "<[1-3,5,9]>"
