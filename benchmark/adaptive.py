"""Is drafting ever slower than not drafting? Servers that choose their trees, beside fixed ones.

    python benchmark/adaptive.py
    python benchmark/adaptive.py --batch-size 1 8 --rounds 3 --common "--device cpu --cpu-threads 1"

    python benchmark/adaptive.py --geometry --batch-size 1 8 32

Starts all servers at once: without drafts, with each fixed shape, and adaptive ones with the
embedded head and with one of random weights. They answer the same problems one after the other, in
rounds, and each round gives ratios to its own plain run: a slow minute of the machine hits all. The
ratio of the fastest rounds, of all there were, is what an undisturbed machine would show.
--geometry: the sizes of Nemotron-Nano-9B-v2 and a drafter of two layers, random weights both, so
that what they draft is never right; with and without drafts, and nothing else.
Appends one JSON line a server and batch size to benchmark/results/adaptive.jsonl.

Goals: ``useless`` at 0.97 of ``plain`` or more, ``adaptive`` at 0.97 of the best fixed one or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
from compare_server import running_server
from safetensors.torch import save_file
from server_start import GEOMETRY, answer_all

from mamba_eagle.config import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k, results
from mamba_eagle.eval.few_shot_gsm8k import ask
from mamba_eagle.models.config import ModelConfig
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import random_weights

RESULTS = Path(__file__).parent / "results" / "adaptive.jsonl"
PLAIN, ADAPTIVE, USELESS = "plain", "adaptive", "useless"


@dataclass
class Contestant:
    """A running server, and what it did in each round."""

    name: str
    base_url: str
    speeds: list[float] = field(default_factory=list)  # tokens/s
    accept_length: float = 1.0

    def ratios(self, other: Contestant) -> list[float]:
        return [own / base for own, base in zip(self.speeds, other.speeds)]


def tree_flags(shape: str) -> list[str]:
    """``shape`` is top-k x steps x nodes, as in 4x5x16."""
    flags = ("eagle-topk", "num-steps", "num-draft-tokens")
    return [
        word
        for flag, value in zip(flags, shape.split("x"), strict=True)
        for word in (f"--speculative-{flag}", value)
    ]


def server_flags(shapes: list[str], useless_head: Path) -> dict[str, list[str]]:
    """name -> flags. The adaptive servers draft the first shape at most."""
    eagle = ["--model-path", str(EMBEDDED_MODEL), "--speculative-algorithm", "EAGLE"]
    largest = tree_flags(shapes[0])
    servers = {PLAIN: ["--model-path", str(EMBEDDED_MODEL), "--speculative-algorithm", "NONE"]}
    for shape in shapes:
        servers[shape] = [*eagle, *tree_flags(shape), "--no-speculative-adaptive"]
    servers[ADAPTIVE] = [*eagle, *largest]
    servers[USELESS] = [*eagle, *largest, "--speculative-draft-model-path", str(useless_head)]
    return servers


def geometry_flags(shape: str) -> dict[str, list[str]]:
    drafter = Path(__file__).parent / "models" / "llama-2-layers"
    standalone = ["--speculative-algorithm", "STANDALONE", *tree_flags(shape)]
    standalone += ["--speculative-draft-model-path", str(drafter)]
    return {
        PLAIN: [*GEOMETRY, "--speculative-algorithm", "NONE"],
        USELESS: [*GEOMETRY, *standalone],
    }


def write_useless_head(folder: Path) -> None:
    """The embedded head's shape with random weights: what it drafts is never right."""
    head = EagleHead(ModelConfig.from_pretrained(EMBEDDED_HEADS["EAGLE"]))
    random_weights(head, 1)
    shutil.copy(EMBEDDED_HEADS["EAGLE"] / "config.json", folder)
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    save_file(weights, folder / "model.safetensors")


class Made(NamedTuple):
    """By the requests of a round."""

    tokens: int
    steps: int  # counted once a request; 0: not known


class Problems:
    """The embedded ones, answered by the embedded model."""

    def __init__(self, args: argparse.Namespace) -> None:
        problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
        self.prompts = [gsm8k.make_prompt([], problem.question) for problem in problems]
        self.each, self.new_tokens = args.problems, args.max_new_tokens

    def answer(self, base_url: str, batch: int) -> Made:
        wanted = [self.prompts[i % len(self.prompts)] for i in range(self.each * batch)]
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens, "stop": gsm8k.STOP}
        replies = asyncio.run(ask(base_url, wanted, sampling, batch))
        return Made(
            sum(reply.completion_tokens for reply in replies),
            sum(reply.verify_steps for reply in replies),
        )


class Prompts:
    """Made of any tokens, for weights that mean nothing."""

    LENGTH = 256

    def __init__(self, args: argparse.Namespace) -> None:
        self.each, self.new_tokens = args.problems, args.max_new_tokens

    def answer(self, base_url: str, batch: int) -> Made:
        tokens = 0
        for _ in range(self.each):
            made = asyncio.run(answer_all(base_url, batch, self.LENGTH, self.new_tokens))
            tokens += sum(map(len, made))
        return Made(tokens, 0)


def run_round(contestant: Contestant, work: Problems | Prompts, batch: int) -> None:
    begin = time.perf_counter()
    made = work.answer(contestant.base_url, batch)
    contestant.speeds.append(made.tokens / (time.perf_counter() - begin))
    contestant.accept_length = made.tokens / made.steps if made.steps else 1.0


def measure_batch(
    contestants: list[Contestant], work: Problems | Prompts, batch: int, rounds: int
) -> None:
    """Fills ``speeds``. The first to answer changes from round to round."""
    for contestant in contestants:
        for _ in range(2):
            run_round(contestant, work, batch)
        contestant.speeds.clear()  # it was learning what pays
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            run_round(contestant, work, batch)


def report(contestants: list[Contestant], shapes: list[str], batch: int, args) -> None:
    by_name = {contestant.name: contestant for contestant in contestants}
    plain = by_name[PLAIN]
    fixed = [by_name[name] for name in (PLAIN, *shapes)]
    best = max(fixed, key=lambda each: median(each.speeds))
    for each in contestants:
        ratios, of_best = each.ratios(plain), each.ratios(best)
        fastest = max(each.speeds) / max(plain.speeds)
        fastest_of_best = max(each.speeds) / max(max(other.speeds) for other in fixed)
        print(
            f"{batch:>5} {each.name:>10} {median(each.speeds):>10.0f} {each.accept_length:>6.2f} "
            f"{median(ratios):>8.3f} {min(ratios):>6.3f} to {max(ratios):.3f} {fastest:>8.3f} "
            f"{median(of_best):>8.3f} {min(of_best):>6.3f} to {max(of_best):.3f} "
            f"{fastest_of_best:>8.3f}",
            flush=True,
        )
        record = {
            "name": "adaptive_ratio",
            "batch": batch,
            "head": {PLAIN: "none", USELESS: "random"}.get(each.name, "embedded"),
            "choice": ADAPTIVE if each.name in (ADAPTIVE, USELESS) else each.name,
            "value": round(median(ratios), 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
            "fastest": round(fastest, 4),
            "fastest_of_best_fixed": round(fastest_of_best, 4),
            "rounds": args.rounds,
            "best_fixed": best.name,
            "of_best_fixed": round(median(of_best), 4),
            "tokens_per_s": round(median(each.speeds), 1),
            "accept_length": round(each.accept_length, 3),
            **args.facts,
        }
        results.append(args.results, [record])


def shapes_used(contestant: Contestant) -> str:
    """How many steps each shape was drafted in, so far."""
    info = httpx.get(f"{contestant.base_url}/server_info", timeout=30, trust_env=False).json()
    used = info["speculation"]["shapes"]
    steps = ", ".join(f"{name} {use['steps']}" for name, use in used.items())
    return f"{contestant.name}: {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--problems", type=int, default=4, help="of each client in a round")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument(
        "--geometry", action="store_true", help="a model of 9B parameters, weights random"
    )
    parser.add_argument(
        "--fixed",
        nargs="+",
        default=["4x5x16", "2x5x8", "1x5x6"],
        metavar="TOPKxSTEPSxNODES",
        help="shapes of servers that always draft; the first is the adaptive servers' largest",
    )
    parser.add_argument("--common", default="", help="flags for all servers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.facts = results.facts("cpu" if "--device cpu" in args.common else "auto")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and stop the servers

    work = Prompts(args) if args.geometry else Problems(args)
    # each round is the first one to the server
    common = ["--disable-radix-cache", *shlex.split(args.common)]
    with contextlib.ExitStack() as stack:
        useless_head = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_useless_head(useless_head)
        flags = server_flags(args.fixed, useless_head)
        if args.geometry:
            args.fixed, flags = [], geometry_flags(args.fixed[0])
        servers = [running_server([*common, *own]) for own in flags.values()]
        with ThreadPoolExecutor() as pool:
            urls = pool.map(stack.enter_context, servers)
            contestants = [Contestant(name, url) for name, url in zip(flags, urls)]
        print(f"{args.facts['gpu']}, commit {args.facts['commit']}, {args.rounds} rounds")
        print(
            "batch     server   tokens/s accept  of plain: least to most   fastest   "
            "of the best fixed: …  fastest"
        )
        for batch in args.batch_size:
            for contestant in contestants:
                contestant.speeds.clear()
            measure_batch(contestants, work, batch, args.rounds)
            report(contestants, args.fixed, batch, args)
        for contestant in contestants:
            if contestant.name in (ADAPTIVE, USELESS):
                print(shapes_used(contestant))


if __name__ == "__main__":
    main()
