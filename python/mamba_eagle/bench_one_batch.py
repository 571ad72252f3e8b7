"""Prefill and decode times of one batch in this process, or a served batch with --url.

    python -m mamba_eagle.bench_one_batch --batch-size 1 8 --input-len 256 --output-len 128
    python -m mamba_eagle.bench_one_batch --correctness-test
    python -m mamba_eagle.bench_one_batch --url http://127.0.0.1:30000 --batch-size 1 8

Flags and output lines are those of SGLang's script. With speculation a decode step makes a varying
number of tokens; every throughput counts the tokens that were made. Times are the model runner's;
the scheduler's own are left out (see mamba_eagle/bench/batch.py).
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from typing import NamedTuple

from mamba_eagle.bench.client import Client, ServerError, add_server_flags, full_url
from mamba_eagle.config import ConfigError, EngineConfig, Parser, add_arguments, from_arguments
from mamba_eagle.eval.gsm8k import problem_texts, synthetic_prompts
from mamba_eagle.resolve import resolve

CORRECTNESS_PROMPTS = 3
SERVED_PROBLEMS = 200  # from which prompts for a server are cut


def make_parser() -> Parser:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser, EngineConfig)
    own = parser.add_argument_group("benchmark; several values of the first three make a sweep")
    own.add_argument("--batch-size", type=int, nargs="+", default=[1])
    own.add_argument("--input-len", type=int, nargs="+", default=[256])
    own.add_argument("--output-len", type=int, nargs="+", default=[32])
    add_server_flags(own)
    own.add_argument("--run-name", default="default")
    own.add_argument("--result-filename", default="", help="append one JSON line per measurement")
    own.add_argument(
        "--results", default="", help="append lines as in benchmark/results, one per number"
    )
    own.add_argument(
        "--compare-verify-modes",
        action="store_true",
        help="measure --mamba-verify-mode deferred and snapshot, one after the other, and compare",
    )
    own.add_argument(
        "--dummy-routing",
        choices=("model", "uniform", "same"),
        default="model",
        help="experts of each token: by the model's routers, at random, or the same for all",
    )
    own.add_argument(
        "--dummy-adapters",
        type=int,
        default=0,
        help="how many adapters of random numbers and the highest rank requests take turns with",
    )
    own.add_argument("--correctness-test", action="store_true", help="print texts, measure nothing")
    own.add_argument("--profile", action="store_true", help="write a torch profiler trace")
    return parser


# ── a served batch ──


class Served(NamedTuple):
    """Counts of tokens and steps, and seconds from the first request to the last reply."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int  # 0 without speculation

    def lines(self) -> list[str]:
        total = self.prompt_tokens + self.output_tokens
        lines = [
            f"Prompts. tokens: {self.prompt_tokens}, of them cached: {self.cached_tokens}",
            f"Output.  throughput: {self.output_tokens / self.seconds:9.2f} token/s",
            f"Total. latency: {self.seconds:6.3f} s, "
            f"throughput: {total / self.seconds:9.2f} token/s",
        ]
        if self.steps:
            lines.append(f"Acceptance. length: {self.output_tokens / self.steps:.3f} token/step")
        return lines


async def measure_server(args: argparse.Namespace, text: str) -> None:
    """Every combination of batch size, input and output length in ``args``, printed as it comes.
    text: what prompts are cut from.

    Raises: ServerError
    """
    url = full_url(args.url)
    async with Client(url, args.api_key) as client:
        tokens = await client.tokenize(text)
        for size in itertools.product(args.batch_size, args.input_len, args.output_len):
            batch, input_len, output_len = size
            print(f"Benchmark ... {url}, batch {batch}, input {input_len}, output {output_len}")
            prompts = [_cut(tokens, i * input_len, input_len) for i in range(batch)]
            print("\n".join((await _serve(client, prompts, output_len)).lines()))


def _cut(tokens: list[int], begin: int, length: int) -> list[int]:
    """``length`` tokens from ``begin`` on, as if ``tokens`` had no end."""
    return [tokens[(begin + i) % len(tokens)] for i in range(length)]


async def _serve(client: Client, prompts: list[list[int]], output_len: int) -> Served:
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]
    begin = time.perf_counter()
    replies = await client.generate_all(bodies, len(bodies))
    seconds = time.perf_counter() - begin
    metas = [reply["meta_info"] for reply in replies]

    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "spec_verify_ct")
    return Served(seconds, *(sum(meta.get(name) or 0 for meta in metas) for name in counts))


def main(argv: list[str] | None = None) -> None:
    # Read when torch is first imported. A thread that spins at a barrier takes the core from the
    # thread it waits for as soon as anything else runs: steps become ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = make_parser()
    args = parser.parse_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}: each value must be 1 or more")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also into a pipe
    config: EngineConfig = from_arguments(EngineConfig, args)
    if args.url:
        if config != EngineConfig():
            parser.error(f"--url {args.url}: the server has its own model; leave its flags out")
        try:
            asyncio.run(measure_server(args, "\n".join(problem_texts(SERVED_PROBLEMS))))
        except ServerError as error:
            sys.exit(f"error: {error}")
        return
    try:
        config = resolve(config)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if args.dummy_adapters > (config.adapter_slots if config.num_ranks == 1 else 0):
        parser.error(
            f"--dummy-adapters {args.dummy_adapters}: needs as many --max-loras, and one device"
        )
    if config.simulate_acc_len and args.correctness_test:
        sys.exit(
            f"error: --simulate-acc-len {config.simulate_acc_len:g}: texts mean nothing with it, "
            "so --correctness-test has nothing to compare"
        )
    from mamba_eagle.bench import one_batch  # torch takes seconds to import, --help does not

    try:
        if args.correctness_test:
            texts = problem_texts(CORRECTNESS_PROMPTS)
            same = one_batch.correctness_test(config, texts, max(args.output_len))
            sys.exit(0 if same else 1)
        one_batch.measure(args, config, synthetic_prompts)
    except ValueError as error:  # the model cannot be loaded, or the batch does not fit
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
