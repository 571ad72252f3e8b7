"""How long a server takes from its start to its first answer, and what a running request costs.

    python benchmark/server_start.py
    python benchmark/server_start.py --flags "--max-running-requests 64 \\
        --speculative-algorithm STANDALONE --speculative-eagle-topk 4 \\
        --speculative-num-draft-tokens 16 \\
        --speculative-draft-model-path benchmark/models/llama-2-layers"

Without --flags: the geometry of Nemotron-Nano-9B-v2 with dummy weights, without drafts. Starts it
``--starts`` times and keeps the last, for which the kernels are compiled; then lets as many
requests run at once as it takes, and prints its memory table. Appends ``server_start_s`` and
``state_mb_per_request`` to --results.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from compare_server import running_server

from mamba_eagle.eval import results

HERE = Path(__file__).parent
GEOMETRY = [
    *("--model-path", str(HERE / "models" / "nemotron-nano-9b-v2"), "--load-format", "dummy"),
    "--skip-tokenizer-init",
]


async def answer_all(base_url: str, requests: int, prompt: int, new_tokens: int) -> list[list[int]]:
    """Output tokens of ``requests`` different prompts, sent at once."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as client:

        async def one(number: int) -> list[int]:
            body = {"input_ids": [number + k for k in range(prompt)], "sampling_params": sampling}
            reply = await client.post("/generate", json=body)
            reply.raise_for_status()
            return reply.json()["output_ids"]

        return await asyncio.gather(*map(one, range(1, requests + 1)))


def state_megabytes(info: dict[str, Any]) -> float:
    """Of a running request: its checkpoint, and its rows or node states."""
    state = info["checkpoint_bytes"] / info["max_state_slots"]
    return (state + info["verify_bytes"] / info["max_running_requests"]) / 1e6


def record(args: argparse.Namespace, info: dict[str, Any], name: str, value: float) -> None:
    print(f"{name} {value:.2f}", flush=True)
    plain = info["speculative_algorithm"] == "NONE"
    line = {
        "name": name,
        "mode": "plain" if plain else info["mamba_verify_mode"],
        "nodes": 1 if plain else info["speculative_num_draft_tokens"],
        "rows": info["rows_per_request"],
        "running": info["max_running_requests"],
        "value": round(value, 2),
        **args.facts,
    }
    results.append(args.results, [line])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flags", default="", help="behind those of the geometry")
    parser.add_argument("--model-flags", default=shlex.join(GEOMETRY), help="instead of them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "h100.jsonl")
    args = parser.parse_args()
    args.facts = results.facts(args.device)
    flags = ["--device", args.device, *shlex.split(args.model_flags), *shlex.split(args.flags)]
    for number in range(args.starts):
        with tempfile.TemporaryFile("w+") as log:
            begin = time.perf_counter()
            with running_server(flags, log_file=log) as base_url:
                seconds = time.perf_counter() - begin
                print(f"start {number + 1}: first answer after {seconds:.1f} s", flush=True)
                if number + 1 < args.starts:
                    continue
                info = httpx.get(f"{base_url}/server_info", timeout=30, trust_env=False).json()
                running = info["max_running_requests"]
                counts = (running, args.prompt_tokens, args.new_tokens)
                outputs = asyncio.run(answer_all(base_url, *counts))
            log.seek(0)
            print(log.read())
    if any(len(output) != args.new_tokens for output in outputs):
        sys.exit("error: an answer is too short")
    print(f"{running} requests of {args.prompt_tokens} + {args.new_tokens} tokens ran at once")
    record(args, info, "server_start_s", seconds)
    record(args, info, "state_mb_per_request", state_megabytes(info))


if __name__ == "__main__":
    main()
