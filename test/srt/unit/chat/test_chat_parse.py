"""Reasoning, content and calls, told apart while they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_samples import CHATML, HERMES, SAMPLES, WEATHER, Sample
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_eagle.chat.family import FAMILIES, FamilyError, family_of, read_family
from mamba_eagle.chat.format import after_last_anchor, make_parser, reasoning_is
from mamba_eagle.chat.parse import FamilyParser, Piece, TextPiece, ToolCall, template_problem


def parser_of(sample: Sample, **settings: Any) -> FamilyParser:
    family = read_family(sample.family)
    prefix = after_last_anchor(family.template, sample.prompt)
    return FamilyParser(family, prefix, [WEATHER], **settings)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts of one field are one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            isinstance(piece, TextPiece)
            and isinstance(last, TextPiece)
            and last.field == piece.field
        ):
            found[-1] = TextPiece(piece.field, last.text + piece.text)
        else:
            found.append(piece)
    return found


def whole(sample: Sample) -> list[Piece]:
    parser = parser_of(sample)
    return joined(parser.feed(sample.text) + parser.finish())


def texts(pieces: list[Piece], field: str) -> str | None:
    found = [p.text for p in pieces if isinstance(p, TextPiece) and p.field == field]
    return "".join(found) if found else None


def test_every_family_has_samples() -> None:
    assert {sample.family for sample in SAMPLES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_mean_what_they_say(name: str) -> None:
    sample = SAMPLES[name]
    pieces = whole(sample)
    assert texts(pieces, "content") == sample.content
    assert texts(pieces, "reasoning_content") == sample.reasoning
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert tuple((call.name, json.loads(call.arguments)) for call in calls) == sample.calls


@pytest.mark.parametrize("name", SAMPLES)
def test_character_by_character_is_the_whole(name: str) -> None:
    sample = SAMPLES[name]
    parser = parser_of(sample)
    pieces = [piece for char in sample.text for piece in parser.feed(char)]
    assert joined(pieces + parser.finish()) == whole(sample)


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "\n", " "]
MARKS += ["</function>", "<parameter=city>", "</parameter>", '{"name": "weather", "arguments": ']
MARKS += ["{}}", "<TOOLCALL>", "</TOOLCALL>", "[", "]", "word", "<", "ü", HERMES]


@settings(max_examples=150)
@given(
    family=st.sampled_from(FAMILIES),
    prefix=st.sampled_from(["", "<think>\n", "<think></think>", "<think>a</think>So "]),
    text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_split_is_the_whole(family: str, prefix: str, text: str, cuts: list[int]) -> None:
    parser = FamilyParser(read_family(family), prefix, [WEATHER])
    expected = joined(parser.feed(text) + parser.finish())
    parser = FamilyParser(read_family(family), prefix, [WEATHER])
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = []
    for begin, end in zip(places, places[1:]):
        pieces += parser.feed(text[begin:end])
    assert joined(pieces + parser.finish()) == expected


def test_a_message_that_goes_on_repeats_nothing() -> None:
    parser = FamilyParser(read_family("qwen3"), "<think>a</think>The answer is")
    assert joined(parser.feed(" four") + parser.finish()) == [TextPiece("content", " four")]


def test_surplus_calls_are_left_out() -> None:
    sample = SAMPLES["one list of calls"]
    parser = parser_of(sample, max_calls=1)
    calls = [p for p in parser.feed(sample.text) + parser.finish() if isinstance(p, ToolCall)]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo"}]


def test_endless_white_space_is_no_work_for_long() -> None:
    """A pattern that looked at all of it again for each piece would take hours."""
    parser = FamilyParser(read_family("nemotron_3"), "<think>\n")
    for _ in range(20_000):
        assert parser.feed("\n") == []
    assert parser.feed("x") != []


def test_arguments_left_open_are_no_work_for_long() -> None:
    """Looking for the end of each of them in all that follows would take minutes."""
    text = "<tool_call>\n<function=f>\n" + "<parameter=a>\n" * 50_000 + "</function>\n</tool_call>"
    parser = FamilyParser(read_family("nemotron_3"), "<think></think>", [WEATHER])
    assert texts(parser.feed(text) + parser.finish(), "content") == text
    parser = FamilyParser(read_family("nemotron_3"), "<think></think>" + text, [WEATHER])
    assert parser.feed("x") == [TextPiece("content", "x")]


def test_a_call_that_the_prompt_begins_is_the_replys() -> None:
    for cut in (5, 20, len(HERMES) - 3):
        parser = FamilyParser(read_family("hermes"), HERMES[:cut], [WEATHER])
        pieces = parser.feed(HERMES[cut:] + HERMES) + parser.finish()
        assert pieces == [ToolCall("weather", '{"city": "Oslo"}')] * 2
    parser = FamilyParser(read_family("hermes"), HERMES + "<tool_call>a", [WEATHER])
    assert joined(parser.feed("b</tool_call>") + parser.finish()) == [
        TextPiece("content", "b</tool_call>")
    ]


def test_where_the_prompt_ends() -> None:
    family = read_family("qwen3")
    assert reasoning_is(family, "") == "possible"
    assert reasoning_is(family, "<think>\n") == "open"
    assert reasoning_is(family, "<think>") == "open"
    assert reasoning_is(family, "<think>\n\n</think>\n\n") == "over"
    assert reasoning_is(family, "<think></think>") == "over"
    assert reasoning_is(read_family("hermes"), "") == "over"


OWN = {
    "start_anchor_pattern": r"<bot>\s?",
    "fields": {
        "thinking": {"open": "[[", "close": "]]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"!(?P<name>\w+) ",
            "close": ";",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content.args}"}},
        },
        "content": {"content": "text", "close": "<end>"},
    },
}


def test_a_checkpoints_own_template_is_used() -> None:
    family = family_of(OWN, "<tool_call>")
    assert family is not None and not template_problem(family)
    prefix = after_last_anchor(family.template, "<bot> a <bot> [[")
    assert prefix == "[["
    text = 'hm]] so !f {"args": {"a": 1}}; and !f {"x": 1}; !g oops;'
    for size in (1, 2, 3, 100):
        parser = make_parser(family, prefix)
        pieces = []
        for begin in range(0, len(text), size):
            pieces += parser.feed(text[begin : begin + size])
        pieces = joined(pieces + parser.finish())
        assert pieces == [
            TextPiece("reasoning_content", "hm"),
            TextPiece("content", "so"),
            ToolCall("f", '{"a": 1}'),
            TextPiece("content", '  and !f {"x": 1}; !g oops;'),
        ]


def test_families_are_found_by_their_marks() -> None:
    def found(template: str, own: Any = None, calls: str = "auto", reasoning: str = "auto") -> Any:
        return family_of(own, template, calls, reasoning)

    assert found("{{ messages }}") is None
    assert found("<TOOLCALL> <think>").name == "nemotron_nano_v2"
    assert found("<tool_call> <function= <think>").name == "nemotron_3"
    assert found("<tool_call> <function=").name == "qwen3_coder"
    assert found("<|start_of_role|> <tool_call>").name == "granite_4"
    assert found("<|im_start|> <tool_call> <think>").name == "qwen3"
    assert found("<|im_start|> <tool_call>").name == "hermes"
    both = found("", calls="hermes", reasoning="nemotron_3")
    assert both.reads_calls and both.reasoning.close == "</think>"
    assert not found("<TOOLCALL> <think>", calls="none").reads_calls
    assert not found("<TOOLCALL> <think>", reasoning="none").reads_reasoning
    assert found("", calls="nemotron_3").reads_reasoning
    with pytest.raises(FamilyError, match="nemotron_3.*path of a JSON file"):
        read_family("nemotron")


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_families_are_whole(name: str) -> None:
    family = read_family(name)
    assert not template_problem(family)
    assert family.calls is not None and "{name}" in family.calls.begin
    assert (family.reasoning is None) == (not family.reads_reasoning)


def test_the_last_anchor_counts() -> None:
    family = read_family("qwen3")
    assert after_last_anchor(family.template, CHATML + "old" + CHATML + "new") == "new"
    assert after_last_anchor(family.template, "no anchor") == ""
