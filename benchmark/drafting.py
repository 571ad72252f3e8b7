"""Acceptance length, right answers, tokens/s of every drafter, chain and tree, temperature 0 and 1.

    python -m benchmark.drafting
    python -m benchmark.drafting --drafter EAGLE EAGLE3=DIR MTP=DIR --batch-size 1 8

The embedded problems as prompts, in batches, in this process. Rounds of the contestants alternate,
so that a slow minute of the machine hits all; the fastest round of each counts. Appends one JSON
line per measurement to benchmark/results/drafting.jsonl and prints the table.
"""

from __future__ import annotations

import argparse
import operator
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.lib.problems import prompt_ids
from benchmark.lib.rounds import Contestant, Round, play_rounds
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, sized_for
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.eval import gsm8k
from mamba_eagle.eval.gsm8k import load_tokenizer
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.tree.tree import Tree

RESULTS = Path(__file__).parent / "results" / "drafting.jsonl"
MAX_ANSWER_TOKENS = 200
SHAPES = {
    "tree": TreeShape(topk=4, depth=5, nodes=16),
    "chain": TreeShape(topk=1, depth=5, nodes=6),
}


@dataclass(frozen=True)
class ProblemsRound(Round):
    """Problems asked once: what decode steps made and took."""

    right: int = field(kw_only=True)  # problems
    drafting: float = field(kw_only=True)  # seconds of ``propose``; on a GPU: of launching it


class DraftClock:
    """Adds up the time that a runner spends in its drafter's ``propose``."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds, self.propose = 0.0, runner.drafter.propose
        runner.drafter.propose = self  # type: ignore[assignment]

    def __call__(self, *args: Any) -> Tree:
        began = time.perf_counter()
        tree = self.propose(*args)
        self.seconds += time.perf_counter() - began
        return tree


class Player(NamedTuple):
    """A drafter in one shape; ``NONE`` in none."""

    drafter: str
    shape: str
    engine: BatchEngine
    clock: DraftClock


class Problems:
    """The first ``count`` embedded problems, without examples."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        self.tokenizer = load_tokenizer(config)
        questions = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, count).questions
        self.prompts = prompt_ids(questions, self.tokenizer)
        self.results = [gsm8k.answer_value(problem.answer) for problem in questions]

    def ask(self, player: Player, count: int, batch: int, temperature: float) -> ProblemsRound:
        """The first ``count`` of them, in batches."""
        tokens, seconds, steps, right = 0, 0.0, 0, 0
        engine, before = player.engine, player.clock.seconds
        for first in range(0, count, batch):
            sampling = SamplingParams(
                max_new_tokens=MAX_ANSWER_TOKENS, temperature=temperature, seed=first
            )
            made = engine.generate(self.prompts[first : first + batch], sampling)
            tokens += sum(made.step_tokens)
            seconds += sum(made.step_seconds)
            steps += made.accept_lengths.total()
            right += self._count_right(first, made.tokens)
        drafting = player.clock.seconds - before
        return ProblemsRound(tokens, seconds, steps, right=right, drafting=drafting)

    def _count_right(self, first: int, answers: list[list[int]]) -> int:
        """Of the problems from number ``first`` on; text after an answer's end does not count."""
        texts = [text.partition(gsm8k.STOP[0])[0] for text in self.tokenizer.decode_batch(answers)]
        expected = self.results[first : first + len(texts)]
        return sum(map(operator.eq, map(gsm8k.answer_value, texts), expected))


def settings(args: argparse.Namespace, drafter: str, shape: str) -> EngineConfig:
    """``drafter`` is a name, or NAME=FOLDER. Raises: ConfigError."""
    name, _, folder = drafter.partition("=")
    tree = SHAPES.get(shape, TreeShape())
    config = EngineConfig(
        model_path=args.model_path,
        device=args.device,
        cpu_threads=args.threads,
        speculative_algorithm=name,
        speculative_draft_model_path=folder,
        speculative_eagle_topk=tree.topk,
        speculative_num_steps=tree.depth,
        speculative_num_draft_tokens=tree.nodes,
    )
    return resolve(config)


def contestants(
    args: argparse.Namespace, batch: int, longest: int
) -> Iterator[Contestant[Player, ProblemsRound]]:
    """longest: tokens of a prompt. Raises: ConfigError."""
    pairs = [("NONE", "plain")]
    pairs += [(drafter, shape) for drafter in args.drafter for shape in SHAPES]
    for drafter, shape in pairs:
        config = sized_for(settings(args, drafter, shape), batch, longest + MAX_ANSWER_TOKENS)
        name = drafter.partition("=")[0]
        runner = make_runner(config)
        player = Player(name, shape, BatchEngine(config, runner), DraftClock(runner))
        yield Contestant(f"{name} {shape}", player)


def measure_batch(args: argparse.Namespace, problems: Problems, batch: int) -> None:
    """All contestants at all temperatures; prints and appends what was found."""
    field = list(contestants(args, batch, max(map(len, problems.prompts))))
    for contestant in field:
        problems.ask(contestant.player, batch, batch, 0.0)  # warm-up
    for temperature in args.temperature:

        def play(player: Player, temperature: float = temperature) -> ProblemsRound:
            return problems.ask(player, len(problems.prompts), batch, temperature)

        play_rounds(field, play, args.rounds)
        plain = field[0].fastest
        for each in field:
            report(args, each, batch, temperature, plain)


def report(
    args: argparse.Namespace,
    each: Contestant[Player, ProblemsRound],
    batch: int,
    temperature: float,
    plain: float,
) -> None:
    drafter, shape, engine, _ = each.player
    made, tree = each.rounds[0], engine.shape
    length, speed = made.accept_length, each.fastest
    share = sum(one.drafting for one in each.rounds) / sum(one.seconds for one in each.rounds)
    print(
        f"| {drafter} | {shape} | {temperature:g} | {batch} | {length:.2f} | {made.right} | "
        f"{speed:.0f} | {speed / plain:.2f} | {100 * share:.0f} % |",
        flush=True,
    )
    line = {
        "drafter": drafter,
        "shape": shape,
        "steps": tree.depth,
        "topk": tree.topk,
        "nodes": tree.nodes,
        "temperature": temperature,
        "batch": batch,
        "problems": args.problems,
        "accept_length": round(length, 4),
        "right": made.right,
        "tokens_per_s": round(speed, 1),
        "draft_share": round(share, 4),
        "plain_tokens_per_s": round(plain, 1),
        "machine": facts.device_name(args.device),
        "commit": facts.commit(),
        "date": facts.today(),
    }
    results.append(args.results, [line])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", default="", help="target; empty: the embedded model")
    parser.add_argument(
        "--drafter",
        nargs="+",
        default=["EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"],
        help="NAME, or NAME=FOLDER of a drafter; default: all that come with the embedded model",
    )
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    try:
        config = settings(args, "NONE", "plain")
        for drafter in args.drafter:
            settings(args, drafter, "tree")
        problems = Problems(config, args.problems)
        count = len(problems.prompts)
        print(f"{facts.hardware(args.device)}, commit {facts.commit()}, {count} problems")
        columns = "drafter shape temperature batch length right tokens/s of_plain drafting".split()
        print("| " + " | ".join(columns).replace("_", " ") + " |")
        print("|" + "---|" * len(columns))
        for batch in args.batch_size:
            measure_batch(args, problems, batch)
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
