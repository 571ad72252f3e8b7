"""Grammars in the runner, over trees: what must hold, by the numbers of
docs/design/grammars.md."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from grammar_rig import (
    EOS,
    GRAMMARS,
    VOCAB,
    Letters,
    allowed,
    allowed_by,
    constrain,
    fits,
    plain_choices,
    text_of,
    under,
    vocabulary,
)
from jsonschema import Draft202012Validator
from llguidance import TokenizerWrapper
from runner_harness import (
    PLAIN,
    TREE,
    Engine,
    Live,
    Settings,
    Tiny,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from tensor_checks import host_backend, sample
from tiny_drafters import DRAFTERS

from mamba_eagle.chat.family import Tags
from mamba_eagle.chat.thinking import thinking_first
from mamba_eagle.constrain.grammar import (
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.constrain.place import is_allowed
from mamba_eagle.constrain.request import fill_masks
from mamba_eagle.constrain.reshape import DraftTree, reshape
from mamba_eagle.constrain.vocabulary import Vocabulary
from mamba_eagle.core import SamplingParams
from mamba_eagle.drafting.growth import Growth
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.runner.constraints import TokenMasks
from mamba_eagle.runner.sampling_state import SamplingState

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engines(tiny: Tiny) -> Callable[[str], Engine]:
    made: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        if name not in made:
            made[name] = constrain(tiny.engine(name))
        return made[name]

    return engine


def cases() -> list[SamplingParams]:
    """Each grammar, greedy and seeded, with filters."""
    found = [under(name, seed=seed) for name in GRAMMARS for seed in (None, 3)]
    found.append(under("schema", seed=4, top_k=5, top_p=0.9))
    found.append(under("open", seed=4, min_p=0.05, frequency_penalty=0.5))
    return found


# ── 1: the same text with and without speculation ────────────────────────────────────────────


@pytest.mark.parametrize("settings", ["none", "tree", "tree-snapshot", "chain", "tree-torch"])
def test_1_the_text_is_the_plain_models_under_the_grammar(
    tiny: Tiny, engines: Callable[[str], Engine], settings: str
) -> None:
    """In a batch, with requests without a grammar among those that have one."""
    engine, drafts = engines(settings), 0
    for first in range(0, 10, 4):
        lives = [
            engine.start(random_prompt(7 + i, first + i), params)
            for i, params in enumerate(cases()[:10][first : first + 4])
        ]
        lives.append(engine.start(random_prompt(9, 1), sampled(12, 7)))
        engine.finish(lives)
        for live in lives:
            engine.release(live)
            drafts += sum(length > 1 for length in accepted([live]))
        for live in lives[:-1]:
            assert live.output == plain_choices(tiny.plain, live, engine.eos)
        assert lives[-1].output == tiny.plain.choices(lives[-1])
    assert (drafts > 0) == (settings != "none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("settings", ["none", "tree", "chain"])
def test_1_on_a_gpu_the_text_is_the_plain_models_under_the_grammar(
    tiny: Tiny, settings: str
) -> None:
    """With graphs: masks are made while the target verifies."""
    engine = constrain(tiny.engine(settings, device="cuda", dtype="float32"))
    free = engine.generate(random_prompt(11, 4), greedy(20)).output
    lives = [engine.start(random_prompt(7 + i, i), each) for i, each in enumerate(cases()[:2])]
    lives += [engine.start(random_prompt(11, 4), each) for each in rules(free)[:2]]
    lives.append(engine.start(random_prompt(9, 1), sampled(12, 7)))
    engine.finish(lives)
    for live in lives[:-1]:
        assert live.output == plain_choices(tiny.plain, live, engine.eos)
    assert lives[-1].output == tiny.plain.choices(lives[-1])


@pytest.mark.parametrize("name", ["eagle3", "mtp", "standalone", "ngram"])
def test_1_no_drafter_changes_a_constrained_text(tiny: Tiny, tmp_path: Any, name: str) -> None:
    """And what ends does fit."""
    settings = Settings(topk=3, steps=3, nodes=8)
    engine = constrain(DRAFTERS[name].engine(tmp_path, tiny.model, settings))
    for i, params in enumerate(cases()[:4]):
        live = engine.generate(random_prompt(8, i), params)
        assert live.output == plain_choices(tiny.plain, live, engine.eos)
        grammar = next(name for name in GRAMMARS if GRAMMARS[name].text == params.grammar)
        assert live.tokens[-1] == EOS and fits(grammar, text_of(live.output[:-1]))


EVEN = [*range(0, VOCAB, 2)]


def rules(output: list[int]) -> list[SamplingParams]:
    """For a request that writes this output without them: what it wrote is forbidden."""
    pairs = [list(pair) for pair in zip(output, output[1:])]
    by_grammar = under("open", seed=5, bad_word_ids=[[token] for token in output[::3]])
    return [
        greedy(20, allowed_token_ids=EVEN),
        greedy(20, bad_word_ids=[output[:1], pairs[3], output[5:8], output[2:5]]),
        sampled(20, 5, allowed_token_ids=[*EVEN, EOS], bad_word_ids=pairs, ignore_eos=False),
        sampled(20, 5, bad_word_ids=pairs, top_k=20, min_new_tokens=8, ignore_eos=True),
        msgspec.structs.replace(by_grammar, allowed_token_ids=[*EVEN, EOS]),
    ]


@pytest.mark.parametrize("settings", ["none", "tree", "tree-snapshot", "chain"])
def test_1_rules_of_tokens_hold_at_every_node(
    tiny: Tiny, engines: Callable[[str], Engine], settings: str
) -> None:
    """Alone and beside a grammar, greedy and sampled, in one batch; and they change the texts."""
    engine, prompt = engines(settings), random_prompt(11, 4)
    free = engine.generate(prompt, greedy(20)).output
    lives = [engine.start(prompt, params) for params in rules(free)]
    engine.finish(lives)
    for live in lives:
        engine.release(live)
        masks = [
            allowed_by(live.sampling, live.output[:i], engine.eos) for i in range(len(live.output))
        ]
        assert all(mask[token] for mask, token in zip(masks, live.output))
        assert live.output != free
        if not live.sampling.top_k > 0 and not live.sampling.min_new_tokens:
            assert live.output == plain_choices(tiny.plain, live, engine.eos)
    plain = [live.output for live in lives]
    for params, output in zip(rules(free), plain):
        assert engines("none").generate(prompt, params).output == output
    if settings != "none":
        assert any(length > 1 for length in accepted(lives))


def test_1_masks_of_a_tree_are_those_of_matchers_fed_with_each_path() -> None:
    """Random trees behind random valid prefixes, end tokens among the drafts; refused nodes' rows
    stay all ones (4), and the matcher is where it was."""
    luck, matchers = random.Random(5), Matchers(vocabulary, VOCAB, (EOS,))
    reached = ends = 0
    for _case in range(60):
        name = luck.choice(list(GRAMMARS))
        text, output = GRAMMARS[name].text, []
        for _ in range(luck.randrange(8)):
            going_on = [token for token in ids(allowed(text, output)) if token != EOS]
            if going_on:
                output.append(luck.choice(going_on))
        grammar = matchers.start(SamplingParams(grammar=text))
        grammar.advance(output)
        tokens, parents, paths = [0], [0], [[]]
        for node in range(1, luck.choice([1, 5, 12])):
            parents.append(luck.randrange(node))
            above = paths[parents[node]]
            choices = ids(allowed(text, [*output, *above])) if above is not None else []
            good = [token for token in choices if token != EOS or luck.random() < 0.5]
            token = luck.choice(good) if good and luck.random() < 0.7 else luck.randrange(VOCAB)
            tokens.append(token)
            paths.append([*above, token] if token in choices and token != EOS else None)
            ends += token == EOS and token in choices
        masks = np.full((len(tokens), 3), 0xFFFFFFFF, dtype=np.uint32)
        refused = fill_masks(grammar, tokens, parents, masks)
        for node, path in enumerate(paths):
            if path is not None:
                assert ids(unpacked(masks[node])) == ids(allowed(text, [*output, *path]))
                assert node not in refused
                reached += 1
            elif node in refused:
                assert (masks[node] == 0xFFFFFFFF).all()
        again = np.full((1, 3), 0xFFFFFFFF, dtype=np.uint32)
        assert fill_masks(grammar, [0], [0], again) == []
        assert ids(unpacked(again[0])) == ids(allowed(text, output))
    assert reached > 150 and ends > 5


def test_1_a_branch_of_a_tree_is_not_taken_for_another_one() -> None:
    """Behind x and behind y as much is parsed, the lexer expects the same, and the token "ab" may
    follow one of them alone: whatever remembers masks by the first two gives a wrong one."""
    rules = ('start: "x" p | "y" q', 'p: "a" ("b" | "c") | "d"', 'q: "a" ("c" | "e") | "d"')
    text = ebnf_grammar("\n".join(rules)).text
    x, y, ab = (Letters()(each)[0] for each in ("x", "y", "ab"))
    matchers = Matchers(vocabulary, VOCAB, (EOS,))
    for first, second in ((x, y), (y, x)):
        want = [ids(allowed(text, [token])) for token in (first, second)]
        assert (ab in want[0]) != (ab in want[1])
        grammar = matchers.start(SamplingParams(grammar=text))
        masks = np.full((3, 3), 0xFFFFFFFF, dtype=np.uint32)
        assert fill_masks(grammar, [0, first, second], [0, 0, 0], masks) == []
        assert [ids(unpacked(row)) for row in masks[1:]] == want
        below = [grammar.below(grammar.root, token) for token in (first, second)]
        asked = [grammar.mask(place) for place in below if place is not None]
        assert [ids(unpacked(row)) for row in asked if row is not None] == want


def unpacked(row: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB])


def ids(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def test_a_token_is_taken_if_and_only_if_the_mask_has_it() -> None:
    """But for end tokens, which only masks tell of. Where the text is forced, masks have one way to
    spell it."""
    luck, matchers = random.Random(5), Matchers(vocabulary, VOCAB, (EOS,))
    states = forced = 0
    for name in [*GRAMMARS] * 3:
        params = SamplingParams(grammar=GRAMMARS[name].text, ignore_eos=luck.random() < 0.5)
        grammar = matchers.start(params)
        for _ in range(12):
            taken = {i for i in range(VOCAB) if grammar.below(grammar.root, i)}
            one = grammar.forced(grammar.root)
            mask = grammar.mask()
            assert mask is not None
            allowed = {i for i in range(VOCAB) if is_allowed(mask, i)}
            assert taken == allowed - {EOS}
            assert one is None or allowed == {one}
            allowed -= {EOS}
            states, forced = states + 1, forced + (len(allowed) == 1)
            if not allowed:
                break
            grammar.advance([luck.choice(sorted(allowed))])
    assert states > 100 and forced > 10


def test_1_retracted_cached_and_in_odd_chunks_the_text_is_the_same(
    tiny: Tiny, engines: Callable[[str], Engine]
) -> None:
    """The matcher is rebuilt from the output that is prefilled again, even where a cached prefix
    holds some of it."""
    engine, prompt = engines("tree"), random_prompt(11, 2)
    for params in (under("schema", seed=3), under("reasoning", 45, seed=5)):
        whole = engine.generate(prompt, params).output
        half = [*prompt, *whole[: len(whole) // 2]]
        again = engine.generate(half, params, prompt_len=len(prompt), cuts=(5, 13))
        assert again.output == whole
        first = engine.start(half[:-1], greedy(2), saves=(len(prompt) + 2,))
        hit = first.saved[len(prompt) + 2]
        again = engine.generate(half, params, hit, prompt_len=len(prompt))
        assert again.output == whole
        engine.release(first)


# ── 2 to 4: sampling ─────────────────────────────────────────────────────────────────────────


def mask_of(tokens: list[int], rows: int = 1) -> TokenMasks:
    row = np.zeros(3, dtype=np.uint32)
    for token in tokens:
        row[token >> 5] |= np.uint32(1 << (token & 31))
    masks = torch.from_numpy(row.view(np.int32)).repeat(rows, 1)
    return TokenMasks(torch.arange(rows), masks)


def drawn(params: SamplingParams, logits: torch.Tensor, tokens: list[int]) -> int:
    state = SamplingState(1, VOCAB, (EOS,), host_backend())
    state.set(0, params, prompt_len=0, history=[])
    chosen = sample(state, [0], logits[None, None], torch.zeros(1, 1).long(), None, mask_of(tokens))
    return int(chosen)


def test_2_the_grammar_comes_after_the_bias_and_before_the_filters() -> None:
    logits = torch.zeros(VOCAB)
    logits[[5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    best_valid = SamplingParams(temperature=0.0)
    assert drawn(best_valid, logits, [6, 7]) == 6
    biased = SamplingParams(temperature=0.0, logit_bias={5: 1000.0, 7: 5.0})
    assert drawn(biased, logits, [6, 7]) == 7  # what is forbidden stays so, whatever its bias
    for filters in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        # of what the grammar leaves, not of all: else these would leave token 5 alone, or nothing
        params = SamplingParams(temperature=1.0, seed=1, **filters)
        assert drawn(params, logits, [6, 7]) == 6
    penalised = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert drawn(penalised, logits, [7]) == 7


def test_3_raw_logprobs_know_nothing_of_the_grammar(
    tiny: Tiny, engines: Callable[[str], Engine]
) -> None:
    """Float logits are not copied on their way to the sampler, so masking in place would show."""
    for settings in ("tree", "none"):
        engine = engines(settings)
        live = engine.generate(
            random_prompt(9, 4), under("schema", seed=2), return_logprob=True, top_logprobs=2
        )
        got = torch.tensor([each.logprob for each in live.logprobs])
        wanted = tiny.plain.logprobs(live.tokens)[live.prompt_len - 1 :]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        best = [each.top[0][1] for each in live.logprobs]
        assert best != live.output  # the grammar did refuse what the model would have said


def test_4_rows_of_refused_nodes_allow_all_and_give_no_nan() -> None:
    grammar = Matchers(vocabulary, VOCAB, (EOS,)).start(under("choice"))
    masks = np.full((3, 3), 0xFFFFFFFF, dtype=np.uint32)
    assert fill_masks(grammar, [0, 50, 51], [0, 0, 1], masks) == [1, 2]
    logits = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, seed=3)
    state = SamplingState(1, VOCAB, (EOS,), host_backend())
    state.set(0, params, 0, [])
    rows = TokenMasks(torch.arange(3), torch.from_numpy(masks.view(np.int32)))
    chosen = sample(state, [0], logits, torch.arange(3)[None], None, rows)
    assert NO_TOKEN not in chosen.flatten().tolist()


# ── 5 to 8: the end ──────────────────────────────────────────────────────────────────────────


def mask_behind(params: SamplingParams, text: str, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """What may follow a text."""
    known = vocabulary(eos)
    grammar = Matchers(lambda: known, VOCAB, eos).start(params)
    grammar.advance(Letters()(text))
    masks = np.full((1, 3), 0xFFFFFFFF, dtype=np.uint32)
    fill_masks(grammar, [0], [0], masks)
    assert not grammar.problem
    return ids(unpacked(masks[0]))


def test_5_behind_the_last_token_only_the_end_follows_and_it_may_be_drafted(
    engines: Callable[[str], Engine],
) -> None:
    assert mask_behind(under("choice"), "yes") == [EOS]
    grammar = Matchers(vocabulary, VOCAB, (EOS,)).start(under("choice"))
    yes = Letters()("yes")
    masks = np.full((3, 3), 0xFFFFFFFF, dtype=np.uint32)
    assert fill_masks(grammar, [0, *yes, EOS], [0, 0, 1], masks) == []
    assert ids(unpacked(masks[1])) == [EOS]
    assert fill_masks(grammar, [0], [0], masks[:1].copy()) == []  # it was rolled back


def test_6_ignore_eos_and_min_new_tokens_yield_to_the_grammars_end(
    engines: Callable[[str], Engine],
) -> None:
    """As long as something else may follow they hold; at the end they would leave no token."""
    more = mask_behind(under("open"), "a b")
    assert EOS in more
    for others in ({"ignore_eos": True}, {"min_new_tokens": 9}):
        assert mask_behind(under("open", **others), "a b") == [t for t in more if t != EOS]
        assert mask_behind(under("choice", **others), "yes") == [EOS]
    assert EOS in mask_behind(under("open", min_new_tokens=2), "a b")
    for settings in ("none", "tree"):
        for others in ({"ignore_eos": True}, {"min_new_tokens": 30}):
            live = engines(settings).generate(random_prompt(5, 1), under("regex", **others))
            assert live.tokens[-1] == EOS and fits("regex", text_of(live.output[:-1]))
        live = engines(settings).generate(random_prompt(5, 1), under("open", 20, ignore_eos=True))
        assert len(live.output) == 20 and EOS not in live.output


def test_7_padding_is_never_allowed_and_every_end_token_is() -> None:
    """The logits are wider than the tokenizer: 96 tokens of which 14 have no text."""
    known = len(Letters().tokens) - sum(t.startswith(b"<unused") for t in Letters().tokens)
    anything = regex_grammar(r"(.|\n)+")
    wide = Vocabulary(TokenizerWrapper(Letters(known)), VOCAB, (EOS,))
    mask = np.frombuffer(wide.matcher(anything.text).compute_bitmask(), dtype=np.uint8)
    tokens = np.unpackbits(mask, bitorder="little")[:VOCAB].nonzero()[0].tolist()
    assert tokens == list(range(3, known)) and known < VOCAB
    assert mask_behind(under("choice"), "yes", (EOS, 95)) == [EOS, 95]


def test_8_only_what_was_accepted_advances_the_matcher(
    tiny: Tiny, engines: Callable[[str], Engine]
) -> None:
    """A stop token inside a path cuts it; the next request in the slot starts anew."""
    engine = engines("tree")
    prompt, params = random_prompt(9, 3), under("reasoning", 45, seed=5)
    whole = engine.generate(prompt, params).output
    for at in range(4, len(whole) - 1, 5):
        if whole[at] in whole[:at]:
            continue
        cut = under("reasoning", 45, seed=5, stop_token_ids=[whole[at]])
        live = engine.start(prompt, cut)
        slot = live.slot
        engine.finish([live])
        grammar = engine.runner.constraints._of[slot]
        assert live.output == whole[: at + 1] == grammar.output
        engine.release(live)
        assert slot not in engine.runner.constraints._of
    assert engine.generate(prompt, params).output == whole


# ── 9: reasoning ─────────────────────────────────────────────────────────────────────────────


def test_9_reasoning_is_part_of_the_grammar() -> None:
    """Its end may be text or a special token, and a tree may cross it."""
    digits_only = regex_grammar("[0-9]{3}")
    lazy = thinking_first(digits_only, Tags("{", "#"), "open")
    special = thinking_first(digits_only, Tags("{", "<x>"), "open", {"<x>": 95})
    assert lazy is not None and special is not None
    free = ids(allowed(lazy.text, Letters()("some thing")))
    assert len(free) > 70 and EOS not in free
    digits = [token for token in range(VOCAB) if Letters().tokens[token].isdigit()]
    for grammar, end in ((lazy, Letters()("#")), (special, [95])):
        behind = allowed(grammar.text, [*Letters()("ab{"), *end])
        assert set(digits) < set(ids(behind)) <= {*digits, *Letters()(" \n")}
    assert 95 in ids(allowed(special.text, Letters()("a#")))
    request = Matchers(vocabulary, VOCAB, (EOS,)).start(SamplingParams(grammar=lazy.text))
    request.advance(Letters()("so"))
    (one,), (end,), (letter,) = (Letters()(text) for text in "1#x")
    masks = np.full((6, 3), 0xFFFFFFFF, dtype=np.uint32)
    # so ── x ── 1 , and so ── # ── 1, x: behind the end of reasoning only digits
    assert fill_masks(request, [0, letter, end, one, one, letter], [0, 0, 0, 1, 2, 2], masks) == [5]
    assert letter in ids(unpacked(masks[3])) and set(ids(unpacked(masks[4]))) == set(digits)


# ── 10: white space ────────────────────────────────────────────────────────────────────────────


def test_10_json_is_compact() -> None:
    """A weak model could go on with blanks for ever."""
    grammar = json_schema_grammar({"type": "object"}).text
    blanks = set(Letters()(" \n"))
    (blank,) = Letters()(" ")
    for text, expected in (
        ("{", set()),
        ('{"a":', {blank}),
        ('{"a": ', set()),
        ('{"a": 1,', {blank}),
        ('{"a": 1, ', set()),
    ):
        assert blanks & set(ids(allowed(grammar, Letters()(text)))) == expected, text


NUMBER, WORD = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "maxLength": 5}
LIST = {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3}
POINT = {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x", "y"]}
SCHEMAS: dict[str, Any] = {
    "list": LIST,
    "enum": {"enum": ["yes", {"a": [1, 2]}, None, 1.5]},
    "nested": {**POINT, "properties": {"x": LIST, "y": POINT}, "additionalProperties": False},
    "choice": {"anyOf": [NUMBER, {**LIST, "items": NUMBER}]},
    "pattern": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[ab]{2,4}$"},
        "minItems": 2,
    },
    "reference": {
        "$defs": {"p": {**POINT, "additionalProperties": False}},
        "type": "array",
        "items": {"$ref": "#/$defs/p"},
        "minItems": 1,
        "maxItems": 2,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_10_what_fits_a_schema_is_compact_with_drafts_and_without(
    engines: Callable[[str], Engine], name: str
) -> None:
    ended = 0
    for seed in range(4):
        grammar = json_schema_grammar(SCHEMAS[name]).text
        params = SamplingParams(grammar=grammar, max_new_tokens=90, seed=seed)
        output = engines("none").generate(random_prompt(8, seed), params).output
        assert engines("tree").generate(random_prompt(8, seed), params).output == output
        if output[-1] == EOS:
            ended += 1
            text = text_of(output[:-1])
            value = json.loads(text)
            assert Draft202012Validator(SCHEMAS[name]).is_valid(value)
            assert len(text) <= 1.1 * len(json.dumps(value, ensure_ascii=False))
    assert ended


# ── 12: errors ───────────────────────────────────────────────────────────────────────────────


def test_12_a_grammar_that_fails_ends_its_request_alone(
    tiny: Tiny, engines: Callable[[str], Engine]
) -> None:
    for settings in ("none", "tree"):
        engine = engines(settings)
        good = engine.start(random_prompt(6, 1), under("schema", seed=1))
        bad = engine.admit(random_prompt(6, 2), SamplingParams(grammar='{"grammars": [{}]}'))
        item = engine.chunk(bad, len(bad.tokens))
        result = engine.execute(prefill=[item], decode=[good]).prefill[0]
        assert not result.tokens and result.problem
        engine.finish([good])
        engine.release(good)
        engine.release(bad)
        assert good.output == plain_choices(tiny.plain, good, engine.eos)


def test_12_a_matcher_that_fails_while_decoding_says_why(
    tiny: Tiny, engines: Callable[[str], Engine]
) -> None:
    engine = engines("tree")
    good = engine.start(random_prompt(6, 1), under("schema", seed=1))
    bad = engine.start(random_prompt(6, 2), under("open"))
    engine.runner.constraints._of[bad.slot].problem = "a limit of the lexer is exceeded"
    result = engine.execute(decode=[bad, good])
    assert result.decode[0].tokens == [] and "limit" in result.decode[0].problem
    assert result.decode[1].tokens and not result.decode[1].problem
    engine.finish([good])
    for live in (good, bad):
        engine.release(live)


def test_12_an_error_behind_a_draft_harms_nothing_but_the_draft() -> None:
    """Plain decoding would not have met it, so the text must not."""
    grammar = Matchers(vocabulary, VOCAB, (EOS,)).start(under("open"))
    masks = np.full((3, 3), 0xFFFFFFFF, dtype=np.uint32)
    fill_masks(grammar, [0], [0], masks[:1])
    matcher = grammar._matcher

    class Failing:
        """Its copies fail, which are asked for masks behind drafted tokens."""

        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def deep_copy(self) -> Failing:
            return Failing(True)

        def is_error(self) -> bool:
            return self.fails

        def get_error(self) -> str:
            return "no fuel"

    grammar.__dict__["_matcher"] = Failing(False)
    tokens = Letters()("ab")[:1] + Letters()("c")
    assert fill_masks(grammar, [0, *tokens], [0, 0, 1], masks) == [2]
    assert not grammar.problem and not masks[1].any() and masks[0].any()
    again = np.full((1, 3), 0xFFFFFFFF, dtype=np.uint32)
    fill_masks(grammar, [0], [0], again)
    assert (again[0] == masks[0]).all()


def test_forced_tokens_are_drafted_and_refused_ones_are_not(tiny: Tiny) -> None:
    """With a drafter that never drafts a token that fits, whole runs are accepted all the same:
    the trees are made of forced tokens then. The text is what it is without them."""
    for drafter, settings in (("ngram", Settings("NGRAM", topk=3, steps=3, nodes=8)), ("", TREE)):
        head = None if drafter else tiny.head
        engine, other = (constrain(Engine(tiny.model, head, settings)) for _ in range(2))
        other.runner.constraints.steers_drafts = False
        params = [under("schema", seed=seed) for seed in range(3)]
        lives = [engine.generate(random_prompt(8, 1), each) for each in params]
        plain = [other.generate(random_prompt(8, 1), each) for each in params]
        assert [live.output for live in lives] == [live.output for live in plain]
        steps, without = (sum(len(live.steps) for live in each) for each in (lives, plain))
        assert 1.5 * steps < without if drafter else steps <= without


def test_a_network_is_not_asked_about_requests_whose_text_is_forced(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch; those that are asked about draft what they would alone."""
    engine = constrain(tiny.engine(TREE))
    grow, asked = Growth.grow, list[int]()

    def counted(self: Growth, slots: torch.Tensor, *others: Any) -> Any:
        asked.append(len(slots))
        return grow(self, slots, *others)

    monkeypatch.setattr(Growth, "grow", counted)
    params = [under("schema", seed=1), under("schema"), under("open", 15, seed=2)]
    lives = [engine.start(random_prompt(8 + i, i), each) for i, each in enumerate(params)]
    engine.finish(lives)
    for live in lives:
        assert live.output == plain_choices(tiny.plain, live, engine.eos)
    needed = sum(len(live.steps) for live in lives)
    assert 0 < sum(asked) < needed and 1 < max(asked) <= len(lives)
    alone = [engine.generate(random_prompt(8 + i, i), each) for i, each in enumerate(params)]
    assert [accepted([live]) for live in alone] == [accepted([live]) for live in lives]


def test_a_network_rests_behind_a_choice_and_while_all_text_is_forced(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted tokens wait meanwhile, and it goes on from all of them."""
    engine = constrain(tiny.engine(TREE._replace(steps=5)))
    called: dict[str, list[int]] = {"_add_forced": [], "run_pending": []}

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def call(self: Any, *arguments: Any) -> Any:
            called[name].append(arguments[-1])  # levels that are left, and entries
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, call)

    counted(Growth, "_add_forced")
    counted(ModelDrafter, "run_pending")
    lives = [engine.generate(random_prompt(8, i), under("schema", seed=i)) for i in range(3)]
    for live in lives:
        assert live.output == plain_choices(tiny.plain, live, engine.eos)
    steps = sum(len(live.steps) for live in lives)
    assert 0 < len(called["run_pending"]) < steps
    assert called["_add_forced"] and set(called["_add_forced"]) <= {1, 2, 3, 4}


def test_reshaped_trees_keep_what_may_be_accepted_and_stay_within_their_shape() -> None:
    """Random trees: as many nodes, none too deep, parents first, no token twice below a parent."""
    luck, matchers = random.Random(7), Matchers(vocabulary, VOCAB, (EOS,))
    changed = forced = 0
    for _ in range(60):
        grammar = matchers.start(SamplingParams(grammar=GRAMMARS[luck.choice(list(GRAMMARS))].text))
        size, depths, taken = luck.choice([2, 4, 9]), [0], set()
        tokens, parents, scores = [0], [0], [0.0]
        while len(tokens) < size:
            parent, token = luck.randrange(len(tokens)), luck.randrange(VOCAB)
            if depths[parent] < 4 and (parent, token) not in taken:
                taken.add((parent, token))
                parents.append(parent)
                tokens.append(token)
                depths.append(depths[parent] + 1)
                scores.append(scores[parent] - luck.random())
        tree = DraftTree(tokens, parents, scores)
        new = reshape(grammar, tree, 4)
        changed += new is not tree
        depth, edges = [0], set()
        for node in range(1, size):
            assert new.parents[node] < node and new.scores[node] <= new.scores[new.parents[node]]
            depth.append(depth[new.parents[node]] + 1)
            edges.add((new.parents[node], new.tokens[node]))
        assert len(new.tokens) == size and len(edges) == size - 1
        assert depth == sorted(depth) and depth[-1] <= 4
        masks = np.full((2, size, 3), 0xFFFFFFFF, dtype=np.uint32)
        refused = [
            fill_masks(grammar, each.tokens, each.parents, mask)
            for each, mask in zip((tree, new), masks)
        ]
        forced += len(refused[0]) - len(refused[1])
        assert len(refused[1]) <= len(refused[0])
    assert changed > 30 and forced > 20


def test_a_tree_of_refused_nodes_gives_plain_decodings_token(tiny: Tiny) -> None:
    """Whatever is drafted."""
    engine, plain = constrain(tiny.engine(TREE)), constrain(tiny.engine(PLAIN))
    propose = engine.runner.drafter.propose

    def nonsense(slots: Any, part: Any, noise: Any) -> Any:
        tree = propose(slots, part, noise)
        tree.tokens[:, 1:] = 0  # padding, which no grammar allows
        return tree

    engine.runner.drafter.propose = nonsense  # type: ignore[method-assign]
    engine.runner.constraints.steers_drafts = False
    live = engine.generate(random_prompt(8, 1), under("schema", seed=3), return_spec_trace=True)
    assert live.output == plain.generate(random_prompt(8, 1), under("schema", seed=3)).output
    assert accepted([live]) == [1] * len(live.steps)
    for step in live.steps:
        assert step.trace.refused == list(range(1, 12))


def test_ebnf_and_lives_of_many_requests_share_one_base(tiny: Tiny) -> None:
    engine = constrain(tiny.engine(TREE))
    text = ebnf_grammar('root ::= [ab]+ "-" [0-9]').text
    params = SamplingParams(grammar=text, temperature=0.0, max_new_tokens=30)
    lives: list[Live] = [engine.start(random_prompt(5, i), params) for i in range(3)]
    engine.finish(lives)
    assert len(engine.runner.constraints.matchers._bases) == 1
    for live in lives:
        assert live.output == plain_choices(tiny.plain, live, engine.eos)


def test_12_a_limit_that_shows_late_is_named_and_the_automaton_is_dropped() -> None:
    """Another request with the same grammar begins with a lexer of its own, which has no error."""
    ends = "abcdefghijklmnopqrstuvwx"
    gated = [f"(q{{0,30}}z|q{{30}}.*{letter}.{{{i}}})" for i, letter in enumerate(ends)]
    text = ebnf_grammar("start: T\nT: " + " & ".join(f"/{one}/" for one in gated)).text
    matchers = Matchers(vocabulary, VOCAB, (EOS,))
    (q,) = Letters()("q")
    for _ in range(2):
        grammar = matchers.start(SamplingParams(grammar=text))
        for _ in range(40):
            if grammar.mask() is None:
                break
            grammar.advance([q])
        assert len(grammar.output) > 25 and "too many steps" in grammar.problem
        assert text not in matchers._bases
