"""What ``mamba-eagle run-batch`` costs beside the engine alone, on the same problems.

    python -m benchmark.run_batch --batch 8 32

In turns, ``--rounds`` times after one that is not counted: all problems as lines of a file through
run-batch, with tokenizer, HTTP bodies and three processes (--in-process: one); and their token ids
through scheduler and runner in this process. Both load the model once, before. Appends the ratios
of medians, of the time on the clock and of the processor time of all processes, to --results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.lib import answering
from benchmark.lib.cpu_time import family_seconds
from mamba_eagle import Engine, run_batch
from mamba_eagle.bench import facts, results
from mamba_eagle.eval.gsm8k import problem_texts

HERE = Path(__file__).parent


def timed(work: Callable[[], int]) -> dict[str, float]:
    """work: returns how many tokens it made."""
    began, cpu = time.perf_counter(), family_seconds(os.getpid())
    tokens = work()
    wall = time.perf_counter() - began
    return {"wall": wall, "cpu": family_seconds(os.getpid()) - cpu, "tokens": tokens}


def write_lines(path: Path, texts: list[str], new_tokens: int) -> None:
    with open(path, "w") as file:
        for number, text in enumerate(texts):
            body = {"prompt": text, "max_tokens": new_tokens, "temperature": 0}
            line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def through_file(engine: Engine, folder: Path) -> int:
    """Raises: AssertionError if a line got an error."""
    lines = list(run_batch.read_lines(str(folder / "in.jsonl")))
    with open(folder / "out.jsonl", "w") as output:
        assert asyncio.run(run_batch.run(engine, lines, set(), output)) == 0
    replies = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return sum(one["response"]["body"]["usage"]["completion_tokens"] for one in replies)


def measure(args: argparse.Namespace, batch: int, folder: Path) -> dict[str, Any]:
    texts = problem_texts(args.problems)
    write_lines(folder / "in.jsonl", texts, args.new_tokens)
    flags = f"--device=cpu --cpu-threads=1 --disable-radix-cache --max-running-requests={batch}"
    alone = answering.Engine(flags.split())
    settings = {"device": "cpu", "cpu_threads": 1, "disable_radix_cache": True}
    with Engine(in_process=args.in_process, max_running_requests=batch, **settings) as engine:
        assert engine.tokenizer is not None
        prompts = engine.tokenizer.encode_all(texts)
        sides = {
            "run_batch": lambda: through_file(engine, folder),
            "bench": lambda: alone.answer(prompts, batch, args.new_tokens).tokens,
        }
        rounds = []
        for number in range(args.rounds + 1):
            order = list(sides) if number % 2 else list(sides)[::-1]
            made = {side: timed(sides[side]) for side in order}
            assert made["run_batch"]["tokens"] == made["bench"]["tokens"]
            print(batch, {side: {k: round(v, 2) for k, v in made[side].items()} for side in made})
            rounds.append(made)

    def ratio(what: str) -> float:
        middle = {side: statistics.median(one[side][what] for one in rounds[1:]) for side in sides}
        return round(middle["run_batch"] / middle["bench"], 3)

    processes = 1 if args.in_process else 3
    return {"batch": batch, "processes": processes, "wall": ratio("wall"), "cpu": ratio("cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "house.jsonl")
    args = parser.parse_args()
    machine = facts.facts("cpu")
    for batch in args.batch:
        with tempfile.TemporaryDirectory() as folder:
            line = measure(args, batch, Path(folder))
        print(line, flush=True)
        about = {"name": "run_batch_to_bench", "rounds": args.rounds, "problems": args.problems}
        results.append(args.results, [{**about, **line, **machine}])


if __name__ == "__main__":
    main()
