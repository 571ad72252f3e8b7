"""Engines that choose their trees beside fixed ones: which, and what is made of their speeds."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmark.lib import adaptive
from benchmark.lib.answering import Engine
from benchmark.lib.rounds import Contestant, Round
from mamba_eagle.config import EngineConfig, ServerConfig, add_arguments, from_arguments
from mamba_eagle.core import TreeShape
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.resolve import resolve

SHAPES = ["4x5x16", "1x3x4"]


def test_servers_differ_in_what_they_draft_and_in_nothing_else(tmp_path: Path) -> None:
    adaptive.write_useless_head(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    drafts = {}
    for name, flags in adaptive.embedded_flags(SHAPES, tmp_path).items():
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


def test_the_useless_head_is_a_head_that_knows_nothing(tmp_path: Path) -> None:
    adaptive.write_useless_head(tmp_path)
    head, again = (EagleHead(read_model_config(tmp_path)) for _ in range(2))
    load_weights(head, tmp_path)
    load_weights(again, EMBEDDED_HEADS["EAGLE"])
    own, trained = head.fc.weight.flatten(), again.fc.weight.flatten()
    assert abs(torch.corrcoef(torch.stack([own, trained]))[0, 1]) < 0.1


def test_an_engine_answers_every_prompt_some_at_a_time() -> None:
    flags = [*adaptive.SHARED, "--device", "cpu", "--model-path", str(EMBEDDED_MODEL)]
    engine = Engine([*flags, "--speculative-algorithm", "NONE"])
    prompts = synthetic_prompts(resolve(EngineConfig()), 0, 5, 12)
    made = engine.answer(prompts, 2, 7)
    assert (made.tokens, made.steps) == (5 * 7, 0) and made.seconds > 0
    batches = engine.engine.scheduler.stats.num_steps
    assert batches >= 3 * 6, "two at a time"
    assert engine.speculation().current == "plain"


def test_each_round_is_compared_with_its_own_plain_run() -> None:
    speeds = {
        "plain": [100, 10, 100],  # the machine had a slow minute
        "4x5x16": [150, 16, 170],
        "1x3x4": [90, 9, 90],
        "adaptive": [150, 16, 160],
        "useless": [98, 9.9, 97],
    }
    contestants = [
        Contestant(name, None, [Round(int(10 * speed), 10.0, steps=40) for speed in made])
        for name, made in speeds.items()
    ]
    about = {"gpu": "none"}
    lines = [each.line(8, about) for each in adaptive.compare(contestants, SHAPES)]
    found = {(line["head"], line["choice"]): line for line in lines}
    useless = found["random", "adaptive"]
    assert (useless["value"], useless["least"], useless["most"]) == (0.98, 0.97, 0.99)
    assert useless["best_fixed"] == "4x5x16" and useless["rounds"] == 3
    good = found["embedded", "adaptive"]
    assert (good["value"], good["of_best_fixed"], good["batch"]) == (1.6, 1.0, 8)
    assert good["accept_length"] == 40.0 and good["gpu"] == "none"
    row = adaptive.compare(contestants, SHAPES)[3].row(8).split()
    assert row[:5] == ["8", "adaptive", "150", "40.00", "1.600"]
