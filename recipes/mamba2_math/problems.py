"""The stream of training problems and the 200 held-out ones, in the form of GSM8K.

``python -m mamba2_math.problems --count 5`` prints some. Two sources make them: the whole problems
of :mod:`mamba2_math.scenarios`, and :mod:`mamba2_math.stories`, problems put together from parts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from mamba2_math import scenarios, stories
from mamba2_math.draft import Problem, document
from mamba_eagle.eval.gsm8k import EMBEDDED_PROBLEMS

HELD_OUT_SEED = 20_250_607
HELD_OUT_COUNT = 200
SINGLE_SHARE = 0.55  # of the documents hold one problem
MAX_PROBLEMS = 8  # in a document
STORY_SHARE = 0.62  # of the problems are stories, shorter than the scenarios: half of the tokens


def _stream(seed: int) -> Iterator[Problem]:
    rng = random.Random(seed)
    while True:
        try:
            yield (stories if rng.random() < STORY_SHARE else scenarios).make(rng)
        except ValueError:
            continue  # numbers that do not work out, such as a loss on a sale: draw again


@functools.cache
def held_out() -> tuple[Problem, ...]:
    """The problems that no training run may see: the same ones for every seed and machine."""
    problems: dict[str, Problem] = {}
    for problem in _stream(HELD_OUT_SEED):
        problems.setdefault(problem.key, problem)
        if len(problems) == HELD_OUT_COUNT:
            return tuple(problems.values())
    raise AssertionError("the stream of problems does not end")


def stream(seed: int) -> Iterator[Problem]:
    """An endless stream of problems, none of which is held out: neither the same text nor the
    same scenario with the same arithmetic in other words."""
    keys = {problem.key for problem in held_out()}
    questions = {problem.question for problem in held_out()}
    for problem in _stream(seed):
        if problem.key not in keys and problem.question not in questions:
            yield problem


Record = dict[str, str]  # question and answer, as in GSM8K's files


def as_records(problems: Iterable[Problem]) -> list[Record]:
    return [{"question": p.question, "answer": p.answer} for p in problems]


def as_jsonl(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def generate(seed: int, count: int) -> list[Record]:
    """``count`` training problems; the same for the same seed."""
    return as_records(itertools.islice(stream(seed), count))


def generate_documents(seed: int, count: int) -> list[Record]:
    """As :func:`generate`, but an answer goes on with further problems as often as in the text that
    the embedded model was trained on, and as the model itself does when it is sampled."""
    rng, problems = random.Random(seed), stream(seed)
    records = []
    for first in itertools.islice(problems, count):
        more = 0 if rng.random() < SINGLE_SHARE else rng.randint(1, MAX_PROBLEMS - 1)
        rest = [document(p.question, p.answer) for p in itertools.islice(problems, more)]
        records.append({"question": first.question, "answer": "\n\n".join([first.answer, *rest])})
    return records


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba2_math.problems", description="Make word problems by rule."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--output", type=Path, help="jsonl file to write; without it, print them")
    parser.add_argument(
        "--documents", action="store_true", help="let answers go on with further problems"
    )
    parser.add_argument(
        "--write-held-out",
        action="store_true",
        help=f"write the {HELD_OUT_COUNT} held-out problems into the package's assets instead",
    )
    args = parser.parse_args(argv)
    if args.write_held_out:
        EMBEDDED_PROBLEMS.write_text(as_jsonl(as_records(held_out())), encoding="utf-8")
        return
    records = (generate_documents if args.documents else generate)(args.seed, args.count)
    if args.output:
        args.output.write_text(as_jsonl(records), encoding="utf-8")
    else:
        for record in records:
            print(document(**record), end="\n\n")


if __name__ == "__main__":
    main()
