"""How long a server takes from its start to its first answer, and what a running request costs.

    python -m benchmark.server_start
    python -m benchmark.server_start --flags "--max-running-requests 64 \\
        --speculative-algorithm STANDALONE --speculative-eagle-topk 4 \\
        --speculative-num-draft-tokens 16 \\
        --speculative-draft-model-path benchmark/models/llama-2-layers"

Without --flags: the geometry of Nemotron-Nano-9B-v2 with dummy weights, without drafts. Starts it
``--starts`` times and keeps the last, for which the kernels are compiled. Then runs as many
requests at once as the server takes, and prints its memory table. Appends ``server_start_s`` and
``state_mb_per_request`` to --results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmark.lib.adaptive import dummy_model_flags
from benchmark.lib.client import server_info
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.client import generate_all

HERE = Path(__file__).parent
GEOMETRY = dummy_model_flags(HERE / "models" / "nemotron-nano-9b-v2")
TIMEOUT = 300.0  # seconds


def answer_all(base_url: str, requests: int, prompt: int, new_tokens: int) -> list[list[int]]:
    """Output tokens of ``requests`` different prompts, sent at once."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    bodies = [
        {"input_ids": [number + k for k in range(prompt)], "sampling_params": sampling}
        for number in range(1, requests + 1)
    ]
    replies = generate_all(base_url, bodies, parallel=requests, timeout=TIMEOUT)
    return [reply["output_ids"] for reply in replies]


def state_megabytes(info: dict[str, Any]) -> float:
    """Per running request: its state, and its rows or node states."""
    state = info["checkpoint_bytes"] / info["max_checkpoints"]
    return float(state + info["verify_bytes"] / info["max_running_requests"]) / 1e6


def record(path: Path, info: dict[str, Any], machine: dict[str, Any], **values: float) -> None:
    """Prints and appends ``values``, by name."""
    plain = info["speculative_algorithm"] == "NONE"
    for name, value in values.items():
        print(f"{name} {value:.2f}", flush=True)
        line = {
            "name": name,
            "mode": "plain" if plain else info["mamba_verify_mode"],
            "nodes": 1 if plain else info["speculative_num_draft_tokens"],
            "rows": info["rows_per_request"],
            "running": info["max_running_requests"],
            "value": round(value, 2),
            **machine,
        }
        results.append(path, [line])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flags", default="", help="added to those of the geometry")
    parser.add_argument("--model-flags", default=shlex.join(GEOMETRY), help="instead of them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "h100.jsonl")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    exit_on_sigterm()
    machine = facts.facts(args.device)
    flags = ["--device", args.device, *shlex.split(args.model_flags), *shlex.split(args.flags)]
    for number in range(1, args.starts + 1):
        begin = time.perf_counter()
        with ServerProcess(flags) as server:
            seconds = time.perf_counter() - begin
            print(f"start {number}: first answer after {seconds:.1f} s", flush=True)
            if number < args.starts:
                continue
            info = server_info(server.base_url)
            running = info["max_running_requests"]
            outputs = answer_all(server.base_url, running, args.prompt_tokens, args.new_tokens)
    print(server.output)
    if any(len(output) != args.new_tokens for output in outputs):
        sys.exit("error: an answer is too short")
    print(f"{running} requests of {args.prompt_tokens} + {args.new_tokens} tokens ran at once")
    values = {"server_start_s": seconds, "state_mb_per_request": state_megabytes(info)}
    record(args.results, info, machine, **values)


if __name__ == "__main__":
    main()
