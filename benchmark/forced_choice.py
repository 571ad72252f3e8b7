"""Does choosing trees cost anything beside a fixed chain, or none, when acceptance is forced? (GPU)

    python -m benchmark.forced_choice --quantization fp8 --dummy-routing uniform

One runner with random weights serves three schedulers in turn: one that chooses, one that always
drafts the chain, one without drafts, whose requests the drafter does not follow. Every request has
the same length, so batches stay whole. Each acceptance length begins with a new choice, which goes
on from batch to batch as in a server. Wall time of whole answers, prompts included; ratios are to
the better one of the two fixed ones in the same round. Goal: 0.98.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmark.lib.answering import Engine
from benchmark.lib.rounds import Contestant, Round, play_rounds
from mamba_eagle.bench import experts, facts, results
from mamba_eagle.bench.batch import sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.runner.model_runner import ModelRunner

MODELS = Path(__file__).parent / "models"
INPUT = 32
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
CHAIN = {**TREE, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
FIXED = {"speculative_adaptive": False}
CHOICES: dict[str, dict[str, object]] = {
    "chosen": {},
    "chain": {**CHAIN, **FIXED},
    "none": {"speculative_algorithm": "NONE", **FIXED},
}


class Scheduled(Engine):
    """A scheduler of its own for a runner that others use as well, one after the other."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.engine, self._names = OfflineEngine(config, runner), itertools.count()
        if config.speculative_algorithm == "NONE":
            policy = self.engine.scheduler.policy
            policy.tracks_next = lambda catches_up: False  # type: ignore[method-assign]


def make_config(args: argparse.Namespace) -> EngineConfig:
    config = EngineConfig(
        model_path=str(MODELS / args.model),
        load_format="dummy",
        quantization=args.quantization,
        device=args.device,
        chunked_prefill_size=8192,
        disable_radix_cache=True,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(MODELS / args.drafter),
        **TREE,
    )
    return sized_for(resolve(config), max(args.batch_size), INPUT + args.output_len)


def measure(args: argparse.Namespace) -> None:
    about = {"model": args.model, "quantization": args.quantization, **facts.facts(args.device)}
    config = make_config(args)
    runner = make_runner(config)
    assert isinstance(runner, ModelRunner)
    # graphs read it
    length = torch.ones((), dtype=torch.float64, device=runner.backend.device)
    runner.step.simulate(length)
    experts.watch(runner, args.dummy_routing)
    prompts = synthetic_prompts(config, runner.ready.vocab_size, max(args.batch_size), INPUT)
    print("batch  forced  chosen/best  chosen, chain, none: tokens/s   shapes chosen", flush=True)
    for forced in args.accept_length:
        length.fill_(forced)
        configs = {name: dataclasses.replace(config, **own) for name, own in CHOICES.items()}
        players = [Contestant(name, Scheduled(own, runner)) for name, own in configs.items()]
        for batch in args.batch_size:
            answered = partial(play, prompts=prompts[:batch], args=args)
            play_rounds(players, answered, args.warm_up)
            before = steps(players[0].player)
            play_rounds(players, answered, args.rounds)
            speeds = [each.median_speed for each in players]
            best = [max(fixed) for fixed in zip(*(each.speeds for each in players[1:]))]
            ratio = median(own / other for own, other in zip(players[0].speeds, best))
            used = {k: v - before.get(k, 0) for k, v in steps(players[0].player).items()}
            shapes = {name: count for name, count in used.items() if count}
            shown = ", ".join(f"{speed:.0f}" for speed in speeds)
            print(f"{batch:>5} {forced:>7} {ratio:>12.3f}  {shown:>31}   {shapes}", flush=True)
            line = {"name": "forced_choice", "batch": batch, "forced": forced}
            line |= {"value": round(ratio, 4), "routing": args.dummy_routing, "shapes": shapes}
            line |= {each.name: round(speed, 1) for each, speed in zip(players, speeds)}
            results.append(args.results, [line | about])


def play(engine: Scheduled, prompts: list[list[int]], args: argparse.Namespace) -> Round:
    return engine.answer(prompts, len(prompts), args.output_len)


def steps(engine: Scheduled) -> dict[str, int]:
    return {name: use.steps for name, use in engine.speculation().shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nemotron-3-nano-30b-a3b")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--drafter", default="llama-2-layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dummy-routing", choices=("uniform", "same"), default="uniform")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--accept-length", type=float, nargs="+", default=[1.25, 2.0, 3.5])
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--results", default="benchmark/results/adaptive.jsonl")
    with torch.inference_mode():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
