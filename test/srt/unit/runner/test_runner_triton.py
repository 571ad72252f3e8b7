"""A runner whose trees and lanes are verified by the Triton kernels: the text is the plain model's.

On a CPU that kernel runs in Triton's interpreter, which must be chosen before triton is imported:
so one test runs this file again in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import check
from runner_harness import (
    Engine,
    Live,
    PlainModel,
    Settings,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from test_runner_blocks import DRAFTERS, assert_drafts_are_its_own, make_engine
from test_runner_graphs import LikeGpu, without_graphs
from tiny_blocks import DSPARK_CONFIG
from tiny_model import GPU_DELTA_SIZES, write_delta_model, write_head, write_model

pytest.importorskip("triton")

from mamba_eagle.backend.place import Host
from mamba_eagle.backend.triton import attention as triton_attention
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.backend.triton.delta import TritonDelta
from mamba_eagle.kernels.tree_attention import triton as kernel
from mamba_eagle.runner import loading, warm_up
from mamba_eagle.runner.steps.graphs import GraphedSteps

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    not INTERPRETED, reason="test_in_the_interpreter runs it; on a GPU e2e tests do"
)
EAGLE = Settings(topk=3, steps=3, nodes=7, fused=False)
SETTINGS = {
    "eagle-tree": EAGLE,
    "eagle-tree-snapshot": EAGLE._replace(scheme="snapshot"),
    "standalone-tree": EAGLE._replace(algorithm="STANDALONE"),
    "standalone-chain": Settings("STANDALONE", topk=1, steps=3, nodes=4, fused=False),
}


# the interpreter takes milliseconds for each
FEW_PROGRAMS = kernel.Config(rows=16, keys=32, splits=1, least=32, warps=4, stages=2)


@pytest.mark.skipif(INTERPRETED, reason="the other tests run here")
def test_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    check(request.node)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(  # the least that the kernels take
        folder, hybrid_override_pattern="M*-", mamba_head_dim=16, mamba_num_heads=2, n_groups=1
    )


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), model)


@pytest.fixture
def nodes_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lets the CPU take the kernel's path; (new nodes, all nodes) of each call. Without a warm-up,
    which test_kernels_sample_within_the_step has."""
    calls: list[tuple[int, int]] = []

    def counted(*args: torch.Tensor, **others: Any) -> torch.Tensor:
        own, masks = args[8], args[9]
        calls.append((masks.shape[1], own.shape[1]))
        return kernel.paged_tree_attention(*args, config=FEW_PROGRAMS, **others)

    backend = TritonBackend(Host(), torch.float32, flashinfer=False)
    monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    monkeypatch.setattr(triton_attention.TritonNodes, "kernel", staticmethod(counted))
    monkeypatch.setattr(triton_attention, "paged_tree_attention", counted)
    monkeypatch.setattr(warm_up, "_generate", lambda runner: None)
    return calls


def assert_plain(model: Path, lives: list[Live]) -> None:
    plain = PlainModel(model)
    assert [live.output for live in lives] == [plain.choices(live) for live in lives]


@runs_kernels
@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_the_plain_models(
    model: Path, head: Path, nodes_seen: list[tuple[int, int]], name: str
) -> None:
    """In a batch, greedy and sampled, one prompt in chunks; slots that are freed hold garbage."""
    settings = SETTINGS[name]
    engine = Engine(model, head if settings.algorithm == "EAGLE" else model, settings)
    nodes_seen.clear()
    longest = 7 if name == "eagle-tree" else 5  # the interpreter takes seconds for a step
    lives = [
        engine.start(random_prompt(13, 1), greedy(longest - 1)),
        engine.start(random_prompt(1, 2), sampled(longest // 2, 7)),
        engine.start(random_prompt(22, 3), greedy(longest), cuts=(5, 20)),
    ]
    engine.finish(lives)
    assert_plain(model, lives)
    lanes = settings.topk * (settings.steps - 1)
    assert {(settings.nodes, settings.nodes), (settings.topk, lanes)} <= set(nodes_seen)
    if name == "standalone-chain":
        depths = accepted([lives[0]]) + accepted([lives[2]])
        assert depths == [3, 4], "it drafts its own text"


@runs_kernels
def test_texts_of_a_delta_rule_are_the_plain_models(
    tmp_path: Path, nodes_seen: list[tuple[int, int]]
) -> None:
    """Its own drafts, few rows, and a second request that continues from the first one's state."""
    model = write_delta_model(tmp_path, **GPU_DELTA_SIZES)
    settings = Settings("STANDALONE", topk=1, steps=2, nodes=3, rows=11, fused=False)
    engine = Engine(model, model, settings)
    assert isinstance(engine.runner.steps.step.scheme, TritonDelta)
    lives = [
        engine.start(random_prompt(11, 1), greedy(6)),
        engine.start(random_prompt(1, 2), sampled(2, 7)),
    ]
    engine.finish(lives[:1])
    assert accepted(lives[:1])[0] > 1, "it drafts its own text"
    prefix = engine.release(lives[0], fold_to=lives[0].processed)
    lives.append(engine.start(lives[0].tokens + random_prompt(3, 6), greedy(2), hit=prefix))
    engine.finish(lives[1:])
    assert_plain(model, lives)


@runs_kernels
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_kernels_sample_within_the_step(
    model: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain steps, and of those with drafts, which are one graph: penalties and filters beside a
    greedy request, as the torch sampler has them of the same model's logits, one operation after
    the other. Prompts, too, are run as graphs have them."""
    settings = Settings(algorithm, topk=1, steps=2, nodes=3, fused=False)
    asked = [
        greedy(3),
        sampled(3, 2, top_k=5, repetition_penalty=1.7, frequency_penalty=0.5, logit_bias={9: 4.0}),
    ]
    monkeypatch.setattr(GraphedSteps, "warm_up", lambda self, shapes: None)  # when needed, then

    def outputs(graphed: bool) -> list[list[int]]:
        engine = Engine(model, None, settings, max_running_requests=2)
        assert isinstance(engine.runner.steps, GraphedSteps) == graphed
        lives = [engine.start(random_prompt(7 + i, i), each) for i, each in enumerate(asked)]
        engine.finish(lives)
        assert len(engine.runner.prompts.graphs.passes) == graphed
        if graphed:
            kinds = engine.runner.steps.graphs.values()
            assert all(graph.whole == (algorithm == "NGRAM") for graph in kinds) and kinds
        return [live.output for live in lives]

    expected = outputs(graphed=False)
    backend = TritonBackend(LikeGpu(), torch.float32, flashinfer=False)
    monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    without_graphs(monkeypatch, prompts=(8,))  # one token more than the first prompt has
    assert outputs(graphed=True) == expected


@runs_kernels
def test_blocks_are_drafted_as_their_definition_says(
    model: Path, tmp_path: Path, nodes_seen: list[tuple[int, int]]
) -> None:
    """In a window and with sinks, in a batch."""
    own = {**DSPARK_CONFIG["dflash_config"], "target_layer_ids": [0, 2]}
    drafter = DRAFTERS["dspark"]._replace(
        config={**DSPARK_CONFIG, "dflash_config": own}, taps=(0, 2)
    )
    settings = Settings("DSPARK", topk=2, steps=3, nodes=5, fused=False)
    engine = make_engine(drafter, tmp_path, model, settings)
    nodes_seen.clear()
    lives = [engine.start(random_prompt(5, 1), greedy(4))]
    lives.append(engine.start(random_prompt(1, 2), sampled(3, 1)))
    engine.finish(lives)
    assert_plain(model, lives)
    assert {(5, 5), (3, 3)} <= set(nodes_seen), "trees, and blocks of three rows"
    for live in lives:
        assert_drafts_are_its_own(live, drafter, tmp_path, model)


@runs_kernels
def test_a_request_continues_from_one_that_left(
    model: Path, head: Path, nodes_seen: list[tuple[int, int]]
) -> None:
    engine = Engine(model, head, EAGLE)
    first = engine.start(random_prompt(9, 4), greedy(5))
    other = engine.start(random_prompt(15, 5), greedy(7))
    engine.finish([first])
    engine.execute(decode=[first, other])  # one more step than it should be in
    prefix = engine.release(first, fold_to=first.processed)
    turn = engine.start(first.tokens + random_prompt(3, 6), greedy(3), hit=prefix)
    engine.finish([turn, other])
    assert_plain(model, [first, other, turn])
    assert nodes_seen
