"""Requests with different adapters in one batch have the texts of merged models, and requests
without have the bits that they have alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapter_rig import Served, merge, write_adapter
from cache_rig import Sequential
from runner_harness import SETTINGS, Settings, greedy, random_prompt, sampled
from tensor_checks import torch_path
from thread_ranks import RunnerRanks
from tiny_drafters import DRAFTERS
from tiny_model import write_head, write_model

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate, RequestOutput
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.runner.assemble import assemble

torch.set_num_threads(1)
COUNT = 8
RANKS = (1, 2, 3, 4, 8, 16, 5, 4)
PLAIN = Settings("NONE")
TIGHT = {"max_total_tokens": 190, "max_mamba_cache_size": 6}


class Asked(NamedTuple):
    adapter: str
    prompt: list[int]
    sampling: SamplingParams


class Folders(NamedTuple):
    model: Path
    head: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]  # and the model itself, under ""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    model = write_model(root / "model")
    adapters, merged = {}, {"": model}
    for seed in range(COUNT):
        name = f"a{seed}"
        adapters[name] = write_adapter(root / name, model, seed, RANKS[seed])
        merged[name] = merge(root / f"merged-{name}", model, adapters[name])
    return Folders(model, write_head(root / "head", model), adapters, merged)


def questions(
    names: list[str], count: int, seed: int = 0, lengths: Sequence[int] = (4, 16, 30)
) -> list[Asked]:
    """Prompts that share beginnings, of which adapters must not share states."""
    rng, shared = random.Random(seed), random_prompt(30, 5)
    asked = []
    for i in range(count):
        prompt = shared[: rng.choice([0, 20, 30])] + random_prompt(rng.randrange(1, 12), i)
        length = rng.choice(lengths)
        params = greedy(length) if rng.random() < 0.5 else sampled(length, seed=i)
        asked.append(Asked(names[i % len(names)], prompt, params))
    return asked


def engine_of(config: EngineConfig, runner: Any = None) -> tuple[OfflineEngine, Served]:
    runner = runner or assemble(config)
    engine = OfflineEngine(config, runner)
    return engine, Served(engine, getattr(runner, "runners", [runner]))


def answers(engine: OfflineEngine, asked: list[Asked], **rest: Any) -> list[list[RequestOutput]]:
    """The outputs of each, all being asked at once."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(asked))}
    for i, (adapter, prompt, params) in enumerate(asked):
        message = Generate(rid=str(i), token_ids=prompt, sampling=params, adapter=adapter, **rest)
        assert not engine.add(message)
    while not engine.idle:
        for output in engine.step():
            outputs[output.rid].append(output)
        engine.scheduler.check_integrity()
    return list(outputs.values())


def texts(outputs: list[list[RequestOutput]]) -> list[list[int]]:
    return [[token for each in part for token in each.token_ids] for part in outputs]


@pytest.fixture(scope="module")
def wanted(folders: Folders):
    """What merged models say, served alone, without drafts and without a cache."""
    made: dict[str, Sequential] = {}
    known: dict[Any, list[int]] = {}

    def text(asked: Asked) -> list[int]:
        name, key = asked.adapter, (asked.adapter, tuple(asked.prompt), str(asked.sampling))
        if name not in made:
            flags = {"disable_radix_cache": True}
            made[name] = Sequential(PLAIN, folders.merged[name], None, **flags)
        if key not in known:
            known[key] = made[name].serve(asked.prompt, asked.sampling).tokens
        return known[key]

    return text


@pytest.mark.parametrize(
    ("name", "slots"), [("tree", 8), ("tree", 3), ("chain-snapshot", 3), ("tree-torch", 8)]
)
def test_a_batch_of_adapters_has_the_texts_of_merged_models(
    folders: Folders, wanted, name: str, slots: int
) -> None:
    """With 3 slots and few pages: adapters replace each other, and requests are retracted."""
    settings = SETTINGS[name]
    sizes = TIGHT if slots == 3 else {"max_total_tokens": 3000}
    config = settings.config(
        folders.model, folders.head, max_running_requests=9, max_loras=slots, **sizes
    )
    with torch_path(not settings.fused):
        engine, served = engine_of(config)
        for adapter, folder in folders.adapters.items():
            assert served.load(adapter, folder) == ""
        names = ["", *folders.adapters]
        asked = questions(names, 27) if slots == 8 else questions(names[:5], 20, lengths=(40, 60))
        found = texts(answers(engine, asked))
    assert found == [wanted(each) for each in asked]
    if slots == 3:
        assert engine.scheduler.stats.num_retracted > 0
    else:
        assert sum(engine.scheduler.cache_use().hits.values()) > 0


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_every_drafter_drafts_for_adapters(
    folders: Folders, wanted, drafter: str, tmp_path: Path
) -> None:
    tiny = DRAFTERS[drafter]
    head = tiny.write(tmp_path / "drafter", folders.model)
    settings = Settings(tiny.algorithm, topk=1, steps=3, nodes=4)
    engine, served = engine_of(settings.config(folders.model, head, max_loras=2))
    for name in ("a0", "a1"):
        assert served.load(name, folders.adapters[name]) == ""
    asked = questions(["", "a0", "a1"], 6)
    assert texts(answers(engine, asked)) == [wanted(each) for each in asked]


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_stages_have_their_parts(
    folders: Folders, wanted, size: int, stages: int
) -> None:
    config = SETTINGS["tree"].config(folders.model, folders.head, max_loras=2, check_ranks=1)
    config = replace(config, tp_size=size, pp_size=stages)
    engine, served = engine_of(config, RunnerRanks(config, size, stages))
    for name in ("a3", "a5"):
        assert served.load(name, folders.adapters[name]) == ""
    asked = questions(["", "a3", "a5"], 6)
    assert texts(answers(engine, asked)) == [wanted(each) for each in asked]


@pytest.mark.parametrize("adapter", ["", "a0"])
def test_a_request_has_the_same_bits_beside_others(folders: Folders, adapter: str) -> None:
    """Logprobs of prompt and output are the same numbers, with an adapter and without."""
    config = SETTINGS["tree"].config(
        folders.model, folders.head, max_loras=2, disable_radix_cache=True,
        speculative_adaptive=False,
    )  # fmt: skip
    wants: dict[str, Any] = {"return_logprob": True, "logprob_start": 0}
    engine, served = engine_of(config)
    for name in ("a0", "a1"):
        assert served.load(name, folders.adapters[name]) == ""
    asked = questions([adapter, "a1"], 4)
    beside = answers(engine, asked, **wants)
    alone = answers(engine, asked[::2], **wants)
    for one, other in zip(beside[::2], alone, strict=True):
        for kind in ("input_logprobs", "logprobs"):
            pairs = [[part for each in given for part in getattr(each, kind)]
                     for given in (one, other)]  # fmt: skip
            assert pairs[0] == pairs[1] and pairs[0]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_adapters_on_weights_of_few_bits(folders: Folders, quantization: str) -> None:
    """With drafts as without; the adapter changes the texts, and its neighbours' not."""
    found = []
    for settings in (PLAIN, SETTINGS["tree"]):
        head = None if settings is PLAIN else folders.head
        config = settings.config(
            folders.model, head, max_loras=2, quantization=quantization, max_running_requests=6
        )
        engine, served = engine_of(config)
        plain = questions([""], 3)
        before = texts(answers(engine, plain))
        assert served.load("a4", folders.adapters["a4"]) == ""
        own = [each._replace(adapter="a4") for each in plain]
        made = texts(answers(engine, [*plain, *own]))
        assert made[:3] == before
        assert made[3:] != before
        found.append(made)
    assert found[0] == found[1]


def test_loading_and_unloading_beside_requests(folders: Folders, wanted) -> None:
    """A request keeps the adapter that it began with; what nobody needs is forgotten."""
    config = SETTINGS["tree"].config(folders.model, folders.head, max_loras=2)
    engine, served = engine_of(config)
    (runner,) = served.runners
    assert served.load("x", folders.adapters["a0"]) == ""
    first = Asked("a0", random_prompt(9, 1), greedy(30))
    assert not engine.add(
        Generate(rid="0", token_ids=first.prompt, sampling=first.sampling, adapter="x")
    )
    tokens = [token for _ in range(3) for each in engine.step() for token in each.token_ids]
    assert served.load("x", folders.adapters["a1"]) == ""  # in its place
    assert len(runner.adapters._kept) == 2
    again = first._replace(adapter="x")
    second = texts(answers_beside(engine, again, tokens))
    assert tokens == wanted(first)
    assert second == [wanted(first._replace(adapter="a1"))]
    served.settle()
    assert len(runner.adapters._kept) == 1
    assert served.unload("x") == ""
    assert "not loaded" in served_problem(engine, again)
    assert "no adapter" in served.unload("x")
    served.settle()
    assert not runner.adapters._kept


def answers_beside(
    engine: OfflineEngine, asked: Asked, tokens: list[int]
) -> list[list[RequestOutput]]:
    """The outputs of one more request; those of the first, "0", go to ``tokens``."""
    message = Generate(
        rid="1", token_ids=asked.prompt, sampling=asked.sampling, adapter=asked.adapter
    )
    assert not engine.add(message)
    outputs = []
    while not engine.idle:
        for output in engine.step():
            if output.rid == "0":
                tokens += output.token_ids
            else:
                outputs.append(output)
    return [outputs]


def served_problem(engine: OfflineEngine, asked: Asked) -> str:
    message = Generate(
        rid="2", token_ids=asked.prompt, sampling=asked.sampling, adapter=asked.adapter
    )
    (output,) = engine.add(message)
    assert output.finish is not None
    return output.finish.message
