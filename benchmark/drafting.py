"""Acceptance length, right answers, tokens/s of every drafter, chain and tree, temperature 0 and 1.

    python benchmark/drafting.py
    python benchmark/drafting.py --drafter EAGLE EAGLE3=DIR MTP=DIR --batch-size 1 8

The embedded problems as prompts, in batches, in this process. Rounds of the contestants alternate,
plain decoding first in each, so that a slow minute of the machine hits all; the fastest round of
each counts. Appends one JSON line a measurement to benchmark/results/drafting.jsonl and prints the
table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from mamba_eagle.bench_one_batch import make_driver
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.eval import gsm8k, machine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.driver import Generation, InProcessDriver, sized_for

RESULTS = Path(__file__).parent / "results" / "drafting.jsonl"
MAX_TOKENS = 200  # of an answer
SHAPES = {
    "tree": TreeShape(topk=4, depth=5, nodes=16),
    "chain": TreeShape(topk=1, depth=5, nodes=6),
}


@dataclass
class Contestant:
    """A drafter in one shape; ``NONE`` in none."""

    drafter: str
    shape: str
    driver: InProcessDriver
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return max(round.tokens / round.seconds for round in self.rounds)


@dataclass
class Round:
    """All prompts once: what decoding made and took."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0  # counted once a request
    right: int = 0  # problems

    def add(self, made: Generation) -> None:
        self.tokens += sum(made.step_tokens)
        self.seconds += sum(made.step_seconds)
        self.steps += made.accept_lengths.total()


class Problems:
    """The first ``count`` embedded problems, without examples."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(Path(config.tokenizer_path) / "tokenizer.json"))
        questions = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, count).questions
        self.prompts = gsm8k.prompt_ids(questions, self.tokenizer)
        self.results = [gsm8k.answer_value(problem.answer) for problem in questions]

    def count_right(self, first: int, answers: list[list[int]]) -> int:
        """Of the problems from number ``first`` on; what follows an answer is not looked at."""
        texts = [text.partition(gsm8k.STOP[0])[0] for text in self.tokenizer.decode_batch(answers)]
        results = self.results[first : first + len(texts)]
        return sum(map(operator.eq, map(gsm8k.answer_value, texts), results))


def settings(args: argparse.Namespace, drafter: str, shape: str) -> EngineConfig:
    """``drafter`` is a name, or NAME=FOLDER. Raises: ConfigError."""
    name, _, folder = drafter.partition("=")
    tree = SHAPES.get(shape, TreeShape())
    return resolve(
        EngineConfig(
            model_path=args.model_path,
            device=args.device,
            cpu_threads=args.threads,
            speculative_algorithm=name,
            speculative_draft_model_path=folder,
            speculative_eagle_topk=tree.topk,
            speculative_num_steps=tree.steps,
            speculative_num_draft_tokens=tree.nodes,
        )
    )


def contestants(args: argparse.Namespace, batch: int, longest: int) -> Iterator[Contestant]:
    """longest: tokens of a prompt."""
    pairs = [("NONE", "plain")]
    pairs += [(drafter, shape) for drafter in args.drafter for shape in SHAPES]
    for drafter, shape in pairs:
        config = sized_for(settings(args, drafter, shape), batch, longest + MAX_TOKENS)
        yield Contestant(drafter.partition("=")[0], shape, make_driver(config))


def run_round(
    contestant: Contestant, problems: Problems, count: int, batch: int, temperature: float
) -> None:
    made = Round()
    for first in range(0, count, batch):
        sampling = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=temperature, seed=first)
        answered = contestant.driver.generate(problems.prompts[first : first + batch], sampling)
        made.add(answered)
        made.right += problems.count_right(first, answered.tokens)
    contestant.rounds.append(made)


def main() -> None:
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
    args = parser.parse_args()
    try:
        config = settings(args, "NONE", "plain")
        for drafter in args.drafter:
            settings(args, drafter, "tree")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    problems = Problems(config, args.problems)
    count = len(problems.prompts)
    print(f"{machine.hardware(args.device)}, commit {machine.commit()}, {count} problems")
    print("| drafter | shape | temperature | batch | length | right | tokens/s | of plain |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in args.batch_size:
        all_of_them = list(contestants(args, batch, max(map(len, problems.prompts))))
        for contestant in all_of_them:
            run_round(contestant, problems, batch, batch, 0.0)  # warm-up
        for temperature in args.temperature:
            for contestant in all_of_them:
                contestant.rounds.clear()
            for _ in range(args.rounds):
                for contestant in all_of_them:
                    run_round(contestant, problems, count, batch, temperature)
            plain = all_of_them[0].tokens_per_second
            for each in all_of_them:
                report(args, each, batch, temperature, plain)


def report(
    args: argparse.Namespace, each: Contestant, batch: int, temperature: float, plain: float
) -> None:
    made = each.rounds[0]
    length = made.tokens / made.steps
    speed = each.tokens_per_second
    print(
        f"| {each.drafter} | {each.shape} | {temperature:g} | {batch} | {length:.2f} | "
        f"{made.right} | "
        f"{speed:.0f} | {speed / plain:.2f} |",
        flush=True,
    )
    record = {
        "drafter": each.drafter,
        "shape": each.shape,
        "steps": each.driver.shape.depth,
        "topk": each.driver.shape.topk,
        "nodes": each.driver.shape.nodes,
        "temperature": temperature,
        "batch": batch,
        "problems": args.problems,
        "accept_length": round(length, 4),
        "right": made.right,
        "tokens_per_s": round(speed, 1),
        "plain_tokens_per_s": round(plain, 1),
        "machine": machine.device_name(args.device),
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
    }
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
