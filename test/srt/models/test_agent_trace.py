"""Speculation never costs a hit: an agent's requests, which grow, fork and edit their text, find as
much in the cache of a model with delta rules with drafts as without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from peer_models import VOCAB, make_peer

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

pytestmark = pytest.mark.usefixtures("one_thread")


def ask(engine: OfflineEngine, rid: str, prompt: list[int]) -> tuple[list[int], int]:
    """The output, and how many tokens of the prompt the cache had."""
    sampling = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    outputs = list(engine.add(Generate(rid=rid, token_ids=prompt, sampling=sampling)))
    while not engine.idle:
        outputs += engine.step()
    return [token for one in outputs for token in one.token_ids], outputs[-1].cached_tokens


def trace(folder: Path, **settings: object) -> list[tuple[list[int], int]]:
    config = EngineConfig(model_path=str(folder), device="cpu", max_total_tokens=4000, **settings)
    config = resolve(config)
    engine, rng = OfflineEngine(config, assemble(config)), random.Random(3)

    def more(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    text, found = more(70), []
    for turn in range(5):
        found.append(ask(engine, f"{turn}", text))
        whole = text + found[-1][0]
        found.append(ask(engine, f"{turn} again", whole[:-5] + more(9)))  # a fork within an answer
        edited = text[:-20] + more(3) + text[-20:]
        found.append(ask(engine, f"{turn} edited", edited))
        text = whole + more(11)
    return found


def test_a_trace_hits_as_much_with_drafts_as_without(tmp_path: Path) -> None:
    make_peer("qwen3.5").save_pretrained(tmp_path)
    plain = trace(tmp_path, speculative_algorithm="NONE")
    assert sum(cached for _, cached in plain) > 900
    model = str(tmp_path)
    assert trace(tmp_path, speculative_draft_model_path=model) == plain
    assert trace(tmp_path, speculative_algorithm="NGRAM") == plain
