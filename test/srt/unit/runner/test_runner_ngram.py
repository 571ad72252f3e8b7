"""NGRAM through the runner: what it learns, from whom, and what it forgets."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_harness import (
    Engine,
    Live,
    PlainModel,
    Settings,
    accepted,
    approximately,
    greedy,
    random_prompt,
    sampled,
)
from tiny_model import write_model

from mamba_eagle.backend.place import Cuda, Host
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.config import ConfigError
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.drafting.base import StepPart
from mamba_eagle.drafting.ngram import MAX_UNREAD, NgramDrafter, NgramIndex
from mamba_eagle.message import FirstChunk, PrefillItem
from mamba_eagle.message.indices import indices
from mamba_eagle.tree.accept import Truncated

torch.set_num_threads(1)

SHAPES = {
    "tree": Settings("NGRAM", topk=3, steps=4, nodes=10),
    "chain": Settings("NGRAM", topk=1, steps=4, nodes=5),
}
PROMPT = random_prompt(30, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def serve(engine: Engine, prompt: list[int], seed: int, kept: bool) -> Live:
    """A request from beginning to end; ``kept``: its text goes to the prefix cache."""
    live = engine.start(prompt, sampled(40, seed))
    engine.finish([live])
    engine.release(live, fold_to=live.processed if kept else -1)
    return live


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_that_repeats_itself_is_accepted_whole(target: Path, shape: str) -> None:
    """A bias leaves the target no choice but one token."""
    engine = Engine(target, None, SHAPES[shape])
    live = engine.generate(PROMPT, greedy(41, logit_bias={7: 1e4}))
    assert live.output == [7] * 41
    assert set(accepted([live])[2:-1]) == {5}, "two tokens tell what comes next"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_request_again_is_drafted_nearly_perfectly(target: Path, shape: str) -> None:
    engine = Engine(target, None, SHAPES[shape])
    first = serve(engine, PROMPT, 3, kept=True)
    again = serve(engine, PROMPT, 3, kept=True)
    assert again.output == first.output == PlainModel(target).choices(first)
    assert len(again.steps) <= 10 < 20 < len(first.steps), "39 tokens, five a step"


def test_an_aborted_request_teaches_nothing(target: Path) -> None:
    engine = Engine(target, None, SHAPES["tree"])
    first = serve(engine, PROMPT, 3, kept=False)
    again = serve(engine, PROMPT, 3, kept=False)
    assert accepted([again]) == accepted([first])
    assert again.proposals == first.proposals


@pytest.mark.parametrize("salted", [True, False])
def test_a_salted_request_teaches_nothing_and_the_next_one_of_its_slot_does(salted: bool) -> None:
    """Traces show drafts, and a salt is there to hide what was asked."""
    index = NgramIndex(1, 2000, 10_000, 6)
    drafter = NgramDrafter(index, RequestTable(1, 2000, torch.device("cpu")), Host())
    empty, features = index.nodes[index.finished].copy(), torch.zeros(1)
    for hidden in (salted, not salted):
        first = FirstChunk(sampling=SamplingParams(), output_start=4, salted=hidden)
        slots = {"slot": 0, "state_slot": 0, "start": 0, "kv_slots": indices()}
        item = PrefillItem(token_ids=indices([5, 6, 7, 8]), first=first, **slots)
        before = index.nodes[index.finished].copy()
        drafter.observe_prefill([item], torch.tensor([0]), features, features)
        drafter.release([0], [4])
        assert np.array_equal(index.nodes[index.finished], before) == hidden
    assert not np.array_equal(index.nodes[index.finished], empty)


def test_the_end_of_a_text_is_learnt_with_it(target: Path) -> None:
    """The last token is never run, but it is in the text."""
    engine = Engine(target, None, SHAPES["chain"])
    first = serve(engine, PROMPT, 3, kept=True)
    known = first.tokens[: first.prompt_len + 38]
    again = engine.start(known, sampled(2, 3), prompt_len=first.prompt_len)
    engine.execute(decode=[again])
    assert again.proposals[0].tokens[1] == first.tokens[-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_prefix_is_drafted_from_as_if_it_had_been_run(target: Path, shape: str) -> None:
    """The first output token stands in the prefix; what followed it there is drafted."""
    prompt, how = PROMPT + random_prompt(8, 2), greedy(6, logit_bias={PROMPT[4]: 1e4})
    fresh = Engine(target, None, SHAPES[shape]).generate(prompt, how)
    assert fresh.proposals[0].tokens[1] == PROMPT[5]
    engine = Engine(target, None, SHAPES[shape])
    saver = engine.start(PROMPT, sampled(5, 1), saves=(29,))
    hit = engine.start(prompt, how, hit=saver.saved[29], cuts=(33,))
    engine.finish([saver, hit])
    assert hit.output == fresh.output
    assert hit.proposals == approximately(fresh.proposals)


def test_what_plain_steps_made_is_drafted_from(target: Path) -> None:
    """More of them than are read at once."""
    engine = Engine(target, None, SHAPES["chain"])
    live = engine.start(PROMPT, greedy(MAX_UNREAD + 20, logit_bias={7: 1e4}))
    for _ in range(MAX_UNREAD + 5):
        engine.execute(decode=[live], shape=TreeShape())
    engine.execute(decode=[live])
    assert live.proposals[-1].tokens == [7] * 5
    assert len(live.steps[-1].tokens) == 5


def test_a_released_slot_is_forgotten(target: Path) -> None:
    """Whoever takes it next drafts from a text of its own."""
    engine = Engine(target, None, SHAPES["tree"], max_running_requests=1)
    drafter = engine.runner.drafter
    assert isinstance(drafter, NgramDrafter)
    alone = engine.generate(random_prompt(20, 8), sampled(15, 8))
    for seed in range(3):
        serve(engine, random_prompt(25, seed), seed, kept=False)
        assert not drafter.index.roots.any()
    after = engine.generate(random_prompt(20, 8), sampled(15, 8))
    assert after.proposals == alone.proposals


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_trees_are_the_indexs_on_any_device(device: str) -> None:
    """Told of tensors there, over more steps than are read at once; a request had ended."""
    shape, texts = TreeShape(topk=2, depth=3, nodes=6), [random_prompt(20, 1), [5, 6, 5, 6]]
    alone, told = (NgramIndex(2, 2000, 10_000, 6) for _ in range(2))
    place = Cuda(torch.device(device)) if device == "cuda" else Host()
    drafter = NgramDrafter(told, RequestTable(2, 2000, place.device), place)
    slots = torch.tensor([1, 0], device=device)
    features = torch.zeros(1, device=device)
    for slot, text in enumerate(texts):
        item = PrefillItem(
            slot=slot,
            state_slot=slot,
            start=0,
            token_ids=indices(text),
            kv_slots=indices(),
            first=FirstChunk(sampling=SamplingParams(), output_start=len(text)),
        )
        drafter.observe_prefill([item], slots, features, features)
        drafter.observe_first_tokens([slot], torch.tensor([7 + slot], device=device), features)
        alone.begin(slot, [*text, 7 + slot])
    rng = random.Random(3)
    for _ in range(MAX_UNREAD + 5):
        tokens = [[rng.randrange(9) for _ in range(3)] for _ in slots]
        counts = [rng.randint(0, 3) for _ in slots]
        rows = (torch.tensor(part, device=device) for part in (tokens, tokens, counts, counts))
        drafter.observe_accepted(slots, Truncated(*rows), features)
        for slot, row, count in zip((1, 0), tokens, counts):
            alone.append(slot, row[:count])
    tree = drafter.propose(slots, StepPart(shape), None)
    expected = [np.empty(part.shape, str(part.dtype).removeprefix("torch.")) for part in tree]
    alone.draft([1, 0], shape, *expected)
    for part, wanted in zip(tree, expected):
        assert part.device.type == device and part.is_contiguous()
        assert part.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "flag, value, remedy",
    [
        ("speculative_ngram_max_trie_depth", 1, "--speculative-ngram-max-trie-depth 1: must be 2"),
        ("speculative_ngram_capacity", 5, "--speculative-ngram-capacity 5: must be 19 or more"),
    ],
)
def test_flags_that_leave_nothing_to_match_are_refused(
    target: Path, flag: str, value: int, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Engine(target, None, SHAPES["tree"], **{flag: value})
