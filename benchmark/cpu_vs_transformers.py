"""CPU throughput beside transformers: same checkpoint, same process, same number of threads.

    python benchmark/cpu_vs_transformers.py --threads 2

Greedy, float32, a fixed number of new tokens (stop tokens are ignored), prefill included in the
time. Repetitions of the contestants alternate, so that a slow minute of the machine hits all; the
best one of each counts. The tokens of both sides are compared, too.
Appends one JSON line a measurement to benchmark/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from mamba_eagle.bench_one_batch import make_driver, synthetic_prompts
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval import machine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.driver import InProcessDriver, greedy, sized_for

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
PEER = "transformers"


@dataclass
class Contestant:
    name: str
    mode: str  # transformers, plain or eagle
    batch: int
    run: Callable[[], tuple[list[list[int]], float]]  # the new tokens, tokens per request and step
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    accept_length: float = 1.0

    def measure(self) -> None:
        begin = time.perf_counter()
        self.tokens, self.accept_length = self.run()
        self.seconds.append(time.perf_counter() - begin)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(tokens) for tokens in self.tokens) / min(self.seconds)


def transformers_generate(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            use_cache=True,
        )
    return out[:, ids.shape[1] :].tolist()


def load_transformers(folder: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Ours ignores stop tokens; without these there is nothing that could end the peer early either.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def ours(driver: InProcessDriver, prompts: list[list[int]], new_tokens: int) -> Any:
    made = driver.generate(prompts, greedy(new_tokens))
    return made.tokens, made.accept_length


def contestants(args: argparse.Namespace) -> list[Contestant]:
    base = EngineConfig(model_path=args.model_path, device="cpu", cpu_threads=args.threads)
    longest = args.input_len + args.output_len
    drivers = {}
    for mode, algorithm in (("plain", "NONE"), ("eagle", "auto")):
        config = resolve(
            EngineConfig(
                model_path=args.model_path,
                device="cpu",
                dtype="float32",
                cpu_threads=args.threads,
                speculative_algorithm=algorithm,
                speculative_draft_model_path=args.speculative_draft_model_path
                if mode == "eagle"
                else "",
            )
        )
        if mode == "eagle" and config.speculative_algorithm == "NONE":
            continue  # no head at hand
        drivers[mode] = make_driver(sized_for(config, max(args.batch_size), longest))
    model = load_transformers(resolve(base).model_path)
    # Loading sets the number of threads; from here on it is the same for all.
    torch.set_num_threads(args.threads)

    config = resolve(base)
    vocab_size = drivers["plain"].runner.ready.vocab_size
    new = args.output_len
    found = []
    for batch in args.batch_size:
        prompts = synthetic_prompts(config, vocab_size, batch, args.input_len)
        found.append(
            Contestant(
                f"{PEER}-b{batch}",
                PEER,
                batch,
                lambda prompts=prompts: (transformers_generate(model, prompts, new), 1.0),
            )
        )
        for mode, driver in drivers.items():
            found.append(
                Contestant(
                    f"{mode}-b{batch}",
                    mode,
                    batch,
                    lambda driver=driver, prompts=prompts: ours(driver, prompts, new),
                )
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", default="", help="checkpoint; empty: the embedded model")
    parser.add_argument("--speculative-draft-model-path", default="", help="its draft head")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--result-filename", default=str(RESULTS), help="empty: keep nothing")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    field = contestants(args)
    for contestant in field:
        contestant.run()  # warm-up
    for _ in range(args.repetitions):
        for contestant in field:
            contestant.measure()

    peers = {c.batch: c for c in field if c.mode == PEER}
    facts = {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "repetitions": args.repetitions,
        "cpu": machine.cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": machine.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    print(f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, ", end="")
    print(f"transformers {facts['transformers']}, commit {facts['commit']}")
    print(f"{args.input_len} prompt tokens, {args.output_len} new tokens, best of ", end="")
    print(f"{args.repetitions}; accept: tokens a step; equal: requests whose tokens are the peer's")
    print(f"{'mode':>14} {'batch':>5} {'token/s':>9} {'ratio':>6} {'accept':>6} {'equal':>7}")
    records = []
    for c in field:
        peer = peers[c.batch]
        ratio = c.tokens_per_second / peer.tokens_per_second
        equal = sum(a == b for a, b in zip(c.tokens, peer.tokens))
        print(
            f"{c.mode:>14} {c.batch:>5} {c.tokens_per_second:>9.1f} {ratio:>6.2f} "
            f"{c.accept_length:>6.2f} {f'{equal}/{c.batch}':>7}"
        )
        records.append(
            {
                "name": c.name,
                "mode": c.mode,
                "batch": c.batch,
                "value": round(c.tokens_per_second, 2),
                "unit": "token/s",
                "ratio_to_transformers": round(ratio, 3),
                "accept_length": round(c.accept_length, 3),
                "equal_to_transformers": equal,
                **facts,
            }
        )
    if args.result_filename:
        path = Path(args.result_filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
