"""Is drafting ever slower than not drafting? Engines that choose their trees, beside fixed ones.

    python benchmark/adaptive.py
    python benchmark/adaptive.py --batch-size 1 8 --rounds 9 --common "--device cpu --cpu-threads 1"
    python benchmark/adaptive.py --geometry --rounds 7
    python benchmark/adaptive.py --servers

Starts all at once: without drafts, with each fixed shape, and adaptive ones with the embedded head
and with one of random weights. They answer the same problems one after the other, in rounds, and
each round gives ratios to its own plain run: a slow minute of the machine hits all. The ratio of
the fastest rounds, of all there were, is what an undisturbed machine would show. Scheduler and
runner work in this process, a step ahead on a GPU as in a server; with --servers whole servers are
asked over HTTP, whose processes disturb each other more than 3 %.
--geometry: the sizes of Nemotron-Nano-9B-v2 and a drafter of two layers, random weights both, so
that what they draft is never right; with and without drafts, and nothing else.
Appends one JSON line a contestant and batch size to benchmark/results/adaptive.jsonl.

Goals: ``useless`` at 0.97 of ``plain`` or more, ``adaptive`` at 0.97 of the best fixed one or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
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
from typing import NamedTuple, Protocol

import httpx
import msgspec
import torch
from compare_server import running_server
from safetensors.torch import save_file
from server_start import GEOMETRY
from tokenizers import Tokenizer

from mamba_eagle.config import ServerConfig, add_arguments, from_arguments
from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k, results
from mamba_eagle.message import Generate, SpeculationState
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.model_runner import ModelRunner

RESULTS = Path(__file__).parent / "results" / "adaptive.jsonl"
# each round is the first one to all, and they share the memory there is
SHARED = [
    *("--disable-radix-cache", "--mem-fraction-static", "0.9"),
    *("--max-total-tokens", "40000", "--max-mamba-cache-size", "64"),
]
PLAIN, ADAPTIVE, USELESS = "plain", "adaptive", "useless"


class Made(NamedTuple):
    """By the requests of a round."""

    tokens: int
    steps: int  # counted once a request


class Answering(Protocol):
    """An engine, or a server."""

    def answer(self, prompts: list[list[int]], parallel: int, new_tokens: int) -> Made: ...

    def speculation(self) -> SpeculationState: ...


class Engine:
    """In this process."""

    def __init__(self, flags: list[str]) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser, ServerConfig)
        config = resolve(from_arguments(ServerConfig, parser.parse_args(flags)))
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self.engine = OfflineEngine(config, ModelRunner(config))
        self.names = itertools.count()

    def answer(self, prompts: list[list[int]], parallel: int, new_tokens: int) -> Made:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
        waiting, running, tokens, steps = list(reversed(prompts)), 0, 0, 0
        while waiting or not self.engine.idle:
            while waiting and running < parallel:
                running += 1
                rid, prompt = str(next(self.names)), waiting.pop()
                self.engine.add(Generate(rid=rid, token_ids=prompt, sampling=sampling))
            for output in self.engine.step():
                tokens += len(output.token_ids)
                if output.finish is not None:
                    running -= 1
                    steps += output.verify_steps
        return Made(tokens, steps)

    def speculation(self) -> SpeculationState:
        return self.engine.scheduler.policy.state()


class Server:
    """At a URL."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def answer(self, prompts: list[list[int]], parallel: int, new_tokens: int) -> Made:
        return asyncio.run(self._answer(prompts, parallel, new_tokens))

    async def _answer(self, prompts: list[list[int]], parallel: int, new_tokens: int) -> Made:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        gate = asyncio.Semaphore(parallel)
        async with httpx.AsyncClient(
            base_url=self.base_url, timeout=300, trust_env=False
        ) as client:

            async def one(prompt: list[int]) -> Made:
                body = {"input_ids": prompt, "sampling_params": sampling}
                async with gate:
                    reply = await client.post("/generate", json=body)
                reply.raise_for_status()
                about = reply.json()["meta_info"]
                return Made(about["completion_tokens"], about.get("spec_verify_ct", 0))

            return Made(*map(sum, zip(*await asyncio.gather(*map(one, prompts)))))

    def speculation(self) -> SpeculationState:
        reply = httpx.get(f"{self.base_url}/server_info", timeout=30, trust_env=False)
        return msgspec.convert(reply.json()["speculation"], SpeculationState)


@dataclass
class Contestant:
    """One that answers, and what it did in each round."""

    name: str
    answering: Answering
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


def contestants_flags(shapes: list[str], useless_head: Path) -> dict[str, list[str]]:
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
    head = EagleHead(read_model_config(EMBEDDED_HEADS["EAGLE"]))
    random_weights(head, 1)
    shutil.copy(EMBEDDED_HEADS["EAGLE"] / "config.json", folder)
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    save_file(weights, folder / "model.safetensors")


def problems() -> list[list[int]]:
    """The embedded ones, as token ids."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    return gsm8k.prompt_ids(gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS), tokenizer)


def any_tokens(length: int = 256) -> list[list[int]]:
    """For weights that mean nothing."""
    return [[first + k for k in range(length)] for first in range(100)]


def run_round(
    contestant: Contestant, prompts: list[list[int]], batch: int, new_tokens: int
) -> None:
    begin = time.perf_counter()
    made = contestant.answering.answer(prompts, batch, new_tokens)
    contestant.speeds.append(made.tokens / (time.perf_counter() - begin))
    contestant.accept_length = made.tokens / made.steps if made.steps else 1.0


def measure_batch(
    contestants: list[Contestant], prompts: list[list[int]], batch: int, args: argparse.Namespace
) -> None:
    """Fills ``speeds``. The first to answer changes from round to round."""
    for contestant in contestants:
        for _ in range(args.warm_up):
            run_round(contestant, prompts, batch, args.max_new_tokens)
        contestant.speeds.clear()  # it was learning what pays
    for number in range(args.rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            run_round(contestant, prompts, batch, args.max_new_tokens)


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
            "over_http": args.servers,
            "geometry": "nemotron-nano-9b-v2" if args.geometry else "embedded",
            "best_fixed": best.name,
            "of_best_fixed": round(median(of_best), 4),
            "tokens_per_s": round(median(each.speeds), 1),
            "accept_length": round(each.accept_length, 3),
            **args.facts,
        }
        results.append(args.results, [record])


def shapes_used(contestant: Contestant) -> str:
    """How many steps each shape was drafted in, so far."""
    state = contestant.answering.speculation()
    steps = ", ".join(f"{name} {use.steps}" for name, use in state.shapes.items())
    return f"{contestant.name}: {steps}" + (", given up" if state.disabled else "")


def start(
    flags: dict[str, list[str]], servers: bool, stack: contextlib.ExitStack
) -> list[Contestant]:
    """Engines, or servers that end with ``stack``."""
    if not servers:
        return [Contestant(name, Engine(own)) for name, own in flags.items()]
    starting = [running_server([*own, "--skip-tokenizer-init"]) for own in flags.values()]
    with ThreadPoolExecutor() as pool:
        urls = pool.map(stack.enter_context, starting)
        return [Contestant(name, Server(url)) for name, url in zip(flags, urls)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--problems", type=int, default=4, help="of each client in a round")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument(
        "--geometry", action="store_true", help="a model of 9B parameters, weights random"
    )
    parser.add_argument(
        "--fixed",
        nargs="+",
        default=["4x5x16", "2x5x8", "1x5x6"],
        metavar="TOPKxSTEPSxNODES",
        help="shapes that are always drafted; the first is the largest of those that choose",
    )
    parser.add_argument("--servers", action="store_true", help="ask servers over HTTP")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--common", default="", help="flags for all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.facts = results.facts("cpu" if "--device cpu" in args.common else "auto")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and stop the servers

    prompts = any_tokens() if args.geometry else problems()
    with contextlib.ExitStack() as stack:
        useless_head = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_useless_head(useless_head)
        flags = contestants_flags(args.fixed, useless_head)
        if args.geometry:
            args.fixed, flags = [], geometry_flags(args.fixed[0])
        common = [*SHARED, *shlex.split(args.common)]
        flags = {name: [*common, *own] for name, own in flags.items()}
        contestants = start(flags, args.servers, stack)
        print(f"{args.facts['gpu']}, commit {args.facts['commit']}, {args.rounds} rounds")
        print(
            "batch contestant   tokens/s accept  of plain: least to most   fastest   "
            "of the best fixed: …  fastest"
        )
        for batch in args.batch_size:
            for contestant in contestants:
                contestant.speeds.clear()
            wanted = [prompts[i % len(prompts)] for i in range(args.problems * batch)]
            measure_batch(contestants, wanted, batch, args)
            report(contestants, args.fixed, batch, args)
        for contestant in contestants:
            if contestant.name in (ADAPTIVE, USELESS):
                print(shapes_used(contestant))


if __name__ == "__main__":
    main()
