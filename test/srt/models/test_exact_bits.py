"""--exact on a GPU: a token's log-probabilities are equal to the bit, whatever served it.

Random schedules of the runner: requests side by side, drafted or not, prompts in chunks and from
states inside of them. The reference serves each request alone. A round has 72 schedules;
MAMBA_EAGLE_CASES gives the number of rounds (CI: 1).
"""

from __future__ import annotations

import gc
import json
import os
import random
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runner_harness import Engine, Live, Settings, greedy, random_prompt, sampled

from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL

pytestmark = pytest.mark.gpu

GEOMETRIES = Path(__file__).parents[3] / "benchmark" / "models"
CUT = {  # published geometries -> four of their layers
    "nemotron-nano-9b-v2": {"hybrid_override_pattern": "M-M*"},
    "nemotron-3-nano-30b-a3b": {"hybrid_override_pattern": "ME*M"},
    "nemotron-3-super": {"hybrid_override_pattern": "ME*M"},
    "granite-4.0-h-tiny": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "qwen3.6-27b": {},
    "qwen3.6-35b-a3b": {},
}
CASES = [
    ("embedded", "auto"),
    *((name, bits) for name in list(CUT)[:2] for bits in ("auto", "fp8")),
    *zip(list(CUT)[2:4], ("fp8", "auto"), strict=True),
    *((name, bits) for name in list(CUT)[4:] for bits in ("auto", "fp8", "mtp")),
]
SHAPES = [
    Settings("NONE"),
    Settings(topk=3, steps=4, nodes=8),
    Settings(topk=6, steps=7, nodes=40),
]
ROUNDS = int(os.environ.get("MAMBA_EAGLE_CASES", "1"))
ASKS = {"return_logprob": True, "top_logprobs": 3}


class Request(NamedTuple):
    prompt: list[int]
    sampling: SamplingParams


class Source(NamedTuple):
    """A model, and what engines of it have in common."""

    folder: Path
    head: Path | None
    algorithm: str  # of drafts
    options: dict[str, Any]

    def engine(self, settings: Settings, exact: bool, **others: Any) -> Engine:
        if settings.algorithm != "NONE":
            settings = settings._replace(algorithm=self.algorithm)
        sizes = {"max_running_requests": 8, "max_total_tokens": 8000, "max_mamba_cache_size": 24}
        gc.collect()  # graphs of the engine before
        values = {"device": "cuda", "dtype": "bfloat16", **sizes, **self.options, **others}
        return Engine(self.folder, self.head, settings, exact=exact, **values)


def source(name: str, bits: str, folder: Path) -> Source:
    if name == "embedded":
        return Source(EMBEDDED_MODEL, EMBEDDED_HEADS["EAGLE"], "EAGLE", {})
    config = json.loads((GEOMETRIES / name / "config.json").read_text())
    config |= {**CUT[name], "num_hidden_layers": 4, "vocab_size": 8192, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    if bits == "mtp":
        return Source(folder, None, "MTP", {"load_format": "dummy"})
    # the same random weights draft, so that drafts are accepted
    return Source(folder, folder, "STANDALONE", {"load_format": "dummy", "quantization": bits})


def requests(rng: random.Random, count: int, vocab: int) -> list[Request]:
    made = []
    for seed in rng.sample(range(2**32), count):
        most = rng.choice((200, 200, 700))  # products have other tiles from 257 tokens on
        prompt = [token % vocab for token in random_prompt(rng.randrange(1, most), seed)]
        length = rng.randrange(8, 48)
        made.append(Request(prompt, rng.choice([greedy(length), sampled(length, seed)])))
    return made


def serve(engine: Engine, given: list[Request], rng: random.Random) -> list[Live]:
    """Side by side, each joining the others at some time with its prompt in random chunks, or going
    on from a state inside of it."""
    waiting, running, done = list(enumerate(given)), [], {}
    while waiting or running:
        if waiting and len(running) < 6 and (not running or rng.random() < 0.6):
            number, (prompt, sampling) = waiting.pop()
            cuts = tuple(rng.sample(range(1, max(200, len(prompt))), rng.randrange(4)))
            hit = None
            if len(prompt) > 9 and rng.random() < 0.4:
                end = rng.randrange(1, len(prompt) - 1)
                hit = engine.release(engine.start(prompt[:end], greedy(1)), end)
            live = engine.start(prompt, sampling, hit, cuts=cuts, **ASKS)
            running.append((number, live))
            continue
        engine.execute(decode=[live for _, live in running])
        for number, live in [pair for pair in running if engine.ended(pair[1])]:
            engine.release(live)
            done[number] = live
            if live.hit is not None:
                engine.free(live.hit.kv_slots)
                engine.free_state(live.hit.state_slot)
        running = [pair for pair in running if not engine.ended(pair[1])]
    return [done[number] for number in range(len(given))]


def told(live: Live) -> list[tuple[int, float | None, Any]]:
    return [(each.token_id, each.logprob, each.top) for each in live.logprobs]


@dataclass
class Comparison:
    schedules: int = 0  # requests, each with its own chunks, state, neighbours and trees
    tokens: int = 0
    texts: int = 0  # that differ
    differ: list[str] = field(default_factory=list)  # tokens that do, or their log-probabilities

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {self.texts} texts differ; {self.tokens} tokens, "
            f"{len(self.differ)} differ"
        )

    def add(self, live: Live, other: Live, where: str) -> None:
        self.schedules += 1
        self.tokens += len(other.logprobs)
        self.texts += live.tokens != other.tokens
        for at, pair in enumerate(zip_longest(told(live), told(other))):
            if pair[0] != pair[1]:
                self.differ.append(f"{where} at {at}: {pair[0]}, {pair[1]}")


def compare(source: Source, exact: bool, about: str) -> Comparison:
    """Each round has other requests. What was found is printed, also when time is up."""
    found = Comparison()
    try:
        _compare(source, exact, found)
    finally:
        print(f"{about}: {found}")
    return found


def _compare(source: Source, exact: bool, found: Comparison) -> None:
    plain, rounds = source.engine(SHAPES[0], exact), []
    for seed in range(ROUNDS):
        given = requests(random.Random(seed), 24, plain.runner.ready.vocab_size)
        rounds.append((given, [plain.generate(*request, **ASKS) for request in given]))
    for shape in SHAPES:
        engine, rng = source.engine(shape, exact), random.Random(1)
        for seed, (given, wanted) in enumerate(rounds):
            for number, live in enumerate(serve(engine, given, rng)):
                where = f"round {seed}, {shape.nodes} nodes, request {number}"
                found.add(live, wanted[number], where)
        del engine


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, bits", CASES, ids=lambda part: str(part))
def test_no_schedule_changes_a_bit(name: str, bits: str, tmp_path: Path) -> None:
    found = compare(source(name, bits, tmp_path), True, f"{name} {bits}")
    assert not found.differ, "\n".join(found.differ[:20])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "qwen3.6-27b"])
def test_without_the_flag_bits_differ(name: str, tmp_path: Path) -> None:
    """So the comparison above can see."""
    found = compare(source(name, "auto", tmp_path), False, f"{name} without the flag")
    assert found.differ


@pytest.mark.timeout(600)
def test_a_text_is_scored_as_it_was_decoded(tmp_path: Path) -> None:
    one = source("nemotron-nano-9b-v2", "auto", tmp_path).engine(SHAPES[2], exact=True)
    for seed in range(6):
        prompt = [token % 8192 for token in random_prompt(40 + 17 * seed, seed)]
        live = one.generate(prompt, greedy(40), return_logprob=True)
        scored = one.start(live.tokens, greedy(1), logprob_start=len(prompt), cuts=(77,))
        one.release(scored)
        assert [each.logprob for each in scored.input_logprobs] == [
            each.logprob for each in live.logprobs
        ]
