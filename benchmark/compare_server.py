"""The same questions to servers with different settings: equal texts, accuracy, speed.

    python -m benchmark.compare_server --num-questions 200
    python -m benchmark.compare_server --config plain="--speculative-algorithm NONE" \\
        --config chain="--speculative-eagle-topk 1 --speculative-num-draft-tokens 5"

Starts one server after the other on this machine. The others are compared with the first. Exits
with 1 if any text differs. On a GPU in bfloat16 texts may part at a near-tie; compare the
accuracies there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.eval import gsm8k
from mamba_eagle.eval.few_shot_gsm8k import Outcome, measure

DEFAULT_CONFIGS = {
    "none": "--speculative-algorithm NONE",
    "eagle": "--speculative-algorithm EAGLE",
    "eagle-snapshot": "--speculative-algorithm EAGLE --mamba-verify-mode snapshot",
}
SHOWN_CHARACTERS = 70  # of texts that part


def parse_configs(values: list[str]) -> dict[str, list[str]]:
    """Raises: ValueError"""
    configs = {}
    for value in values:
        name, found, flags = value.partition("=")
        if not found:
            raise ValueError(f"--config {value}: must be NAME=FLAGS")
        configs[name] = shlex.split(flags)
    return configs


def differences(task: gsm8k.Task, base: Outcome, other: Outcome) -> list[str]:
    """One text for each question whose two answers differ, with where they part."""
    found = []
    for number, (problem, one, two) in enumerate(zip(task.questions, base.replies, other.replies)):
        if one.text != two.text:
            pairs = zip(f"{one.text}\0", f"{two.text}\1")  # the ends make two texts part at last
            at = next(k for k, (a, b) in enumerate(pairs) if a != b)
            end = at + SHOWN_CHARACTERS
            found.append(
                f"question {number} ({problem.question[:50]!r}…), after {at} characters:\n"
                f"    {one.text[at:end]!r}\n    {two.text[at:end]!r}"
            )
    return found


def report(
    args: argparse.Namespace, name: str, flags: list[str], outcome: Outcome, num_equal: int
) -> None:
    score, questions = outcome.score, len(outcome.replies)
    print(
        f"{name:>16} {score.accuracy:>8.3f} {score.invalid:>8.3f} "
        f"{score.output_throughput:>9.1f} {score.accept_length:>6.2f} "
        f"{f'{num_equal}/{questions}':>9}",
        flush=True,
    )
    if not args.result_filename:
        return
    line: dict[str, Any] = {
        "name": name,
        "flags": shlex.join(flags),
        "questions": questions,
        "num_shots": args.num_shots,
        "parallel": args.parallel,
        **score._asdict(),
        "texts_equal": num_equal,
        "device": facts.hardware(),
        "commit": facts.commit(),
        "date": facts.today(),
    }
    results.append(args.result_filename, [line])


def compare(args: argparse.Namespace, configs: dict[str, list[str]], task: gsm8k.Task) -> list[str]:
    """Asks one server after the other; returns the differences between their texts."""
    base: Outcome | None = None
    parted: list[str] = []
    for name, own in configs.items():
        flags = [*shlex.split(args.common), *own]
        with ServerProcess(flags) as server:
            outcome = measure(
                server.base_url, task, args.max_new_tokens, args.temperature, args.parallel
            )
        base = base or outcome
        found = differences(task, base, outcome)
        parted += [f"{name}: {text}" for text in found]
        report(args, name, flags, outcome, len(task.questions) - len(found))
    return parted


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME=FLAGS",
        help="a server to start; repeat it (default: none, eagle, eagle-snapshot)",
    )
    parser.add_argument("--common", default="", help="flags for all servers")
    parser.add_argument("--data-path", default=str(gsm8k.EMBEDDED_PROBLEMS))
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--result-filename", default="", help="append one JSON line per server")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    exit_on_sigterm()
    try:
        configs = parse_configs(
            args.config or [f"{name}={flags}" for name, flags in DEFAULT_CONFIGS.items()]
        )
        task = gsm8k.load_task(args.data_path, args.num_shots, args.num_questions)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{facts.hardware()}, commit {facts.commit()}, {len(task.questions)} questions")
    print(
        f"{'config':>16} {'accuracy':>8} {'invalid':>8} {'token/s':>9} {'accept':>6} {'equal':>9}"
    )
    if parted := compare(args, configs, task):
        print("\n".join(parted))
        sys.exit(1)


if __name__ == "__main__":
    main()
