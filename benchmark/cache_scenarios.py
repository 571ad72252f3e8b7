"""How much of what could be reused the prefix cache reuses, by scenario and budget.

Shareable is the longest common prefix of a prompt with tokens that an earlier request ran (its
prompt, and its output less the last token), at most the prompt's length - 1. Each line of the
result is one scenario under one budget: cached tokens and shareable ones, summed over requests.

    python -m benchmark.cache_scenarios --results benchmark/results/cache_scenarios.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark.lib.client import StreamClient
from benchmark.lib.server import ServerProcess
from mamba_eagle.bench import facts, results
from mamba_eagle.cache.node import as_tokens, common_prefix
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval.gsm8k import problem_texts
from mamba_eagle.tokenizer.text import TextTokenizer

HERE = Path(__file__).resolve().parent
BUDGETS: dict[str, list[str]] = {
    "ample": [],
    "tiny": ["--max-mamba-cache-size", "16", "--max-total-tokens", "6000"],
    "snapshot": ["--mamba-verify-mode", "snapshot"],
    "one-state": ["--max-mamba-cache-size", "1", "--max-running-requests", "1"],
}
ANSWER = 96  # tokens of an output
TURNS = 7


@dataclass
class Ledger:
    """What has been run, and what of it was reused."""

    client: StreamClient
    tokenizer: TextTokenizer
    ran: list[np.ndarray] = field(default_factory=list)
    cached = shareable = requests = computed = 0

    async def ask(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        """The output. What is shareable counts what has been answered by now."""
        tokens = as_tokens(prompt)
        best = max((common_prefix(tokens, other) for other in self.ran), default=0)
        params = {"temperature": 0, "max_new_tokens": ANSWER, **sampling}
        reply = await self.client.generate({"input_ids": list(prompt), "sampling_params": params})
        output: list[int] = reply["output_ids"]
        self.requests += 1
        self.shareable += min(best, len(prompt) - 1)
        # another one that runs at the same time may have been of use as well
        own = min(reply["meta_info"]["cached_tokens"], max(best, 0)) if best else 0
        self.cached += own
        self.computed += len(prompt) - reply["meta_info"]["cached_tokens"]
        self.ran.append(as_tokens([*prompt, *output[:-1]]))
        return output

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


Scenario = Callable[[Ledger, random.Random], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str) -> Callable[[Scenario], Scenario]:
    def register(run: Scenario) -> Scenario:
        SCENARIOS[name] = run
        return run

    return register


def questions(rng: random.Random, count: int) -> list[str]:
    return [f"Question: {text}\nAnswer:" for text in rng.sample(problem_texts(200), count)]


def words(ledger: Ledger, rng: random.Random, count: int) -> list[int]:
    """So many tokens of running text, which begins as no other does."""
    tokens = [rng.randrange(3, 700) for _ in range(min(count, 4))]
    while len(tokens) < count:
        tokens += ledger.ids(rng.choice(problem_texts(200)) + "\n")
    return tokens[:count]


async def chat(ledger: Ledger, rng: random.Random, **sampling: Any) -> None:
    tokens: list[int] = []
    for question in questions(rng, TURNS):
        tokens += ledger.ids(question)
        tokens += await ledger.ask(tokens, **sampling)


@scenario("chat, ids, ends by eos or length")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        await chat(ledger, rng)


@scenario("chat, stop string")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        await chat(ledger, rng, stop=["."], ignore_eos=True)


@scenario("chat, eos dropped from the history")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        tokens: list[int] = []
        for question in questions(rng, TURNS):
            tokens += ledger.ids(question)
            tokens += (await ledger.ask(tokens))[:-1]


@scenario("chat, text tokenized again")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        text = ""
        for question in questions(rng, TURNS):
            text += question
            text += ledger.tokenizer.decode(await ledger.ask(ledger.ids(text))) + "\n\n"


async def document(ledger: Ledger, rng: random.Random, parallel: int) -> None:
    text = words(ledger, rng, 1000)
    prompts = [text + ledger.ids(question) for question in questions(rng, 30)]
    await ledger.ask(prompts[0], max_new_tokens=16)
    for first in range(1, 30, parallel):
        batch = prompts[first : first + parallel]
        await asyncio.gather(*(ledger.ask(prompt, max_new_tokens=16) for prompt in batch))


@scenario("30 questions on one 1,000-token document")
async def _(ledger: Ledger, rng: random.Random) -> None:
    await document(ledger, rng, 1)


@scenario("the same at once")
async def _(ledger: Ledger, rng: random.Random) -> None:
    await document(ledger, rng, 29)


async def agent(ledger: Ledger, rng: random.Random, **sampling: Any) -> None:
    for _ in range(2):
        tokens = words(ledger, rng, 200)
        for _ in range(10):
            tokens += await ledger.ask(tokens, max_new_tokens=40, **sampling)
            tokens += words(ledger, rng, rng.randint(20, 120))


@scenario("agent loop, tool output appended")
async def _(ledger: Ledger, rng: random.Random) -> None:
    await agent(ledger, rng)


@scenario("agent loop with a stop string")
async def _(ledger: Ledger, rng: random.Random) -> None:
    await agent(ledger, rng, stop=["."], ignore_eos=True)


@scenario("same prompt again (regenerated)")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(8):
        prompt = words(ledger, rng, rng.randint(100, 500))
        for seed in range(3):
            await ledger.ask(prompt, temperature=1.0, seed=seed)


@scenario("branches of an answer, within its last 64 tokens")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(5):
        prompt = words(ledger, rng, 300)
        output = await ledger.ask(prompt, max_new_tokens=200, ignore_eos=True)
        for cut in (1, 17, 40, 63):
            await ledger.ask([*prompt, *output[:-cut], *words(ledger, rng, 20)])


@scenario("branches anywhere in a long answer")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        prompt = words(ledger, rng, 300)
        output = await ledger.ask(prompt, max_new_tokens=600, ignore_eos=True)
        for _ in range(5):
            kept = rng.randint(20, 560)
            await ledger.ask([*prompt, *output[:kept], *words(ledger, rng, 20)])


@scenario("edit in the last answer")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        tokens = words(ledger, rng, 100)
        for _ in range(TURNS):
            output = await ledger.ask(tokens, ignore_eos=True)
            place = rng.randrange(len(output) - 60, len(output) - 1)
            tokens += [*output[:place], *words(ledger, rng, 3), *output[place + 3 :]]
            tokens += words(ledger, rng, 30)


@scenario("edit in the prompt, within its last 64 tokens")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(10):
        prompt = words(ledger, rng, rng.randint(150, 500))
        for cut in (0, 1, 8, 40, 63):
            end = len(prompt) - cut
            await ledger.ask([*prompt[:end], *words(ledger, rng, cut)], max_new_tokens=16)


@scenario("edit anywhere in the prompt")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(10):
        prompt = words(ledger, rng, rng.randint(150, 500))
        for _ in range(3):
            await ledger.ask(prompt, max_new_tokens=16)
            place = rng.randrange(20, len(prompt))
            prompt = [*prompt[:place], *words(ledger, rng, 4), *prompt[place + 4 :]]


@scenario("prompt + whole output, sent at once")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(20):
        prompt = words(ledger, rng, 200)
        output = await ledger.ask(prompt, max_new_tokens=60, ignore_eos=True)
        await ledger.ask([*prompt, *output], max_new_tokens=8)


@scenario("prompt + output but its last token, sent at once")
async def _(ledger: Ledger, rng: random.Random) -> None:
    for _ in range(20):
        prompt = words(ledger, rng, 200)
        output = await ledger.ask(prompt, max_new_tokens=60, ignore_eos=True)
        await ledger.ask([*prompt, *output[:-1]], max_new_tokens=8)


@scenario("8 chats at once, 7 turns")
async def _(ledger: Ledger, rng: random.Random) -> None:
    await asyncio.gather(*(chat(ledger, random.Random(seed)) for seed in range(8)))


@scenario("vLLM #45238: 8 prefixes of 1,500, 64 prompts")
async def _(ledger: Ledger, rng: random.Random) -> None:
    prefixes = [words(ledger, random.Random(group), 1500) for group in range(8)]
    for number in range(64):
        suffix = words(ledger, random.Random(1000 + number), 700)
        prompt = [*prefixes[number % 8], 3 + number, *suffix[1:]]
        await ledger.ask(prompt, max_new_tokens=1)


async def measure(base_url: str, names: Sequence[str], tokenizer: TextTokenizer) -> list[Ledger]:
    ledgers = []
    async with StreamClient(base_url) as client, httpx.AsyncClient(base_url=base_url) as admin:
        for name in names:
            (await admin.post("/flush_cache", timeout=60)).raise_for_status()
            ledger = Ledger(client, tokenizer)
            await SCENARIOS[name](ledger, random.Random(name))
            ledgers.append(ledger)
            share = ledger.cached / max(ledger.shareable, 1)
            print(f"{name:52} {share:.3f}", flush=True)
    return ledgers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument(
        "--only", nargs="+", default=[""], help="scenarios whose names contain one of these"
    )
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for the server")
    parser.add_argument("--results", default="")
    arguments = parser.parse_args()
    tokenizer = TextTokenizer.load(str(EMBEDDED_MODEL))
    names = [name for name in SCENARIOS if any(part in name for part in arguments.only)]
    for budget in arguments.budgets:
        print(f"── {budget}", flush=True)
        with ServerProcess([*BUDGETS[budget], *arguments.flags]) as server:
            ledgers = asyncio.run(measure(server.base_url, names, tokenizer))
        if arguments.results:
            made = [
                {
                    "name": "cache_scenario",
                    "scenario": name,
                    "budget": budget,
                    "flags": " ".join(arguments.flags),
                    "share": round(each.cached / max(each.shareable, 1), 4),
                    "cached": each.cached,
                    "shareable": each.shareable,
                    "computed": each.computed,
                    "requests": each.requests,
                    "cpu": facts.cpu_model(),
                    "commit": facts.commit(),
                    "date": facts.today(),
                }
                for name, each in zip(names, ledgers)
            ]
            results.append(arguments.results, made)


if __name__ == "__main__":
    main()
