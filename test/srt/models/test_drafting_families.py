"""Every family is drafted for by a smaller model of its own kind and by n-grams, with the texts of
plain decoding. (Heads for every family: test_train_families.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peer_models import PEERS, VOCAB, make_peer

from mamba_eagle.bench.batch import BatchEngine, Generation
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[k % VOCAB for k in range(i, 3 * i)] for i in (5, 9, 17)]


@pytest.fixture(scope="module", params=PEERS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_peer(request.param).save_pretrained(folder / "target")
    drafter = make_peer(request.param)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # its last weights are off, so that some guesses are wrong
        weight = drafter.lm_head.weight
        weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    drafter.save_pretrained(folder / "drafter")
    return folder


def generated(folder: Path, temperature: float, **settings: object) -> Generation:
    config = resolve(
        EngineConfig(
            model_path=str(folder / "target"),
            device="cpu",
            max_running_requests=len(PROMPTS),
            max_total_tokens=1000,
            **settings,
        )
    )
    sampling = SamplingParams(max_new_tokens=30, temperature=temperature, ignore_eos=True, seed=4)
    return BatchEngine(config, assemble(config)).generate(PROMPTS, sampling)


def test_sampled_texts_with_a_smaller_model_are_those_of_plain_decoding(target: Path) -> None:
    plain = generated(target, 1.0, speculative_algorithm="NONE")
    tree = generated(target, 1.0, speculative_draft_model_path=str(target / "drafter"))
    assert tree.tokens == plain.tokens
    assert 1.2 < tree.accept_length < 5.9, "some guesses are right and some are wrong"


def test_greedy_texts_with_ngrams_are_those_of_plain_decoding(target: Path) -> None:
    plain = generated(target, 0.0, speculative_algorithm="NONE")
    assert generated(target, 0.0, speculative_algorithm="NGRAM").tokens == plain.tokens
