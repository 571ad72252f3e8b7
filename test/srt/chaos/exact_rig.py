"""Random settings, random requests, and clients that compare replies with a reference server's."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any, NamedTuple

from running_server import RunningServer
from tokenizers import Tokenizer

from benchmark.lib.client import StreamClient
from mamba_eagle.bench.client import Reply
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k

CLIENTS = 12
REFERENCE = ("--speculative-algorithm", "NONE", "--disable-radix-cache")
DRAFTERS = ("EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM")
COMMON = tuple(os.environ.get("MAMBA_EAGLE_EXACT_FLAGS", "--device cpu --dtype float32").split())
EXACT = "--exact" in COMMON
MODES = ("deferred", "deferred" if EXACT else "snapshot")
SHAPES = ((1, 1, 2), (1, 4, 5), (2, 3, 8), (2, 5, 8), (4, 2, 12), (4, 5, 16))  # top-k, depth, nodes
LOGPROB_ERROR = 0.0 if EXACT else 1e-3
# Hardly more KV slots than one request may need. CROWD requests that begin together are all
# admitted, since their prompts are short, and then outgrow such a pool: some are retracted.
CROWDED = {
    "--max-running-requests": 32,
    "--max-total-tokens": 400,
    "--max-mamba-cache-size": 40,
    "--chunked-prefill-size": "auto",
}
CROWD = CLIENTS

Body = dict[str, Any]
CONSTRAINTS: tuple[Body, ...] = (
    {"json_schema": {"type": "object", "maxProperties": 3}},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}},
    {"regex": "( [a-z]+){3,9}[.]"},
    {"choice": [" apples", " the number", " 12", "####"]},
    {"ebnf": 'root ::= line{1,3}\nline ::= [A-Z] [a-z ]+ "=" [0-9]+ "\\n"'},
)


class Case(NamedTuple):
    """A request, and what the reference server answered: one reply per sample."""

    body: Body
    replies: list[Reply]


# ── what is random ───────────────────────────────────────────────────────────────────────────


def random_flags(rng: random.Random, drafter: str, mode: str, crowded: bool) -> list[str]:
    """Settings of a server that must change no text. Pools are often so small that requests wait,
    states are evicted and requests are retracted, but never too small for one request alone; in a
    ``crowded`` server some are surely retracted."""
    topk, depth, nodes = rng.choice(SHAPES)
    flags: dict[str, Any] = {
        "--speculative-algorithm": drafter,
        "--mamba-verify-mode": mode,
        "--speculative-eagle-topk": topk,
        "--speculative-num-steps": depth,
        "--speculative-num-draft-tokens": nodes,
        "--max-running-requests": rng.choice([2, 8, 32]),
        "--max-total-tokens": rng.choice([400, 700, 1500, "auto"]),
        "--max-mamba-cache-size": rng.choice([1, 2, 8, 40, "auto"]),
        "--chunked-prefill-size": rng.choice([5, 16, 64, 200, "auto"]),
        "--mamba-rows": "auto" if EXACT else rng.choice([nodes, nodes + 3, "auto"]),
        "--mamba-checkpoint-interval": rng.choice([0, 16, 64]),
        "--schedule-policy": rng.choice(["fcfs", "lpm"]),
    } | (CROWDED if crowded else {})
    switches = [
        flag
        for flag, share in (
            ("--no-speculative-adaptive", 0.5),
            ("--disable-overlap-schedule", 0.2),
            ("--disable-radix-cache", 0.1),
        )
        if rng.random() < share
    ]
    return [str(part) for pair in flags.items() for part in pair] + switches


def random_bodies(rng: random.Random, count: int) -> list[Body]:
    """Requests of /generate with seeds. Prompts begin with parts of the same few texts, so that
    they share prefixes of any length. The last CROWD have short prompts and long outputs."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    texts = [
        gsm8k.make_prompt([], problem.question)
        for problem in gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
    ]
    prompts = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
    shared = [sum(rng.sample(prompts, 3), [])[:170] for _ in range(3)]
    bodies = []
    for _ in range(count):
        ids = rng.choice(shared)[: rng.choice([0, 1, 40, 64, 65, 130, 170])] + rng.choice(prompts)
        ids = ids[: rng.randrange(1, 220)]
        body: Body = {"sampling_params": random_sampling(rng)}
        if rng.random() < 0.5:
            body["input_ids"] = ids
        else:
            body["text"] = tokenizer.decode(ids, skip_special_tokens=False) or "a"
        if rng.random() < 0.3:
            body |= {"return_logprob": True, "top_logprobs_num": rng.choice([0, 2])}
            # A text may have fewer tokens than the ids that it was made of.
            deep = min(3, len(ids)) if "input_ids" in body else 1
            body["logprob_start_len"] = rng.choice([-1, 0, deep])
        bodies.append(body)
    for _ in range(CROWD):
        sampling = {"max_new_tokens": 64, "ignore_eos": True, "sampling_seed": rng.randrange(2**40)}
        sampling["n"] = 2
        bodies.append({"input_ids": rng.choice(prompts)[:8], "sampling_params": sampling})
    return bodies


def random_sampling(rng: random.Random) -> Body:
    length = rng.choice([1, 3, 16, 48, 64, 96])
    sampling: Body = {"max_new_tokens": length, "sampling_seed": rng.randrange(2**40)}
    sampling["temperature"] = 0 if rng.random() < 0.4 else rng.choice([0.3, 0.8, 1.0, 1.5, 4.0])
    choices: list[tuple[float, Body]] = [
        (0.3, {"top_p": rng.uniform(0.5, 1)}),
        (0.3, {"top_k": rng.choice([1, 2, 20, 500])}),
        (0.2, {"min_p": rng.uniform(0, 0.3)}),
        (0.2, {"frequency_penalty": rng.uniform(-1, 2)}),
        (0.2, {"presence_penalty": rng.uniform(-1, 2)}),
        (0.2, {"repetition_penalty": rng.uniform(0.8, 1.5)}),
        (0.3, {"stop": rng.sample(["\n", " =", ".", "apples", " the", "12", "####"], 2)}),
        (0.1, {"stop_token_ids": rng.sample(range(3, 400), 4)}),
        (0.2, {"min_new_tokens": rng.randrange(length + 1)}),
        (0.5, {"ignore_eos": True}),
        (0.1, {"logit_bias": {str(rng.randrange(3, 2048)): rng.uniform(-5, 5) for _ in range(3)}}),
        (0.1, {"no_stop_trim": True}),
        (0.1, {"skip_special_tokens": False}),
        (0.2, {"n": rng.choice([2, 3])}),
        (0.2, rng.choice(CONSTRAINTS)),
    ]
    for share, fields in choices:
        if rng.random() < share:
            sampling |= fields
    return sampling


# ── asking ───────────────────────────────────────────────────────────────────────────────────


async def ask_reference(server: RunningServer, bodies: list[Body]) -> list[Case]:
    async with StreamClient(server.base_url, connections=CLIENTS) as client:
        replies = await client.generate_all(bodies, CLIENTS)
    return [Case(body, samples_of(reply)) for body, reply in zip(bodies, replies, strict=True)]


class Comparison:
    """Clients that send all cases to one server: the crowd first, then the others in random order.
    Some read streams, some end their request by its id or by leaving; what came until then is
    compared, too."""

    def __init__(self, server: RunningServer, cases: list[Case], rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.waiting = rng.sample(cases[:-CROWD], len(cases) - CROWD) + cases[-CROWD:]
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []

    async def run(self) -> None:
        async with StreamClient(self.server.base_url, connections=2 * CLIENTS + 2) as client:
            await asyncio.gather(*(self._one_client(client) for _ in range(CLIENTS)))

    async def _one_client(self, client: StreamClient) -> None:
        while self.waiting:
            case = self.waiting.pop()
            way = self.rng.choices(["whole", "streamed", "cut"], [5, 2, 2])[0]
            if way == "whole" or len(case.replies) > 1:
                replies = samples_of(await client.generate(case.body))
                for got, expected in zip(replies, case.replies, strict=True):
                    self._compare(case.body, got, expected)
            else:
                await self._stream(client, case, cut=way == "cut")

    async def _stream(self, client: StreamClient, case: Case, cut: bool) -> None:
        (expected,) = case.replies
        rid = f"exact-{len(self.waiting)}"
        last = self.rng.randrange(1, 9) if cut else 0  # the piece after which it is ended; 0: none
        by_route = self.rng.random() < 0.5
        got: Reply = {}
        number = 0
        async with client.stream({**case.body, "rid": rid}) as pieces:
            async for piece in pieces:
                got, number = piece, number + 1
                if number == last and by_route:
                    await client.abort(rid)
                elif number == last:
                    break
        assert got, f"a stream without an event: {case.body}"
        reason = got["meta_info"]["finish_reason"]
        if reason is None or reason["type"] == "abort":
            self._compare_part(case.body, got, expected)
        else:
            self._compare(case.body, got, expected)

    # ── comparing ────────────────────────────────────────────────────────────────────────────

    def _compare(self, body: Body, got: Reply, expected: Reply) -> None:
        self.counts.update(requests=1, tokens=len(expected["output_ids"]))
        for name in ("output_ids", "text"):
            self._expect(got[name] == expected[name], name, body, got[name], expected[name])
        meta, other = got["meta_info"], expected["meta_info"]
        for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
            self._expect(meta[name] == other[name], name, body, meta[name], other[name])
        for name in ("input_token_logprobs", "output_token_logprobs"):
            mine, theirs = meta.get(name), other.get(name)
            self._expect(same_logprobs(mine, theirs), name, body, mine, theirs)

    def _compare_part(self, body: Body, got: Reply, expected: Reply) -> None:
        """The output of a request that was ended early begins the whole one."""
        ids = got["output_ids"]
        self.counts.update(requests=1, cut=1, tokens=len(ids))
        begin = expected["output_ids"][: len(ids)]
        self._expect(ids == begin, "output_ids until its end", body, ids, begin)

    def _expect(self, same: bool, what: str, body: Body, got: Any, expected: Any) -> None:
        if not same:
            self.differences.append(f"{what} of {body}:\n  got      {got}\n  expected {expected}")


def samples_of(reply: Reply | list[Reply]) -> list[Reply]:
    return reply if isinstance(reply, list) else [reply]


def same_logprobs(mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return len(mine) == len(theirs) and all(
        (a[0] is b[0] if None in (a[0], b[0]) else abs(a[0] - b[0]) <= LOGPROB_ERROR)
        and a[1:] == b[1:]
        for a, b in zip(mine, theirs)
    )
