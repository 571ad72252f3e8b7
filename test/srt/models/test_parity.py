"""Every family gives the logits, the text and the embeddings that transformers gives: in one pass,
and served with chunked prefill, state slots and verified trees, in both verify modes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from peer_models import CHUNK, PEERS, VOCAB, make_peer, peer_hidden, peer_logits, peer_text
from runner_harness import Engine, Settings, greedy
from safetensors.torch import save_file
from tiny_model import HEAD_CONFIG, load_model
from torch import nn

from mamba_eagle.bench.batch import BatchEngine
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import created_as, random_weights
from mamba_eagle.models.registry import parse_config

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_LENGTH = 3 * CHUNK + 5
NEW_TOKENS = 32
SERVED = {
    "tree-deferred": Settings(topk=3, steps=3, nodes=8),
    "tree-snapshot": Settings(scheme="snapshot", topk=3, steps=3, nodes=8),
}


HALVES = {"float16": 1e-2, "bfloat16": 1e-1}  # dtype -> largest relative error


class Peer(NamedTuple):
    model: nn.Module
    folder: Path
    head: Path
    prompt: list[int]
    text: list[int]  # transformers' greedy continuation
    hidden: torch.Tensor  # [prompt, hidden_size], after its final norm


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(name: str) -> Peer:
        folder = tmp_path_factory.mktemp(name)
        model = make_peer(name)
        model.save_pretrained(folder / "model")
        prompt = torch.randint(
            0, VOCAB, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        with torch.no_grad():
            text = peer_text(model, prompt, NEW_TOKENS)
            hidden = peer_hidden(model, prompt)
        head = write_head(folder / "head")
        return Peer(model, folder / "model", head, prompt, text, hidden)

    return make


def write_head(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HEAD_CONFIG))
    head = EagleHead(parse_config(HEAD_CONFIG))
    random_weights(head, 1)
    save_file({n: p.detach() for n, p in head.named_parameters()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", PEERS)
def test_logits_of_a_whole_prompt_equal_those_of_transformers(name: str, peer) -> None:
    made = peer(name)
    tokens = torch.randint(0, VOCAB, (2, 45), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = peer_logits(made.model, tokens)
    model = load_model(made.folder)
    hidden = model(tokens.flatten(), FullSequenceContext(2, 45))
    logits = model.compute_logits(hidden).view_as(expected)
    assert 0.5 < expected.std() < 20, "flat or wild logits would hide a difference"
    difference = float((logits - expected).abs().max())
    print(f"{name}: largest difference of logits {difference:.1e}")
    assert difference <= 2e-4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PEERS)
def test_logits_in_half_precision_are_near_those_of_transformers(
    name: str, dtype: str, peer
) -> None:
    """--dtype: every layer takes it, whatever stays in float32 beside it."""
    made = peer(name)
    tokens = torch.randint(0, VOCAB, (2, 45), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = peer_logits(made.model, tokens)
    with created_as(getattr(torch, dtype), torch.device("cpu")):
        model = load_model(made.folder)
    hidden = model(tokens.flatten(), FullSequenceContext(2, 45))
    assert hidden.dtype == getattr(torch, dtype)
    logits = model.compute_logits(hidden).view_as(expected)
    # of the middle token: a router that sees a near-tie sends a few to other experts
    error = float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
    print(f"{name}: relative error in {dtype} {error:.1e}")
    assert error <= HALVES[dtype]


def assert_embedding(found: bytes, wanted: torch.Tensor) -> None:
    assert np.frombuffer(found, "<f4") == pytest.approx(wanted.numpy(), abs=1e-4)


@pytest.mark.parametrize("settings", SERVED)
@pytest.mark.parametrize("name", PEERS)
def test_served_text_equals_that_of_transformers(name: str, settings: str, peer) -> None:
    made = peer(name)
    engine = Engine(made.folder, made.head, SERVED[settings], context_length=160)
    asks = {"cuts": (7, 33), "saves": (CHUNK * 2, 40), "pooling": "mean"}
    live = engine.start(made.prompt, greedy(NEW_TOKENS), **asks)
    engine.finish([live])
    assert live.output == made.text
    assert_embedding(live.embedding, made.hidden.mean(0))
    # a request that finds the prefix in the cache
    for saved in live.saved.values():
        again = engine.start(made.prompt, greedy(NEW_TOKENS), hit=saved, pooling="last")
        engine.finish([again])
        assert again.output == made.text
        assert_embedding(again.embedding, made.hidden[-1])
        engine.release(again)


@pytest.mark.parametrize("name", PEERS)
def test_the_batch_engine_gives_the_same_text(name: str, peer) -> None:
    """Prompts of several lengths side by side: each token at the position of its own request."""
    made = peer(name)
    config = SERVED["tree-deferred"].config(
        made.folder, made.head, chunked_prefill_size=20, context_length=160
    )
    engine = Engine(
        made.folder, made.head, SERVED["tree-deferred"], chunked_prefill_size=20, context_length=160
    )
    prompts = [made.prompt, made.prompt[:9], made.prompt[5:30]]
    result = BatchEngine(config, engine.runner).generate(prompts, greedy(8))
    assert result.tokens[0] == made.text[:8]
    with torch.no_grad():
        assert result.tokens[1:] == [peer_text(made.model, p, 8) for p in prompts[1:]]
