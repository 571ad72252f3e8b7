"""benchmark/adaptive.py: which servers it compares, and what it makes of their speeds."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mamba_eagle.config import ServerConfig, add_arguments, from_arguments
from mamba_eagle.core import TreeShape
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.resolve import resolve

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"
SHAPES = ["4x5x16", "1x3x4"]


@pytest.fixture
def adaptive(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield importlib.import_module("adaptive")
    for name in ("adaptive", "compare_server", "server_start"):
        sys.modules.pop(name, None)


def test_servers_differ_in_what_they_draft_and_in_nothing_else(
    adaptive: ModuleType, tmp_path: Path
) -> None:
    adaptive.write_useless_head(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    drafts = {}
    for name, flags in adaptive.contestants_flags(SHAPES, tmp_path).items():
        config = resolve(from_arguments(ServerConfig, parser.parse_args(flags)))
        drafts[name] = (
            config.tree_shape,
            config.speculative_adaptive and name != "plain",
            config.speculative_draft_model_path,
        )
    large, chain = TreeShape(topk=4, depth=5, nodes=16), TreeShape(topk=1, depth=3, nodes=4)
    assert drafts.pop("plain")[:2] == (TreeShape(), False)
    assert drafts == {
        "4x5x16": (large, False, str(EMBEDDED_HEADS["EAGLE"])),
        "1x3x4": (chain, False, str(EMBEDDED_HEADS["EAGLE"])),
        "adaptive": (large, True, str(EMBEDDED_HEADS["EAGLE"])),
        "useless": (large, True, str(tmp_path)),
    }


def test_the_useless_head_is_a_head_that_knows_nothing(
    adaptive: ModuleType, tmp_path: Path
) -> None:
    adaptive.write_useless_head(tmp_path)
    head, again = (EagleHead(read_model_config(tmp_path)) for _ in range(2))
    load_weights(head, tmp_path)
    load_weights(again, EMBEDDED_HEADS["EAGLE"])
    own, trained = head.fc.weight.flatten(), again.fc.weight.flatten()
    assert abs(torch.corrcoef(torch.stack([own, trained]))[0, 1]) < 0.1


def test_an_engine_answers_every_prompt_some_at_a_time(adaptive: ModuleType) -> None:
    flags = [*adaptive.SHARED, "--device", "cpu", "--model-path", str(EMBEDDED_MODEL)]
    engine = adaptive.Engine([*flags, "--speculative-algorithm", "NONE"])
    made = engine.answer(adaptive.problems()[:5], 2, 7)
    assert made == (5 * 7, 0)
    batches = engine.engine.scheduler.stats.num_steps
    assert batches >= 3 * 6, "two at a time"
    assert engine.speculation().current == "plain"


def test_each_round_is_compared_with_its_own_plain_run(
    adaptive: ModuleType, tmp_path: Path
) -> None:
    speeds = {
        "plain": [100.0, 10.0, 100.0],  # the machine had a slow minute
        "4x5x16": [150.0, 16.0, 170.0],
        "1x3x4": [90.0, 9.0, 90.0],
        "adaptive": [150.0, 16.0, 160.0],
        "useless": [98.0, 9.9, 97.0],
    }
    contestants = [adaptive.Contestant(name, None, made) for name, made in speeds.items()]
    args = argparse.Namespace(
        rounds=3,
        results=tmp_path / "out.jsonl",
        facts={"gpu": "none"},
        servers=False,
        geometry=False,
    )
    adaptive.report(contestants, SHAPES, 8, args)
    lines = [json.loads(line) for line in args.results.read_text().splitlines()]
    found = {(line["head"], line["choice"]): line for line in lines}
    useless = found["random", "adaptive"]
    assert (useless["value"], useless["least"], useless["most"]) == (0.98, 0.97, 0.99)
    assert useless["best_fixed"] == "4x5x16"
    good = found["embedded", "adaptive"]
    assert (good["value"], good["of_best_fixed"], good["batch"]) == (1.6, 1.0, 8)
