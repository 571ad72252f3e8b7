"""Random and hostile grammars, tried as the server does and followed as the runner does: each is
refused with a reason, or served; no mask takes long, and no memory is left.

``make chaos SCALE=100 ARGS="-k grammars_are_refused_or_served"`` has 20,000 and 2,000 of them.
"""

from __future__ import annotations

import asyncio
import json
import string
import time
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import psutil
from chaos_rig import SCALE, SEED, report

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import (
    Grammar,
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.constrain.trials import Tokens, Verdict, load
from mamba_eagle.constrain.vocabulary import Vocabulary, read_tokenizer
from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.server.bodies.grammar_trials import ProcessJudge
from mamba_eagle.server.errors import RequestError

RANDOM, HOSTILE = 200, 20  # grammars, times SCALE
STEPS = 24  # tokens that are followed
TOKENS = Tokens(read_tokenizer(str(EMBEDDED_MODEL)), 2048, [0])
MORE_MEMORY = 100e6  # bytes
AT_ONCE = 4


# ── patterns ─────────────────────────────────────────────────────────────────────────────────


def pattern(random: Random, depth: int, most: int) -> str:
    """most: of repeats."""
    if not depth:
        atoms = [random.choice(string.ascii_letters), ".", "[a-z]", r"\d", r"\w", "[^x]", "é", " "]
        return random.choice(atoms)
    parts = [pattern(random, depth - 1, most) for _ in range(random.randint(1, 3))]
    kind = random.randrange(6)
    if kind == 0:
        return f"({'|'.join(parts)})"
    if kind == 1:
        return f"({''.join(parts)}){random.choice('*+?')}"
    if kind == 2:
        low = random.randint(0, most)
        return f"({''.join(parts)}){{{low},{low + random.randint(0, most)}}}"
    return "".join(parts)


# ── schemas ──────────────────────────────────────────────────────────────────────────────────

FORMATS = ("date", "date-time", "time", "uuid", "email", "uri", "ipv4", "ipv6", "hostname", "zip")


def schema(random: Random, depth: int, most: int) -> Any:
    kind = random.randrange(6 if depth else 3)
    if kind == 0:
        low = random.randint(-most, most)
        return {"type": random.choice(("integer", "number")), "minimum": low, "maximum": low + most}
    if kind == 1:
        return {"enum": [random.choice(("a", "bc", 1, None, True, "é")) for _ in range(3)]}
    if kind == 2:
        own: dict[str, Any] = {"type": "string"}
        if random.random() < 0.4:
            own["pattern"] = pattern(random, 2, most)
        if random.random() < 0.3:
            own["format"] = random.choice(FORMATS)
        if random.random() < 0.4:
            own["maxLength"] = random.randint(0, most)
        return own
    inner = [schema(random, depth - 1, most) for _ in range(random.randint(1, 4))]
    if kind == 3:
        return {"type": "array", "items": inner[0], "minItems": random.randint(0, 3)}
    if kind == 4:
        word = random.choice(("anyOf", "allOf", "oneOf"))
        return {word: inner}
    names = [f"p{random.randrange(9)}" for _ in inner]
    own = {"type": "object", "properties": dict(zip(names, inner))}
    if random.random() < 0.5:
        own["required"] = names[:1]
    if random.random() < 0.5:
        own["additionalProperties"] = random.random() < 0.3
    if random.random() < 0.2:
        own["patternProperties"] = {pattern(random, 1, most): inner[-1]}
    return own


# ── EBNF ─────────────────────────────────────────────────────────────────────────────────────


def ebnf(random: Random, rules: int, most: int) -> str:
    names = ["root", *(f"r{i}" for i in range(1, rules))]

    def part() -> str:
        atom = random.choice((random.choice(names), f'"{random.choice("abc")}"', "[a-z0-9]"))
        return atom + random.choice(("", "", "", "*", "?", "+", f"{{0,{random.randint(1, most)}}}"))

    def line(name: str) -> str:
        ways = [" ".join(part() for _ in range(random.randint(1, 3))) for _ in range(2)]
        return f"{name} ::= {' | '.join([*ways, f'{json.dumps(name)}'])}"

    return "\n".join(map(line, names))


def usual(random: Random) -> Grammar:
    kind = random.randrange(4)
    if kind == 0:
        return regex_grammar(pattern(random, random.randint(1, 4), 20))
    if kind == 1:
        return ebnf_grammar(ebnf(random, random.randint(1, 8), 5))
    if kind == 2:
        return choice_grammar([pattern(random, 1, 3) for _ in range(random.randint(1, 30))])
    return json_schema_grammar(schema(random, random.randint(1, 4), 50))


def hostile(random: Random) -> Grammar:
    """Each what once took for ever, with other numbers, or random with huge ones."""
    size = 10 ** random.randint(1, 6)
    ends = [
        f".*{letter}.{{{i}}}" for i, letter in enumerate(random.sample(string.ascii_letters, 26))
    ]
    gate = random.randint(0, 12)
    many = [f"(q{{0,{gate}}}z|q{{{gate}}}{end})" for end in ends[: random.randint(2, 26)]]
    kind = random.randrange(8)
    if kind == 0:
        return regex_grammar(pattern(random, 5, size))
    if kind == 1:
        return json_schema_grammar(schema(random, 5, size))
    if kind == 2:
        return ebnf_grammar(ebnf(random, min(size, 2000), min(size, 5000)))
    if kind == 3:
        own = random.sample([*many, *ends], min(len(many), 26))
        return json_schema_grammar({"allOf": [{"type": "string", "pattern": one} for one in own]})
    if kind == 4:
        return ebnf_grammar("start: T\nT: " + " & ".join(f"/{one}/" for one in many))
    if kind == 5:
        return ebnf_grammar("start: T\nT: " + " & ".join(f"~/{one}/" for one in many))
    if kind == 6:
        return regex_grammar(f"q{{{gate}}}" + pattern(random, 2, size) * random.randint(1, 400))
    names = {f"p{i}": schema(random, 1, 50) for i in range(min(size, 2000))}
    return json_schema_grammar({"type": "object", "properties": names})


# ── what becomes of them ─────────────────────────────────────────────────────────────────────


class Outcomes:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []  # from the question to the verdict
        self.slowest_mask = 0.0
        loaded = load(TOKENS)
        assert isinstance(loaded, Vocabulary)
        self.q = loaded.tokens.tokenize_str("q")
        self.matchers = Matchers(lambda: loaded, TOKENS.size, TOKENS.eos)

    async def take(self, judge: ProcessJudge, grammar: Grammar, random: Random) -> None:
        began = time.monotonic()
        try:
            verdict = await judge.verdict(grammar)
        except RequestError as error:
            assert error.status == 503, error
            self.counts["busy"] += 1
            return
        self.seconds.append(time.monotonic() - began)
        if verdict.message:
            assert len(verdict.message) < 10_000
            self.counts["refused"] += 1
        else:
            self.counts[self.follow(grammar, verdict, random)] += 1

    def follow(self, grammar: Grammar, verdict: Verdict, random: Random) -> str:
        """As the runner: a random text, most often one that goes through gates of ``q``."""
        own = self.matchers.start(SamplingParams(grammar=verdict.text or grammar.text))
        own.branch()  # it is built now
        for _ in range(STEPS):
            began = time.monotonic()
            mask = own.mask()
            self.slowest_mask = max(self.slowest_mask, time.monotonic() - began)
            if mask is None:
                assert own.problem
                return "ended by a limit"
            bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            tokens = [int(token) for token in bits if token not in TOKENS.eos]
            if not tokens:
                break
            through = [token for token in self.q if token in tokens]
            own.advance([random.choice(through or tokens)])
        assert not own.problem
        return "served"


def test_grammars_are_refused_or_served() -> None:
    async def run() -> Outcomes:
        outcomes, judge, random = Outcomes(), ProcessJudge(lambda: TOKENS), Random(SEED)
        waiting = asyncio.Semaphore(AT_ONCE)

        async def one(make: Any, seed: int) -> None:
            own = Random(seed)
            try:
                grammar = make(own)
            except GrammarError:
                outcomes.counts["refused at once"] += 1
                return
            async with waiting:
                await outcomes.take(judge, grammar, own)

        makers = [usual] * RANDOM * SCALE + [hostile] * HOSTILE * SCALE
        random.shuffle(makers)
        try:
            for start in range(0, len(makers), 100):
                batch = makers[start : start + 100]
                await asyncio.gather(*(one(make, random.getrandbits(64)) for make in batch))
        finally:
            judge.close()
        return outcomes

    before = psutil.Process().memory_info().rss
    outcomes = asyncio.run(run())
    more = psutil.Process().memory_info().rss - before
    assert sum(outcomes.counts.values()) == (RANDOM + HOSTILE) * SCALE
    assert outcomes.counts["served"] > RANDOM * SCALE // 4
    assert more < MORE_MEMORY
    ordered = sorted(outcomes.seconds)
    report(
        "grammar_fuzz",
        sum(outcomes.counts.values()),
        "grammars",
        outcomes=dict(outcomes.counts),
        verdict_p50_ms=round(1e3 * ordered[len(ordered) // 2], 1),
        verdict_p99_ms=round(1e3 * ordered[int(0.99 * len(ordered))]),
        slowest_mask_ms=round(1e3 * outcomes.slowest_mask),
        memory_more_mb=round(more / 1e6),
        seed=SEED,
    )
