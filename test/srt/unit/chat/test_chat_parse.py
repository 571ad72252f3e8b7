"""Reasoning, content and calls, told apart while they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_samples import BEGUN, CHATML, HERMES, SAMPLES, WEATHER, Sample
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_eagle.chat.family import FAMILIES, FamilyError, family_of, read_family
from mamba_eagle.chat.format import after_last_anchor, reasoning_is
from mamba_eagle.chat.live_calls import ArgumentsPiece, ToolCall
from mamba_eagle.chat.parse import FamilyParser, Piece, TextPiece, template_problem


def parser_of(sample: Sample, **settings: Any) -> FamilyParser:
    family = read_family(sample.family)
    prefix = after_last_anchor(family.template, sample.prompt)
    return FamilyParser(family, prefix, [WEATHER], **settings)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts of one field are one, and so are the pieces of a call."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            isinstance(piece, TextPiece)
            and isinstance(last, TextPiece)
            and last.field == piece.field
        ):
            found[-1] = TextPiece(piece.field, last.text + piece.text)
        elif isinstance(piece, ArgumentsPiece):
            assert isinstance(last, ToolCall) and not last.is_whole
            found[-1] = ToolCall(last.name, last.arguments + piece.text, piece.is_last)
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


@pytest.mark.parametrize("length", [1, 3, 11, 1000])
@pytest.mark.parametrize("name", SAMPLES)
def test_calls_in_pieces_are_the_whole_ones(name: str, length: int) -> None:
    """What a whole call may be, its pieces joined are; each begins before it ends."""
    sample = SAMPLES[name]
    expected = whole(sample)
    parser = parser_of(sample, is_live=True)
    cuts = range(0, len(sample.text), length)
    pieces = [piece for at in cuts for piece in parser.feed(sample.text[at : at + length])]
    pieces += parser.finish()
    found = joined(pieces)
    if name in BEGUN:
        assert found[-1] == ToolCall("weather", BEGUN[name], BEGUN[name].endswith("}"))
        return
    assert found == expected
    if length == 1 and any(call[1] for call in sample.calls) and "as a string" not in name:
        assert any(isinstance(piece, ArgumentsPiece) for piece in pieces)


VALUES = st.text('ab"\\\n<{}[]/ é', max_size=12)


@settings(max_examples=100)
@given(
    family=st.sampled_from(FAMILIES),
    city=VALUES,
    days=st.integers(-5, 5),
    tags=st.lists(VALUES, max_size=2),
    cuts=st.lists(st.integers(0, 400), max_size=20),
    indent=st.sampled_from([None, 1]),
)
def test_any_pieces_of_a_call_are_the_call(
    family: str, city: str, days: int, tags: list[str], cuts: list[int], indent: int | None
) -> None:
    form = read_family(family).calls
    assert form is not None
    given = {"city": city, "days": days, "tags": tags}
    written = json.dumps(given, ensure_ascii=False, indent=indent)
    if form.arguments == "tags":
        texts = {key: value if key == "city" else json.dumps(value) for key, value in given.items()}
        written = "".join(
            form.begin_argument.replace("{key}", key) + value + form.end_argument
            for key, value in texts.items()
        )
    one = form.begin.replace("{name}", "weather") + written + form.end
    text = form.begin_all + form.between.join([one, one]) + form.end_all
    plain = FamilyParser(read_family(family), "", [WEATHER])
    expected = joined(plain.feed(text) + plain.finish())
    assert [json.loads(call.arguments) for call in expected] == [given, given]
    parser = FamilyParser(read_family(family), "", [WEATHER], is_live=True)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [p for a, b in zip(places, places[1:]) for p in parser.feed(text[a:b])]
    assert joined(pieces + parser.finish()) == expected


def test_what_a_stream_has_begun_it_ends_as_it_was_written() -> None:
    """Cut off, or no JSON: a plain reply has no call then. Unknown names begin none."""
    begun = '<tool_call>{"name": "weather", "arguments": {"city": "Os'
    for text, arguments in (
        (begun, '{"city": "Os'),
        (begun + 'lo" 5}}</tool_call>', '{"city": "Oslo" 5}'),
    ):
        parser = FamilyParser(read_family("hermes"), "", [WEATHER], is_live=True)
        found = joined(parser.feed(text) + parser.finish())
        assert found == [ToolCall("weather", arguments, text != begun)]
    text = begun.replace("weather", "other") + "</tool_call>"
    parser = FamilyParser(read_family("hermes"), "", [WEATHER], is_live=True)
    assert joined(parser.feed(text) + parser.finish()) == [TextPiece("content", text)]


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


def test_what_is_not_streamed_comes_at_the_end() -> None:
    """More prose between two arguments than is looked through for the next one."""
    given = {"city": "Oslo", "days": "3"}.items()
    one, other = (f"<parameter={key}>\n{value}\n</parameter>" for key, value in given)
    text = f"<tool_call>\n<function=weather>\n{one}{'x' * 5000}{other}\n</function>\n</tool_call>"
    parser = FamilyParser(read_family("qwen3_coder"), "", [WEATHER], is_live=True)
    pieces = [piece for char in text for piece in parser.feed(char)] + parser.finish()
    assert joined(pieces) == [ToolCall("weather", '{"city": "Oslo", "days": 3}')]


def test_long_arguments_in_pieces_are_no_work_for_long() -> None:
    """Joining them anew for each piece, or looking at all of them, would take minutes."""
    many = "".join(f"<parameter=k{i}>\n1\n</parameter>\n" for i in range(3_000))
    for family, begin, piece in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "', "x" * 9),
        ("nemotron_3", "<tool_call>\n<function=weather>\n<parameter=city>", "x" * 9),
        ("nemotron_3", "<tool_call>\n<function=weather>\n<parameter=days>", "1"),
        ("hermes", "<tool_call>", " " * 9),
        ("nemotron_3", "<tool_call>\n<function=weather>\n" + many, " "),
    ):
        parser = FamilyParser(read_family(family), "<think></think>", [WEATHER], is_live=True)
        parser.feed(begin)
        for _ in range(20_000):
            parser.feed(piece)
        parser.finish()


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
        parser = FamilyParser(family, prefix)
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
    assert found("Question: \\nAnswer: <tool_call>").name == "mamba2_math"
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
