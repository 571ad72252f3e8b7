"""Times SGLang's engine on the geometry and settings that bench_one_batch is timed on.

SGLang pins its own torch: give it an environment of its own. Written against 0.5.17, whose Mamba
backend for trees is Triton.

    python3 -m venv .venv-sglang
    .venv-sglang/bin/pip install 'sglang==0.5.17'
    PYTHONPATH=python .venv-sglang/bin/python -m benchmark.peers.sglang_engine \\
        --batch-size 1 8 32 --results benchmark/results/peers.jsonl

One engine after the other: plain, then with a STANDALONE drafter and an acceptance length that
SGLANG_SIMULATE_ACC_LEN forces. Weights are random (--load-format dummy). The time of a prompt's
pass is that of a request for one token; a decode step is what a request for more takes beyond it,
divided by its steps. Both are medians over --repeats. Lines are those of bench_one_batch, with
"engine": "sglang".
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mamba_eagle.bench import facts, results

MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = MODELS / "nemotron-nano-9b-v2", MODELS / "llama-2-layers"
VOCABULARY = 131072
STEPS, TOPK, NODES = 5, 3, 8

Generate = Callable[..., list[dict[str, Any]]]  # sglang.Engine.generate, of a list of prompts


class Batch(NamedTuple):
    """What one batch took. Seconds, tokens."""

    size: int
    prefill: float  # until all have their first token
    decode: float  # from there to the last token
    steps: int
    tokens: int  # of each request, made in those steps

    @property
    def step_ms(self) -> float:
        return self.decode / self.steps * 1e3

    @property
    def tokens_per_second(self) -> float:
        return self.size * self.tokens / self.decode


def engine_arguments(largest_batch: int, is_tree: bool) -> dict[str, Any]:
    """Of sglang.Engine, which are those of sglang.srt.server_args.ServerArgs."""
    arguments = {
        "model_path": str(TARGET),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "attention_backend": "flashinfer",
        "mamba_backend": "triton",
        "mamba_ssm_dtype": "float32",
        "disable_radix_cache": True,
        "max_running_requests": largest_batch,
        "cuda_graph_max_bs_decode": largest_batch,
        "random_seed": 0,
        "log_level": "error",
    }
    if is_tree:
        arguments |= {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(DRAFT),
            "speculative_num_steps": STEPS,
            "speculative_eagle_topk": TOPK,
            "speculative_num_draft_tokens": NODES,
        }
    return arguments


def measure(generate: Generate, size: int, input_len: int, output_len: int, repeats: int) -> Batch:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(input_len)] for _ in range(size)]

    def run(max_new_tokens: int) -> list[dict[str, Any]]:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return generate(input_ids=prompts, sampling_params=sampling)

    run(output_len)  # compiles what is not compiled yet
    prefill = median(seconds(lambda: run(1)) for _ in range(repeats))
    whole = median(seconds(lambda: run(output_len)) for _ in range(repeats))
    facts = [made["meta_info"] for made in run(output_len)]
    tokens = min(fact["completion_tokens"] for fact in facts) - 1
    # without speculation nothing is counted: each step makes a token
    steps = max(fact.get("spec_verify_ct", tokens) for fact in facts)
    return Batch(size, prefill, whole - prefill, steps, tokens)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def result_lines(
    batch: Batch, args: argparse.Namespace, is_tree: bool, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    common = {
        "engine": "sglang",
        "mode": "snapshot",  # it keeps one state per node
        "batch": batch.size,
        "nodes": NODES if is_tree else 1,
        "rows": None,
        "accept_length": round(batch.tokens / batch.steps, 3),
        "simulated_accept_length": args.simulate_acc_len if is_tree else None,
        "tree": f"{TOPK}x{STEPS}x{NODES}" if is_tree else "plain",
        "model": TARGET.name,
        "input_len": args.input_len,
        "output_len": args.output_len,
    }
    values = {
        "prefill_s": batch.prefill,
        "tree_step_ms" if is_tree else "decode_step_ms": batch.step_ms,
        "tokens_per_s": batch.tokens_per_second,
    }
    return [
        {"name": name, **common, "value": float(f"{value:.6g}"), **facts}
        for name, value in values.items()
    ]


def run_engine(args: argparse.Namespace, is_tree: bool, facts: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(**engine_arguments(max(args.batch_size), is_tree))
    try:
        for size in args.batch_size:
            batch = measure(engine.generate, size, args.input_len, args.output_len, args.repeats)
            print(
                f"{'tree' if is_tree else 'plain':<6} batch {size:>3}: prefill "
                f"{batch.prefill:.4f} s, {batch.step_ms:.3f} ms/step, "
                f"{batch.tokens_per_second:.1f} token/s, "
                f"{batch.tokens / batch.steps:.3f} accepted per step"
            )
            if args.results:
                results.append(args.results, result_lines(batch, args, is_tree, facts))
    finally:
        engine.shutdown()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--simulate-acc-len", type=float, default=3.0)
    parser.add_argument("--results", default="", help="append result lines to this file")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    # read when the engine's processes import sglang; without a drafter it changes nothing
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(args.simulate_acc_len)
    machine = {**facts.facts("cuda"), "sglang": facts.version("sglang")}
    for is_tree in (False, True):
        run_engine(args, is_tree, machine)


if __name__ == "__main__":
    main()
