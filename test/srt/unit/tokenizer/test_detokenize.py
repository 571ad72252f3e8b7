"""Text from tokens: whole characters, stop strings, and never a difference by chunking."""

from __future__ import annotations

import random

import pytest
from tiny_tokenizer import EOS, FIRST_BYTE, byte_level, metaspace, spell

from mamba_eagle.core import FinishReason, SamplingParams
from mamba_eagle.message import Generate, RequestOutput, StopAt
from mamba_eagle.tokenizer.sample import LiveRequest, Sample
from mamba_eagle.tokenizer.stop import StopFinder, StopStrings
from mamba_eagle.tokenizer.text import TextTokenizer

BYTES = byte_level()
SPACED = metaspace()
WORDS = byte_level(("Question", " the", "\n\n"))
TEXTS = ["plain", "Grüße, 世界", "🦅🐍 eagle 👩‍👩‍👧", "a\u0301\ufffdz", "\n\nQuestion: x"]


def stream(tokenizer: TextTokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer([], skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "merges"])
def test_streamed_text_equals_decoded_text(tokenizer: TextTokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""  # nothing was left unsaid


def test_emoji_across_tokens_comes_with_its_last_byte() -> None:
    assert stream(BYTES, spell("a🦅b")) == ["a", "", "", "", "🦅", "b", ""]


def test_incomplete_end_is_flushed_as_replacement() -> None:
    assert stream(BYTES, spell("a🦅")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_any_tokens_decode_as_transformers_does() -> None:
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(0, 259 + 5) for _ in range(rng.randrange(0, 30))]
        for skip in (True, False):
            assert "".join(stream(BYTES, ids, skip)) == BYTES.decode(ids, skip)


def test_special_tokens_are_skipped_or_spelled() -> None:
    ids = [*spell("a"), EOS, *spell("b")]
    assert "".join(stream(BYTES, ids)) == "ab"
    assert "".join(stream(BYTES, ids, skip=False)) == "a</s>b"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert stream(BYTES, [*spell("a"), 100_000]) == ["a", "", ""]


def test_window_keeps_the_space_of_the_first_output_word() -> None:
    tokenizer = metaspace()
    detokenizer = tokenizer.detokenizer([1, 3], True)
    pieces = [detokenizer.push(token) for token in (4, 5, 2)]
    assert pieces == [" world", "!", ""]


def test_window_joins_byte_fallback_tokens() -> None:
    tokenizer = metaspace()
    detokenizer = tokenizer.detokenizer([3], True)
    eagle = [6 + byte for byte in "🦅".encode()]
    assert [detokenizer.push(token) for token in eagle] == ["", "", "", "🦅"]


def test_window_does_not_wait_for_ever() -> None:
    detokenizer = metaspace().detokenizer([3], True)
    pieces = [detokenizer.push(6 + 0xFF) for _ in range(40)]
    assert "\ufffd" in "".join(pieces)


# ── bytes for what a vocabulary lacks ────────────────────────────────────────────────────────


def fallback(text: str) -> list[int]:
    """The text in byte-fallback tokens."""
    return [6 + byte for byte in text.encode()]


def output_text(prompt: list[int], ids: list[int], skip: bool = True) -> str:
    detokenizer = SPACED.detokenizer(prompt, skip)
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


def test_a_prompt_of_bytes_does_not_spoil_the_output() -> None:
    """However its last tokens are cut: no context begins or ends inside a character."""
    assert output_text(fallback("hi😀😀"), [*fallback("😀"), 4]) == "😀 world"
    for cut in range(1, 4):
        assert output_text(fallback("😀")[:cut], [4, *fallback("é")]) == " worldé"


def test_bytes_may_begin_a_text() -> None:
    assert output_text([1], [*fallback(" a"), 4]) == "a world"
    assert output_text([1, 3], [*fallback(" a"), 4]) == " a world"


def test_bytes_that_are_no_character_become_replacements() -> None:
    assert output_text([3], [*fallback("😀")[:2], 5]) == "\ufffd!"
    assert output_text([3], [*fallback("a😀")[:-1]]) == "a\ufffd"
    assert SPACED.token_bytes(fallback("é")[0]) == b"\xc3"


def test_prompt_and_output_make_the_whole_text() -> None:
    tokenizer = SPACED
    rng = random.Random(3)
    words = [[1], [2], [3], [4], [5], *map(fallback, ["é", "😀", "世", " ", "x"])]
    for _ in range(1000):
        parts = [rng.choice(words) for _ in range(rng.randrange(1, 12))]
        cut = rng.randrange(len(parts) + 1)
        before, after = sum(parts[:cut], []), sum(parts[cut:], [])
        for skip in (True, False):
            whole = tokenizer.decode(before + after, skip)
            assert tokenizer.decode(before, skip) + output_text(before, after, skip) == whole


# ── stop strings ─────────────────────────────────────────────────────────────────────────────


def test_finder_takes_the_first_to_begin_then_the_longest() -> None:
    finder = StopFinder(StopStrings(["bc", "abcd", "ab"]))
    match = finder.find("xabcd")
    assert match is not None and match.string == "abcd" and (match.start, match.end) == (1, 5)
    assert finder.find("xabcd") is None  # what ended before was looked at before


def test_held_back_is_the_longest_beginning_of_a_stop() -> None:
    for text, held in (("x\n\nQues", 6), ("xaa", 2), ("xb", 0)):
        finder = StopFinder(StopStrings(["\n\nQuestion", "aab"]))
        assert finder.find(text) is None
        assert finder.held_back() == held


def naive_match(text: str, seen: int, strings: list[str]) -> tuple[int, int] | None:
    ends = [
        (at, at + len(string))
        for string in strings
        for at in range(len(text))
        if text.startswith(string, at) and at + len(string) > seen
    ]
    return min(ends, key=lambda match: (match[0], -match[1]), default=None)


def naive_held(text: str, strings: list[str]) -> int:
    starts = {string[:length] for string in strings for length in range(1, len(string))}
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def test_finder_agrees_with_looking_for_each_string() -> None:
    """Few letters and many strings: they overlap, contain and continue one another."""
    rng = random.Random(11)
    for _ in range(400):
        strings = [
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(1, 6))
        ]
        finder, text = StopFinder(StopStrings(strings)), ""
        for _ in range(20):
            seen = len(text)
            text += "".join(rng.choice("aabc") for _ in range(rng.randrange(1, 5)))
            match = finder.find(text)
            found = (match.start, match.end) if match is not None else None
            assert found == naive_match(text, seen, strings), (strings, text, seen)
            assert finder.held_back() == naive_held(text, strings), (strings, text)


def test_no_strings_match_nothing() -> None:
    finder = StopFinder(StopStrings([]))
    assert not finder
    assert finder.find("abc") is None and finder.held_back() == 0


def make_sample(prompt_ids: list[int] | None = None, **sampling: object) -> Sample:
    prompt = Generate(rid="r", token_ids=prompt_ids or [5], sampling=SamplingParams(**sampling))
    detokenizer = BYTES.detokenizer([], prompt.sampling.skip_special_tokens)
    return Sample(LiveRequest("r"), prompt, "r", "r#1", 0, detokenizer)


def feed(sample: Sample, ids: list[int], sizes: list[int], finish: FinishReason) -> list[StopAt]:
    stops = []
    at = 0
    for size in sizes:
        part = ids[at : at + size]
        at += size
        last = finish if at >= len(ids) else None
        if sample.finish is None:
            stop = sample.take(RequestOutput(rid="r#1", token_ids=part, finish=last))
            stops += [stop] if stop is not None else []
    return stops


def chunkings(total: int) -> list[list[int]]:
    rng = random.Random(total)
    found = [[size] * -(-total // size) for size in range(1, total + 1)]
    for _ in range(20):
        sizes: list[int] = []
        while sum(sizes) < total:
            sizes.append(rng.randrange(1, 6))
        found.append(sizes)
    return found


@pytest.mark.parametrize(
    "text, stops, no_trim, expected, count, matched",
    [
        ("one STOP two", ["STOP"], False, "one ", 8, "STOP"),
        ("one STOP two", ["STOP"], True, "one STOP", 8, "STOP"),
        ("one STOP two", ["XX", "P t"], False, "one STO", 10, "P t"),
        ("é🦅é", ["🦅"], False, "é", 6, "🦅"),
        ("aaab", ["aab"], False, "a", 4, "aab"),
        ("no such", ["zzz", "h!"], False, "no such", 7, None),
        ("STOP", ["STOP"], False, "", 4, "STOP"),
        ("ab ab", ["b", "ab"], False, "", 2, "ab"),
    ],
)
def test_every_chunking_gives_the_same_result(
    text: str, stops: list[str], no_trim: bool, expected: str, count: int, matched: str | None
) -> None:
    ids = spell(text)
    for sizes in chunkings(len(ids)):
        sample = make_sample(stop=stops, no_stop_trim=no_trim)
        sent = feed(sample, ids, sizes, FinishReason(kind="length", length=len(ids)))
        assert (sample.text, sample.output_ids) == (expected, ids[:count]), sizes
        assert sample.finish is not None and sample.finish.matched == matched
        assert [(stop.num_tokens, stop.matched) for stop in sent] == (
            [(count, matched)] if matched else []
        )


def test_stop_inside_a_merged_token_is_cut_inside_it() -> None:
    prompt = Generate(rid="r", token_ids=[5], sampling=SamplingParams(stop=["uest"]))
    sample = Sample(LiveRequest("r"), prompt, "r", "r#1", 0, WORDS.detokenizer([], True))
    ids = WORDS.encode("a Question")
    feed(sample, ids, [len(ids)], FinishReason(kind="length", length=len(ids)))
    assert sample.text == "a Q"
    assert sample.output_ids == ids


def test_visible_text_only_grows_and_never_shows_a_stop() -> None:
    sample = make_sample(stop=["\n\nQ", "END"])
    shown = ""
    for token in spell("a\n\nb EN d\n\nQuestion"):
        if sample.finish is None:
            sample.take(RequestOutput(rid="r#1", token_ids=[token]))
        assert sample.visible_text().startswith(shown)
        shown = sample.visible_text()
        assert "\n\nQ" not in shown
    assert shown == "a\n\nb EN d"


def test_min_new_tokens_delays_stop_strings() -> None:
    sample = make_sample(stop=["b"], min_new_tokens=4)
    feed(sample, spell("abcbcb"), [6], FinishReason(kind="length", length=6))
    assert sample.text == "abc"
    assert len(sample.output_ids) == 4


@pytest.mark.parametrize("no_trim, skip, text", [(False, True, "ab"), (True, False, "ab</s>")])
def test_stop_token_counts_but_is_trimmed(no_trim: bool, skip: bool, text: str) -> None:
    ids = [*spell("ab"), EOS]
    for sizes in ([3], [1, 1, 1], [2, 1]):
        sample = make_sample(no_stop_trim=no_trim, skip_special_tokens=skip)
        feed(sample, ids, sizes, FinishReason(kind="stop", matched=EOS))
        assert (sample.text, sample.output_ids) == (text, ids)


def test_plain_stop_token_is_trimmed_too() -> None:
    sample = make_sample(stop_token_ids=[FIRST_BYTE + ord("b")])
    feed(sample, spell("ab"), [2], FinishReason(kind="stop", matched=FIRST_BYTE + ord("b")))
    assert (sample.text, sample.output_ids) == ("a", spell("ab"))


def test_tokens_after_the_end_are_dropped() -> None:
    sample = make_sample(stop=["b"])
    feed(sample, [*spell("abcd"), EOS], [5], FinishReason(kind="stop", matched=EOS))
    assert sample.finish == FinishReason(kind="stop", matched="b")
    assert sample.output_ids == spell("ab")
