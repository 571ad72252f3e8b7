"""Grammars are tried where they can be killed: what takes too much of anything is refused, and
leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
from server_harness import PATIENCE, TOKENIZER, run

from benchmark.lib.grammar_bombs import GRAMMAR_BOMBS, intersection
from mamba_eagle.constrain.grammar import (
    Grammar,
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.trials import Tokens
from mamba_eagle.server.bodies.grammar_trials import ProcessJudge
from mamba_eagle.server.errors import RequestError

GOOD = regex_grammar("[0-9]{4}")


def bomb(count: int = 24) -> Grammar:
    return json_schema_grammar(intersection(count)["json_schema"])


@contextlib.asynccontextmanager
async def judging() -> AsyncIterator[ProcessJudge]:
    judge = ProcessJudge(lambda: Tokens(TOKENIZER.json(), 300, [2]))
    # At low priority a busy machine might not come to them.
    judge._levels = tuple(level._replace(nice=0) for level in judge._levels)
    try:
        yield judge
    finally:
        judge.close()


def judged(test: Callable[[ProcessJudge], Any]) -> None:
    async def inner() -> None:
        async with judging() as judge:
            await test(judge)

    run(inner())


def children(judge: ProcessJudge) -> list[psutil.Process]:
    assert judge._process is not None
    return psutil.Process(judge._process.pid).children()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.01)


# What was accepted and then failed: (grammar, what a refusal says; "": it is served)
BOUNDS: dict[str, tuple[Grammar, str]] = {
    "2,000 choices": (choice_grammar([f"choice number {i}" for i in range(2000)]), ""),
    "4,096 choices": (choice_grammar([f"choice number {i}" for i in range(4096)]), ""),
    "660 optional properties": (
        json_schema_grammar(GRAMMAR_BOMBS["schema: 660 properties"]["json_schema"]),
        "",
    ),
    "2,500 optional properties": (
        json_schema_grammar(GRAMMAR_BOMBS["schema: 2,500 properties"]["json_schema"]),
        "3000 ways to go on",
    ),
    "a million characters": (regex_grammar("a{1000000}"), "128 MiB of memory|too many steps|1.5 s"),
    "a thousand thousands": (regex_grammar("(a{1000}){1000}"), "128 MiB|too many steps|1.5 s"),
    "optional, then not": (regex_grammar("(a?){500}a{500}"), "too many steps"),
    "a ring of 3,000 rules": (
        ebnf_grammar(GRAMMAR_BOMBS["ebnf: a ring of 3,000 rules"]["ebnf"]),
        "1.5 MiB of stack|1.5 s",
    ),
    "a chain of 3,000 rules": (
        ebnf_grammar(GRAMMAR_BOMBS["ebnf: a chain of 3,000 rules"]["ebnf"]),
        "1.5 MiB of stack|1.5 s",
    ),
    "24 patterns at once": (bomb(), "1.5 s of processor time|128 MiB"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_grammar_works_or_is_refused_with_the_limit(name: str) -> None:
    grammar, words = BOUNDS[name]

    async def test(judge: ProcessJudge) -> None:
        verdict = await judge.verdict(grammar)
        assert bool(verdict.message) == bool(words), verdict.message
        assert not words or any(word in verdict.message for word in words.split("|")), verdict
        assert not (await judge.verdict(GOOD)).message

    judged(test)


def test_others_are_tried_beside_bombs_and_a_client_that_leaves_ends_its_own() -> None:
    async def test(judge: ProcessJudge) -> None:
        bombs = [asyncio.ensure_future(judge.verdict(bomb(20 + i % 5))) for i in range(10)]
        await until(lambda: judge._process is not None and bool(judge._asked))
        for _ in range(20):
            assert not (await judge.verdict(GOOD)).message
        for one in bombs:
            one.cancel()
        await asyncio.wait(bombs)
        await until(lambda: not children(judge))
        assert not judge._asked

    judged(test)


def test_a_shutdown_gives_up_what_takes_long() -> None:
    async def test(judge: ProcessJudge) -> None:
        bombs = [asyncio.ensure_future(judge.verdict(bomb(20 + i))) for i in range(4)]
        await until(lambda: any(asked.level for asked in judge._asked.values()))
        judge.hurry()
        for one in bombs:
            with pytest.raises(RequestError, match="shutting down"):
                await one
        assert not (await judge.verdict(GOOD)).message
        await until(lambda: not children(judge))

    judged(test)


def test_a_killed_process_fails_what_it_tried_and_is_replaced() -> None:
    async def test(judge: ProcessJudge) -> None:
        assert not (await judge.verdict(GOOD)).message
        dying = asyncio.ensure_future(judge.verdict(bomb()))
        await until(lambda: bool(children(judge)))
        orphans = children(judge)
        assert judge._process is not None
        judge._process.kill()
        with pytest.raises(RequestError, match="send the request again") as raised:
            await dying
        assert raised.value.status == 503
        assert not (await judge.verdict(GOOD)).message
        await until(lambda: not any(map(psutil.Process.is_running, orphans)))

    judged(test)
