"""Prompts through several layers as one program: what it computes is what the layers would."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runner_harness import PLAIN, TREE, Engine, Live, Settings, greedy
from test_fused_layers import GRANITE
from tiny_model import VOCAB, write_delta_model, write_folder, write_head, write_model
from torch import Tensor

from mamba_eagle.backend.place import Host
from mamba_eagle.cpu import span_kernels, team
from mamba_eagle.cpu.backend import CpuBackend
from mamba_eagle.cpu.products.packed import MANY_ROWS, PromptProduct
from mamba_eagle.cpu.programs.layers import FusedRun, SingleLayer
from mamba_eagle.cpu.programs.prompts import MOST_TOKENS
from mamba_eagle.message import JournalPart, PrefillItem
from mamba_eagle.models.granitemoehybrid import GraniteMoeHybridForCausalLM, parse_config
from mamba_eagle.models.loader import random_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nemotron-H with odd sizes, Granite, and Olmo-Hybrid, with attention; a head for the first."""
    room = tmp_path_factory.mktemp("prompts")
    granite = GraniteMoeHybridForCausalLM(parse_config(GRANITE))
    random_weights(granite, 3)
    hybrid = write_model(room / "hybrid")
    olmo = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "head_dim": 32}
    return {
        "olmo": write_delta_model(room / "olmo", **sizes, **olmo),
        "hybrid": hybrid,
        "granite": write_folder(room / "granite", GRANITE, granite),
        "head": write_head(room / "head", hybrid),
    }


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A team of so many, whatever the machine, which shares out all that it can."""
    monkeypatch.setattr(span_kernels, "num_threads", lambda: request.param)
    monkeypatch.setattr(team, "MIN_SHARED", 0)
    team.gather(request.param)
    yield
    team.gather(1)


def prompt_of(length: int) -> list[int]:
    return [(7 * k + length) % VOCAB for k in range(length)]


def process(engine: Engine, *chunks: tuple[Live, PrefillItem]) -> None:
    """One pass."""
    result = engine.execute(prefill=[item for _, item in chunks])
    for (live, item), own in zip(chunks, result.prefill, strict=True):
        engine.after_chunk(live, item, own)


def kept_of(engine: Engine) -> list[Tensor]:
    """The features of some passes, and all that they leave in the pools."""
    found: list[Tensor] = []
    model, runner = engine.runner.model, engine.runner
    forward = model.forward

    def noted(*arguments: Tensor) -> Tensor:
        features = forward(*arguments)
        found.append(features.clone())
        return features

    model.forward = noted
    long, short, cut = (engine.admit(prompt_of(n), greedy(4)) for n in (150, 1, 40))
    kept = engine.chunk(cut, 17)
    kept.journal = JournalPart(3, 2, 40)
    process(
        engine,
        (short, engine.chunk(short, 1)),
        (long, engine.chunk(long, 150, saves=(20, 64, 150))),
        (cut, kept),
    )
    kept = engine.chunk(cut, 40)
    kept.journal = JournalPart(3, 2, 40)
    again = engine.admit(prompt_of(150)[:64] + prompt_of(9), greedy(4), long.saved[64])
    process(engine, (cut, kept), (again, engine.chunk(again, 73)))
    process(engine, (last := engine.admit(prompt_of(3), greedy(4)), engine.chunk(last, 3)))
    pools = [runner.pool, runner.kv, runner.journals]
    if hasattr(runner.drafter, "pool"):
        pools += [runner.drafter.pool, runner.drafter.kv]
    names = ("ssm", "conv", "feature", "k", "v", "conv_in", "dt")
    found += [getattr(pool, name) for pool in pools for name in names if hasattr(pool, name)]
    return found


@pytest.mark.parametrize("threads", [1, 2], indirect=True, ids=["one-thread", "two-threads"])
@pytest.mark.parametrize("mode", ["auto", "int8"])
@pytest.mark.parametrize(
    "name, settings",
    [("hybrid", TREE), ("granite", PLAIN), ("olmo", PLAIN)],
    ids=["hybrid-eagle", "granite", "olmo"],
)
def test_programs_compute_what_the_layers_do(
    name: str, settings: Settings, mode: str, folders: dict[str, Path], threads: None
) -> None:
    """Bit by bit: several prompts in a pass, states that are saved inside and continued, rows for
    saved journals, and the drafter's own pass."""
    head = folders["head"] if settings is TREE else None
    engines = [Engine(folders[name], head, settings, quantization=mode) for _ in range(2)]
    programs, layers = (engine.runner.backend.prompts for engine in engines)
    layers.most = 0
    found, wanted = map(kept_of, engines)
    parts = next(iter(programs._made[engines[0].runner.pool].values()))
    assert {type(part) for part in parts} == {FusedRun, SingleLayer}
    assert len(programs._made) == (1 if head is None else 2)
    assert programs.scratch.rows >= 168 > layers.scratch.rows
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))
    assert engines[0].runner.journals.gates[:, 3].any()


@pytest.mark.parametrize("length, is_program", [(MOST_TOKENS, True), (MOST_TOKENS + 1, False)])
def test_long_prompts_run_layer_by_layer(
    length: int, is_program: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folders["granite"], None, PLAIN)
    calls, run = [], FusedRun.__call__
    monkeypatch.setattr(
        FusedRun, "__call__", lambda self, *given: calls.append(1) or run(self, *given)
    )
    live = engine.admit(prompt_of(length), greedy(2))
    process(engine, (live, engine.chunk(live, length)))
    assert bool(calls) == is_program


def test_products_in_bfloat16_are_not_taken_over() -> None:
    assert CpuBackend(Host(), PromptProduct).prompts.most == MANY_ROWS - 1


def test_programs_leave_with_their_pool(folders: dict[str, Path]) -> None:
    engine = Engine(folders["granite"], None, PLAIN)
    live = engine.admit(prompt_of(5), greedy(2))
    process(engine, (live, engine.chunk(live, 5)))
    programs = engine.runner.backend.prompts
    assert len(programs._made) == 1
    del engine, live
    gc.collect()
    assert not programs._made
