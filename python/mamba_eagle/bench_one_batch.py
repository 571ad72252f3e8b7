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
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mamba_eagle.config import ConfigError, EngineConfig, add_arguments, from_arguments
from mamba_eagle.core import PLAIN
from mamba_eagle.eval import gsm8k, machine
from mamba_eagle.runner.driver import Generation, InProcessDriver, greedy, sized_for

SHOWN_STEPS = 5
WARMUP_TOKENS = 8
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


def report_lines(made: Generation) -> list[str]:
    """The lines other tools parse, and the acceptance of the drafts."""
    lines = [
        f"Prefill. latency: {made.prefill_seconds:6.5f} s, "
        f"throughput: {made.prompt_tokens / made.prefill_seconds:9.2f} token/s"
    ]
    shown = list(zip(made.step_requests, made.step_seconds, made.step_tokens))[:SHOWN_STEPS]
    for i, (requests, seconds, tokens) in enumerate(shown):
        lines.append(
            f"Decode {i}. Batch size: {requests}, latency: {seconds:6.5f} s, "
            f"throughput: {tokens / seconds:9.2f} token/s"
        )
    if made.step_seconds:
        lines.append(
            f"Decode.  median latency: {made.median_decode_latency:6.5f} s, "
            f"median throughput: {made.median_decode_throughput:9.2f} token/s"
        )
    throughput = (made.prompt_tokens + made.output_tokens) / made.seconds
    lines.append(f"Total. latency: {made.seconds:6.3f} s, throughput: {throughput:9.2f} token/s")
    if made.step_seconds:
        histogram = ", ".join(f"{n}: {count}" for n, count in sorted(made.accept_lengths.items()))
        lines.append(
            f"Acceptance. length: {made.accept_length:.3f} token/step, steps by length: {histogram}"
        )
    return lines


def result_record(
    made: Generation, args: argparse.Namespace, config: EngineConfig, facts: dict[str, str]
) -> dict[str, Any]:
    """One line of --result-filename: SGLang's keys, then what is ours."""
    requests = len(made.tokens)
    return {
        "run_name": args.run_name,
        "batch_size": requests,
        "input_len": made.prompt_tokens // requests,
        "output_len": made.output_tokens // requests,
        "prefill_latency": made.prefill_seconds,
        "prefill_throughput": made.prompt_tokens / made.prefill_seconds,
        "median_decode_latency": made.median_decode_latency,
        "median_decode_throughput": made.median_decode_throughput,
        "total_latency": made.seconds,
        "overall_throughput": (made.prompt_tokens + made.output_tokens) / made.seconds,
        "speculative_algorithm": config.speculative_algorithm,
        "tree": msgspec.to_builtins(config.tree_shape),
        "mamba_verify_mode": config.mamba_verify_mode,
        "accept_length": made.accept_length,
        "accept_histogram": dict(sorted(made.accept_lengths.items())),
        **facts,
    }


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


def bench(args: argparse.Namespace, config: EngineConfig) -> None:
    sweep = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    longest = max(args.input_len) + max(args.output_len)
    driver = make_driver(sized_for(config, max(args.batch_size), longest))
    vocab_size = driver.runner.ready.vocab_size
    facts = {"device": machine.device_name(config.device), "commit": machine.commit()}
    print(f"device: {facts['device']}; commit: {facts['commit']}")
    if config.tree_shape != PLAIN:
        print(f"Each step drafts {config.tree_shape.name}; a server may choose others or none")

    batch_size, input_len, output_len = sweep[0]
    prompts = synthetic_prompts(config, vocab_size, batch_size, input_len)
    print("Warmup ...")
    driver.generate(prompts, greedy(min(output_len, WARMUP_TOKENS)))

    for batch_size, input_len, output_len in sweep:
        prompts = synthetic_prompts(config, vocab_size, batch_size, input_len)
        print(f"Benchmark ... batch {batch_size}, input {input_len}, output {output_len}")
        with profiled(args.profile, f"{args.run_name}-{batch_size}-{input_len}-{output_len}"):
            made = driver.generate(prompts, greedy(output_len))
        print("\n".join(report_lines(made)))
        if args.result_filename:
            with open(args.result_filename, "a", encoding="utf-8") as file:
                file.write(json.dumps(result_record(made, args, config, facts)) + "\n")


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
    own.add_argument("--correctness-test", action="store_true", help="print texts, measure nothing")
    own.add_argument("--profile", action="store_true", help="write a torch profiler trace")
    return parser


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
        config = from_arguments(EngineConfig, args).resolved()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if args.correctness_test:
        sys.exit(0 if correctness_test(config, max(args.output_len)) else 1)
    try:
        bench(args, config)
    except ValueError as error:  # the batch does not fit
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
