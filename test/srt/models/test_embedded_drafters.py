"""The drafters that come with the embedded model: heads, and a smaller model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mamba_eagle.bench.batch import BatchEngine, Generation, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import ASSETS, EMBEDDED_DRAFTERS
from mamba_eagle.eval import gsm8k
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

torch.set_num_threads(1)
PROBLEMS, MAX_TOKENS = 8, 120
MIN_LENGTH = {0.0: 5.0, 1.0: 4.6}  # tokens per step, by temperature; measured: 5.5 and 5.4 at least
SHORTER = {"DSPARK": 0.5}  # measured: 5.1 and 4.9
Generate = Callable[[str, float], Generation]


def prompts() -> list[list[int]]:
    config = resolve(EngineConfig(speculative_algorithm="NONE"))
    tokenizer = Tokenizer.from_file(str(Path(config.tokenizer_path) / "tokenizer.json"))
    task = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, PROBLEMS)
    texts = [gsm8k.make_prompt([], problem.question) for problem in task.questions]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture(scope="module")
def generate() -> Generate:
    drivers: dict[str, BatchEngine] = {}

    def run(algorithm: str, temperature: float) -> Generation:
        if algorithm not in drivers:
            config = resolve(
                EngineConfig(
                    device="cpu",
                    cpu_threads=1,
                    speculative_algorithm=algorithm,
                    speculative_eagle_topk=4,
                    speculative_num_steps=5,
                    speculative_num_draft_tokens=16,
                )
            )
            config = sized_for(config, PROBLEMS, 100 + MAX_TOKENS)
            drivers[algorithm] = BatchEngine(config, assemble(config))
        sampling = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=temperature, seed=1)
        return drivers[algorithm].generate(prompts(), sampling)

    return run


@pytest.mark.parametrize("temperature", MIN_LENGTH)
@pytest.mark.parametrize("algorithm", EMBEDDED_DRAFTERS)
def test_an_embedded_drafter_drafts_what_the_model_writes(
    algorithm: str, temperature: float, generate: Generate
) -> None:
    """No folder is named: the drafter's is found. Texts are those of plain decoding."""
    made = generate(algorithm, temperature)
    assert made.tokens == generate("NONE", temperature).tokens
    assert made.accept_length >= MIN_LENGTH[temperature] - SHORTER.get(algorithm, 0.0)


def test_the_embedded_model_drafts_with_its_eagle_head_unless_another_drafter_is_named() -> None:
    config = resolve(EngineConfig())
    assert config.speculative_algorithm == "EAGLE"
    assert config.speculative_draft_model_path == str(EMBEDDED_DRAFTERS["EAGLE"])


def test_the_embedded_files_stay_small() -> None:
    sizes = [path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(sizes) <= 24e6
