"""What must hold whoever drafts: the text is the target's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import (
    Engine,
    PlainModel,
    Settings,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from tiny_drafters import DRAFTERS
from tiny_model import write_model
from torch import Tensor

from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.eagle import EagleNetwork
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.message import Plan
from mamba_eagle.quantization.matrix import Float8Matrix

torch.set_num_threads(1)

VOCAB = 12
SHAPES = {
    "tree": Settings(topk=3, steps=3, nodes=9),
    "chain": Settings(topk=1, steps=3, nodes=4),
    "tree-snapshot": Settings(topk=3, steps=3, nodes=9, scheme="snapshot"),
    "tree-torch": Settings(topk=3, steps=3, nodes=9, fused=False),
}


ON_GPU = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(target: Path) -> PlainModel:
    return PlainModel(target)


@pytest.fixture(scope="module")
def target_for_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that the Triton kernels take."""
    return write_model(tmp_path_factory.mktemp("kernels"), mamba_head_dim=16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_the_plain_models(
    target: Path, plain: PlainModel, tmp_path: Path, drafter: str, shape: str
) -> None:
    engine = DRAFTERS[drafter].engine(tmp_path, target, SHAPES[shape])
    assert_plain_texts(engine, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tree", "chain", "tree-snapshot"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("model", ["target", "target_for_kernels"])
def test_the_text_on_a_gpu_is_the_plain_models(
    model: str, tmp_path: Path, drafter: str, shape: str, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(model)
    engine = DRAFTERS[drafter].engine(tmp_path, target, SHAPES[shape], **ON_GPU)
    assert_plain_texts(engine, PlainModel(target))


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["eagle", "eagle-mamba", "mtp", "standalone", "dflash"])
def test_launching_prompts_waits_for_nothing(
    target_for_kernels: Path, tmp_path: Path, drafter: str
) -> None:
    """Prompts that begin and that go on, with stop tokens."""
    engine = DRAFTERS[drafter].engine(tmp_path, target_for_kernels, SHAPES["tree"], **ON_GPU)
    engine.overwrites = False
    asked = greedy(5, ignore_eos=False, stop_token_ids=[3, 4])
    engine.start(random_prompt(9, 1), asked)
    one, other = (engine.admit(random_prompt(20 + i, i), asked) for i in range(2))
    plans = [[engine.chunk(one, 7)], [engine.chunk(one, 20, saves=(11,)), engine.chunk(other, 21)]]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [
            engine.runner.launch(Plan(step=100 + i, prefill=items)) for i, items in enumerate(plans)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each.result().prefill) for each in launched] == [1, 2]


@pytest.mark.parametrize("drafter", ["eagle", "dflash"])
def test_no_number_is_assigned_to_a_table(
    target: Path, tmp_path: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each would wait. Prompts, a step, a request that leaves."""
    engine = DRAFTERS[drafter].engine(tmp_path, target, SHAPES["tree-torch"])
    assign, found = Tensor.__setitem__, list[str]()

    def seen(self: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):
            caller = sys._getframe(1)
            found.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        assign(self, index, value)

    monkeypatch.setattr(Tensor, "__setitem__", seen)
    lives = [engine.start(random_prompt(9 + i, i), sampled(5, i)) for i in range(2)]
    engine.execute(decode=lives)
    engine.release(lives[0])
    assert [line for line in found if "/mamba_eagle/" in line] == []


def assert_plain_texts(engine: Engine, plain: PlainModel) -> None:
    """Greedy and sampled, over chunks, plain steps and the cache."""
    lives = [
        engine.start(random_prompt(19, 1), greedy(45)),
        engine.start(random_prompt(26, 2), sampled(40, 2), cuts=(5, 6), saves=(21,)),
        engine.start(random_prompt(1, 3), sampled(35, 3)),
    ]
    for step in range(4):
        engine.execute(decode=lives, shape=TreeShape() if step % 2 else None)
    engine.finish(lives)
    for live in lives:
        assert live.output == plain.choices(live)
    depths = accepted(lives)
    assert max(depths) > 1 and min(depths) == 1, "some drafts are right and some are not"
    again = engine.start(random_prompt(26, 2)[:21] + [7], greedy(20), hit=lives[1].saved[21])
    end = lives[0].processed
    left = engine.release(lives[0], fold_to=end)
    turn = engine.start(lives[0].tokens[:end] + [5, 9], sampled(20, 4), hit=left)
    engine.finish([again, turn])
    assert [live.output for live in (again, turn)] == [plain.choices(x) for x in (again, turn)]


PENALISED = [
    greedy(30, frequency_penalty=1.5, presence_penalty=0.5),
    sampled(30, 1, repetition_penalty=1.4, top_k=8),
    sampled(30, 2, min_p=0.05, logit_bias={7: 4.0, 9: -4.0}),
    sampled(30, 3, temperature=0.7, top_p=0.8, ignore_eos=False, min_new_tokens=20),
]


def penalised_texts(engine: Engine) -> list[list[int]]:
    lives = [engine.start(random_prompt(9, i), one) for i, one in enumerate(PENALISED)]
    engine.finish(lives)
    return [live.output for live in lives]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def undrafted(request: pytest.FixtureRequest, target: Path) -> tuple[str, list[list[int]]]:
    """The device, and the texts of plain decoding there."""
    engine = Engine(target, None, Settings("NONE"), device=request.param, dtype="float32")
    return request.param, penalised_texts(engine)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_penalties_and_bans_act_in_the_tree_as_in_plain_decoding(
    target: Path, tmp_path: Path, drafter: str, undrafted: tuple[str, list[list[int]]]
) -> None:
    device, texts = undrafted
    on_device = {"device": device, "dtype": "float32"}
    engine = DRAFTERS[drafter].engine(tmp_path, target, SHAPES["tree"], **on_device)
    assert penalised_texts(engine) == texts


def ranks(engine: Engine, plain: PlainModel, requests: int, tokens: int, seed: int) -> Tensor:
    """Where each sampled token lies in the target's distribution given the text before it: a
    number in [0, 1), uniform and independent of all others if and only if tokens are samples of
    that distribution. The likeliest tokens come first, as they are those that are drafted."""
    lives = [
        engine.start([3 + i % 7, 3 + i % 5], sampled(tokens, seed + i)) for i in range(requests)
    ]
    engine.finish(lives)
    found = []
    for live in lives:
        first = live.prompt_len
        logits = plain.logits(live.tokens[:-1])[first - 1 :].double()
        probabilities, order = logits.softmax(1).sort(dim=1, descending=True)
        drawn = torch.tensor(live.output)[:, None] == order
        before = (probabilities.cumsum(1) - probabilities)[drawn]
        found.append(before + probabilities[drawn] * torch.rand(len(before), dtype=torch.float64))
        engine.release(live)
    return torch.cat(found)


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


SCALE = int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1"))
BINS, LIMIT = 32, 74.7  # of 31 degrees of freedom, a sample in 50,000 is above


# one per way to draft: the others share it with one of these
SAMPLED = ["eagle", "eagle3", "dspark", "ngram", None]


@pytest.mark.parametrize("drafter", SAMPLED)
def test_samples_follow_the_targets_distribution(tmp_path: Path, drafter: str | None) -> None:
    """Of every drafter's trees and of plain decoding, by chi-square: 10,000, or 100,000 in the long
    form (MAMBA_EAGLE_CHAOS_SCALE above 1)."""
    torch.manual_seed(0)
    target = write_model(
        tmp_path / "model", vocab_size=VOCAB, eos_token_id=1, hybrid_override_pattern="M*"
    )
    settings = Settings("NONE")
    others = {"max_running_requests": 100, "max_total_tokens": 15_000, "max_mamba_cache_size": 100}
    if drafter is None:
        engine = Engine(target, None, settings, **others)
    else:
        settings = Settings(topk=2, steps=3, nodes=6)
        engine = DRAFTERS[drafter].engine(tmp_path / "drafter", target, settings, **others)
    engine.overwrites = False  # it takes most of the time
    plain = PlainModel(target)
    rounds = 10 if SCALE > 1 else 1
    found = torch.cat([ranks(engine, plain, 100, 100, 1000 * i) for i in range(rounds)])
    assert len(found) == 10_000 * rounds
    assert chi_square(torch.histc(found, BINS, 0.0, 1.0)) < LIMIT


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_drafts_read_lm_head_in_float8(
    target: Path, plain: PlainModel, tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device multiplies it, and unless the drafter's weights are to keep their bits."""
    monkeypatch.setattr(
        LayerOps, "keeps", lambda _, matrix, device: isinstance(matrix, Float8Matrix)
    )
    bits = {"speculative_draft_model_quantization": asked}
    engine = DRAFTERS["eagle"].engine(tmp_path, target, SHAPES["tree-torch"], **bits)
    drafter = engine.runner.step.drafter
    assert isinstance(drafter, ModelDrafter) and isinstance(drafter.network, EagleNetwork)
    network = drafter.network
    if asked == "none":
        assert network.output is None
    else:
        outputs = torch.randn(9, engine.runner.model.config.hidden_size)
        exact = network.target.raw_logits(outputs)
        error = (network.logits(1, outputs) - exact).abs().max() / exact.abs().max()
        assert 0 < error < 0.06  # a sixteenth at most of each number
    assert_plain_texts(engine, plain)
