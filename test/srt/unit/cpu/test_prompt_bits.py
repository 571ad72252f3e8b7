"""On a CPU a token has the same numbers, bit by bit, in whatever pieces its prompt is processed: in
one pass or in several, behind a cached state, beside other requests, and as a decoded token."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from runner_harness import PLAIN, Engine, Live, Prefix, greedy
from step_rig import made
from test_step_bits import CONVOLUTIONS, DELTA_SIZES, SIZES, written
from tiny_model import VOCAB
from torch import Tensor

from mamba_eagle.cpu.programs.prompts import MOST_TOKENS

LENGTH = MOST_TOKENS + 30  # whole it runs layer by layer, its pieces as programs
SCALE = int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1"))


class Passes:
    """An engine, and the features of all tokens that a pass over prompts processes."""

    def __init__(self, model: Path, quantization: str) -> None:
        sizes = {"max_total_tokens": 3000, "max_mamba_cache_size": 100}
        self.engine = Engine(model, None, PLAIN, quantization=quantization, **sizes)
        self.found: list[Tensor] = []
        forward = self.engine.runner.model.forward

        def noted(*arguments: Tensor) -> Tensor:
            self.found.append(forward(*arguments))
            return self.found[-1]

        self.engine.runner.model.forward = noted

    def run(self, *lives: tuple[Live, int]) -> list[Tensor]:
        """One pass over each request's next tokens, up to a position: the features of each. The
        first one's last state is saved."""
        self.found.clear()
        items = [
            self.engine.chunk(live, end, saves=(end,) if i == 0 else ())
            for i, (live, end) in enumerate(lives)
        ]
        results = self.engine.execute(prefill=items).prefill
        for (live, _), item, result in zip(lives, items, results, strict=True):
            self.engine.after_chunk(live, item, result)
        (features,) = self.found
        return list(features.split([len(item.token_ids) for item in items]))

    def in_pieces(self, prompt: list[int], largest: int, hit: Prefix | None, seed: int) -> Live:
        """Pieces of 1 to ``largest`` tokens, beside those of two other prompts; their features are
        in ``pieces``."""
        chance = random.Random(seed)
        live = self.engine.admit(prompt, greedy(2), hit)
        others = [self.engine.admit(prompt_of(k, 150), greedy(2)) for k in (1, 2)]
        self.pieces = []
        while live.processed < len(prompt):
            lives = [(live, min(len(prompt), live.processed + chance.randint(1, largest)))]
            for other in others:
                if other.processed < 130:
                    lives.append((other, other.processed + chance.randint(1, 20)))
            self.pieces.append(self.run(*lives)[0])
        for other in others:
            self.engine.release(other)
        return live


def prompt_of(number: int, length: int = LENGTH) -> list[int]:
    return [(7 * k * k + 3 * k + number) % VOCAB for k in range(length)]


@pytest.fixture(scope="module", params=[*SIZES, *DELTA_SIZES, *CONVOLUTIONS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_a_prompt_has_the_same_bits_in_any_pieces(quantization: str, model: Path) -> None:
    passes, prompt = Passes(model, quantization), prompt_of(0)
    engine, pool = passes.engine, passes.engine.runner.pool
    whole = engine.admit(prompt, greedy(2))
    (exact,) = passes.run((whole, LENGTH))
    for largest in [17, 90] * SCALE:
        live = passes.in_pieces(prompt, largest, None, seed=largest)
        assert torch.equal(torch.cat(passes.pieces), exact)
        # behind a state that an earlier piece has left, at any position
        begin = sorted(live.saved)[len(live.saved) // 2]
        again = passes.in_pieces(prompt, largest, live.saved[begin], seed=begin)
        assert torch.equal(torch.cat(passes.pieces), exact[begin:])
        for other in (live, again):
            assert other.tokens == whole.tokens
            for part in (pool.ssm, pool.conv):
                assert torch.equal(part[:, other.state_slot], part[:, whole.state_slot])
            engine.release(other)
            for prefix in other.saved.values():
                engine.free_state(prefix.state_slot)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_a_token_has_the_same_bits_in_a_prompt_as_when_it_was_decoded(
    quantization: str, model: Path
) -> None:
    """A request that is retracted goes on with its output as part of its prompt."""
    passes = Passes(model, quantization)
    (text,) = made(passes.engine, [prompt_of(0, 20)], 30)
    tokens = text.live.tokens
    live = passes.engine.admit(tokens, greedy(2))
    (features,) = passes.run((live, len(tokens)))
    with torch.inference_mode():
        logits = passes.engine.runner.model.step_logits(features)
    assert len(text.logits) >= 29
    for position in text.logits:
        assert logits[position].numpy().tobytes() == text.bits(position)
