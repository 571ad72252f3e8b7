"""Processor time of servers of two checkouts, in turns: of a start, and of 1,000 tokens.

    git worktree add /tmp/before REVISION
    python -m benchmark.checkouts --before /tmp/before --flags "--speculative-algorithm NONE"

First ``--rounds`` starts of each, until it answers; then one server of each answers the same
problems, ``--parallel`` at a time, ``--rounds`` times after one that is not counted. Appends the
ratios of the least, this checkout to the one before, to --results.
"""

from __future__ import annotations

import argparse
import shlex
from contextlib import ExitStack
from pathlib import Path

from benchmark.lib.cpu_time import cpu_seconds, family_seconds
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.client import generate_all
from mamba_eagle.eval.gsm8k import problem_texts

HERE = Path(__file__).parent
Times = dict[str, float]  # by process, and "all"


def server(checkout: Path, flags: list[str]) -> ServerProcess:
    environment = {"PYTHONPATH": str(checkout / "python"), "OMP_NUM_THREADS": "1"}
    return ServerProcess(["--device", "cpu", *flags], environment=environment)


def start(checkout: Path, flags: list[str]) -> Times:
    with server(checkout, flags) as running:
        made = {role: cpu_seconds(pid) for role, pid in running.pids().items()}
        return {**made, "all": family_seconds(running.process.pid)}


def answer(running: ServerProcess, texts: list[str], parallel: int, new_tokens: int) -> Times:
    """Per 1,000 tokens."""
    pids = running.pids()
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    bodies = [{"text": text, "sampling_params": sampling} for text in texts]
    replies = generate_all(running.base_url, bodies, parallel)
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
    made = {role: 1000 * (cpu_seconds(pid) - before[role]) / tokens for role, pid in pids.items()}
    return {**made, "all": sum(made.values())}


def ratios(before: list[Times], after: list[Times]) -> Times:
    """Of the least of all rounds: whoever else uses the machine only adds to a process's time."""

    def least(rounds: list[Times], name: str) -> float:
        return min(one[name] for one in rounds)

    return {name: round(least(after, name) / least(before, name), 3) for name in after[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--flags", default="", help="of both servers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "house.jsonl")
    args = parser.parse_args()
    exit_on_sigterm()
    sides = {"before": args.before.resolve(), "after": HERE.parent}
    flags = ["--disable-radix-cache", *shlex.split(args.flags)]
    texts = problem_texts(args.problems)
    starts: dict[str, list[Times]] = {side: [] for side in sides}
    answers: dict[str, list[Times]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            starts[side].append(start(sides[side], flags))
            print("start", side, starts[side][-1], flush=True)
    with ExitStack() as stack:
        servers = {side: stack.enter_context(server(sides[side], flags)) for side in sides}
        for number in range(args.rounds + 1):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                made = answer(servers[side], texts, args.parallel, args.new_tokens)
                print("1000 tokens", side, {k: round(v, 3) for k, v in made.items()}, flush=True)
                if number:
                    answers[side].append(made)
    about = {"flags": args.flags, "rounds": args.rounds, "clock": "CPU time"}
    about |= facts.facts("cpu")
    lines = [
        {"name": name, "side": "after/before", **extra, **ratios(*made.values()), **about}
        for name, extra, made in (
            ("start_cpu_ratio", {}, starts),
            ("tokens_cpu_ratio", {"parallel": args.parallel}, answers),
        )
    ]
    for line in lines:
        print(line)
    results.append(args.results, lines)


if __name__ == "__main__":
    main()
