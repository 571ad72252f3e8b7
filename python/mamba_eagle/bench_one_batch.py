"""Prefill and decode times of one batch in this process: no server, no scheduler.

    python -m mamba_eagle.bench_one_batch --batch-size 1 8 --input-len 256 --output-len 128
    python -m mamba_eagle.bench_one_batch --correctness-test

Flags and output lines as SGLang's script. With speculation a decode step makes a varying number of
tokens; every throughput counts the tokens that were made.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.config import ConfigError, EngineConfig, add_arguments, from_arguments
from mamba_eagle.core import PLAIN
from mamba_eagle.eval import gsm8k, machine, results
from mamba_eagle.eval.batch_report import (
    Speed,
    StateMemory,
    report_lines,
    result_lines,
    result_record,
    speed_of,
)
from mamba_eagle.message import RunnerReady
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.driver import Generation, InProcessDriver, greedy, sized_for

WARMUP_TOKENS = 8
SHOWN_PARTINGS = 5
VERIFY_MODES = EngineConfig.__dataclass_fields__["mamba_verify_mode"].metadata["choices"]
CORRECTNESS_PROMPTS = 3


def synthetic_prompts(
    config: EngineConfig, vocab_size: int, batch_size: int, length: int
) -> list[list[int]]:
    """``batch_size`` prompts of ``length`` token ids; random ids with dummy weights.

    Where there is a tokenizer: solved problems, then one that asks for a long answer, cut at the
    front. So what is made next is an answer, the text that a drafter is trained for."""
    tokenizer_file = Path(config.tokenizer_path) / "tokenizer.json"
    if config.load_format == "dummy" or not tokenizer_file.is_file():
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch_size)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
    asked = sorted(problems, key=lambda problem: -len(problem.answer))
    prompts = []
    for i in range(batch_size):
        ids = encode(f"Question: {asked[i % len(asked)].question}\nAnswer:")
        for k in itertools.count(i * 7):  # prompts of a batch do not begin alike
            if len(ids) >= length:
                break
            problem = problems[k % len(problems)]
            ids = encode(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n") + ids
        prompts.append(ids[len(ids) - length :])
    return prompts


def make_driver(config: EngineConfig) -> InProcessDriver:
    """Load the model, in this process. torch is imported here, so that --help answers at once."""
    import torch

    from mamba_eagle.runner.model_runner import START_ERRORS, ModelRunner

    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    try:
        return InProcessDriver(ModelRunner(config), config)
    except START_ERRORS as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def profiled(wanted: bool, name: str) -> Iterator[None]:
    """Write a trace for chrome://tracing or Perfetto to ``name``.trace.json.gz, if wanted."""
    if not wanted:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, supported_activities

    kinds = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    with profile(activities=kinds) as trace:
        yield
    trace.export_chrome_trace(f"{name}.trace.json.gz")
    print(f"Profile written to {name}.trace.json.gz")


class Measured(NamedTuple):
    """A batch and what it was measured with."""

    made: Generation
    speed: Speed | None  # None: the output is one token, made by the prompts' pass
    ready: RunnerReady


def bench(args: argparse.Namespace, config: EngineConfig, facts: dict[str, Any]) -> list[Measured]:
    """Measure the sweep on one runner, print it and append it to the files that are asked for."""
    sweep = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    longest = max(args.input_len) + max(args.output_len)
    driver = make_driver(sized_for(config, max(args.batch_size), longest))
    ready = driver.runner.ready
    about = {"device": machine.device_name(config.device), "commit": facts["commit"]}
    print(f"device: {about['device']}; commit: {about['commit']}")
    if config.tree_shape != PLAIN:
        print(f"Each step drafts {config.tree_shape.name}; a server may choose others or none")
    if args.simulate_acc_len is not None:
        driver.runner.simulate_accept_length(args.simulate_acc_len)
        print(
            f"SIMULATED: --simulate-acc-len forces {args.simulate_acc_len} accepted tokens a step "
            "and request; drafts are not compared with the target, and texts mean nothing"
        )
    measured = []
    for batch_size, input_len, output_len in sweep:
        prompts = synthetic_prompts(config, ready.vocab_size, batch_size, input_len)
        print("Warmup ...")  # each: a kernel may be compiled for a batch size or a length
        driver.generate(prompts, greedy(min(output_len, WARMUP_TOKENS)))
        print(f"Benchmark ... batch {batch_size}, input {input_len}, output {output_len}")
        with profiled(args.profile, f"{args.run_name}-{batch_size}-{input_len}-{output_len}"):
            made = driver.generate(prompts, greedy(output_len))
        print("\n".join(report_lines(made)))
        speed = None
        if made.step_seconds:
            speed = speed_of(made, config, ready, facts["copy_tb_s"])
            print(speed.line())
        if args.result_filename:
            results.append(args.result_filename, [result_record(made, args, config, about)])
        if args.results:
            lines = result_lines(made, speed, args, config, ready, facts)
            results.append(args.results, lines)
        measured.append(Measured(made, speed, ready))
    return measured


def compare_verify_modes(
    args: argparse.Namespace, config: EngineConfig, facts: dict[str, Any]
) -> None:
    """The sweep in each mode, one after the other in this process; then both side by side."""
    found = {}
    for mode in VERIFY_MODES:
        print(f"========== --mamba-verify-mode {mode} ==========")
        found[mode] = bench(args, dataclasses.replace(config, mamba_verify_mode=mode), facts)
        release_memory()  # the next runner's pools may need it all
    print(
        f"\n{'mode':<10}{'batch':>6}{'ms/step':>10}{'token/s':>10}{'accepted':>10}"
        f"{'state MB/request':>18}{'beside checkpoint':>19}"
    )
    for pair in zip(*found.values()):
        for mode, (made, speed, ready) in zip(found, pair):
            state = StateMemory.of(ready)
            step = (speed.seconds * 1e3, speed.tokens_per_second) if speed else (0.0, 0.0)
            print(
                f"{mode:<10}{len(made.tokens):>6}{step[0]:>10.3f}{step[1]:>10.1f}"
                f"{made.accept_length:>10.3f}{state.megabytes:>18.2f}{state.beside / 1e6:>19.2f}"
            )
    if args.simulate_acc_len is not None:
        print("Acceptance is simulated: texts are not compared.")
        return
    for pair in zip(*found.values()):
        print(compared_texts(*(measured.made.tokens for measured in pair)))


def compared_texts(first: list[list[int]], second: list[list[int]]) -> str:
    """Whether two runs made the same tokens."""
    parts = [
        f"request {i} parts at output token {next(k for k in range(len(a)) if a[k] != b[k])}"
        for i, (a, b) in enumerate(zip(first, second))
        if a != b
    ]
    equal = len(first) - len(parts)
    text = f"Batch {len(first)}: {equal} of {len(first)} texts are equal in both modes"
    return "; ".join([text, *parts[:SHOWN_PARTINGS]])


def release_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def correctness_test(config: EngineConfig, max_new_tokens: int) -> bool:
    """Print three texts and, with speculation, whether plain decoding makes the same ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(config.tokenizer_path) / "tokenizer.json"))
    task = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, CORRECTNESS_PROMPTS)
    texts = [gsm8k.make_prompt([], problem.question) for problem in task.questions]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def generate(config: EngineConfig) -> Generation:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        driver = make_driver(sized_for(config, len(prompts), longest))
        return driver.generate(prompts, greedy(max_new_tokens))

    made = generate(config)
    for i, (text, tokens) in enumerate(zip(texts, made.tokens)):
        print(f"========== Prompt {i} ==========\n{text}{tokenizer.decode(tokens)}\n")
    if config.speculative_algorithm == "NONE":
        return True
    plain = generate(dataclasses.replace(config, speculative_algorithm="NONE"))
    same = True
    for i, (drafted, expected) in enumerate(zip(made.tokens, plain.tokens)):
        if drafted != expected:
            same = False
            at = next(k for k, pair in enumerate(zip(drafted, expected)) if pair[0] != pair[1])
            print(f"Prompt {i}: speculation parts from plain decoding at output token {at}")
    if same:
        print(f"Speculation ({made.accept_length:.3f} token/step) equals plain decoding.")
    return same


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, EngineConfig)
    own = parser.add_argument_group("benchmark; several values of the first three make a sweep")
    own.add_argument("--batch-size", type=int, nargs="+", default=[1])
    own.add_argument("--input-len", type=int, nargs="+", default=[256])
    own.add_argument("--output-len", type=int, nargs="+", default=[32])
    own.add_argument("--run-name", default="default")
    own.add_argument("--result-filename", default="", help="append one JSON line a measurement")
    own.add_argument(
        "--results", default="", help="append lines in the form of benchmark/results, one a number"
    )
    own.add_argument(
        "--simulate-acc-len",
        type=float,
        metavar="X",
        help="a benchmark knob for dummy weights: every step accepts X tokens on average, whatever "
        "the target says (SGLang: SGLANG_SIMULATE_ACC_LEN); texts mean nothing",
    )
    own.add_argument(
        "--compare-verify-modes",
        action="store_true",
        help="measure --mamba-verify-mode deferred and snapshot, one after the other, and compare",
    )
    own.add_argument("--correctness-test", action="store_true", help="print texts, measure nothing")
    own.add_argument("--profile", action="store_true", help="write a torch profiler trace")
    return parser


def simulation_problem(args: argparse.Namespace, config: EngineConfig) -> str:
    """Why --simulate-acc-len cannot work; empty: it can, or is not used."""
    wanted, most = args.simulate_acc_len, config.tree_shape.depth + 1
    if wanted is None:
        return ""
    flag = f"--simulate-acc-len {wanted}"
    if args.correctness_test:
        return f"{flag}: texts mean nothing with it, so --correctness-test has nothing to compare"
    if config.speculative_algorithm == "NONE":
        return f"{flag}: without a drafter each step makes one token; set --speculative-algorithm"
    if not 1 <= wanted <= most:
        return (
            f"{flag}: must be between 1 and {most}, the most that a tree of "
            f"--speculative-num-steps {config.tree_shape.depth} can gain a step"
        )
    return ""


def main(argv: list[str] | None = None) -> None:
    # Read when torch is first imported. A thread that spins at a barrier takes the core from the
    # thread it waits for as soon as anything else runs: steps become ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = make_parser()
    args = parser.parse_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}: each value must be 1 or more")
    try:
        config = resolve(from_arguments(EngineConfig, args))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if problem := simulation_problem(args, config):
        sys.exit(f"error: {problem}")
    if args.correctness_test:
        sys.exit(0 if correctness_test(config, max(args.output_len)) else 1)
    facts = results.facts(config.device)
    try:
        measure = compare_verify_modes if args.compare_verify_modes else bench
        measure(args, config, facts)
    except ValueError as error:  # the batch does not fit
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
