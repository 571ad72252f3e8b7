"""Whatever a trainer does in whatever order, each token is that of the weights which its reply
names, nothing hangs, and a text that was cut off goes on as it would have.

MAMBA_EAGLE_ACTS=10000 is the long form."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from rollout_rig import checkpoint
from running_server import need_weights

from mamba_eagle import Engine
from mamba_eagle.embedded import EMBEDDED_MODEL

ACTS = int(os.environ.get("MAMBA_EAGLE_ACTS", "60"))
SEED = int(os.environ.get("MAMBA_EAGLE_SEED", "1"))
SETTINGS: dict[str, Any] = {"device": "cpu", "in_process": True, "max_running_requests": 6}
IDS = [[257, 300 + number, 44, 61] for number in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    need_weights(EMBEDDED_MODEL)
    other = checkpoint(tmp_path_factory.mktemp("weights") / "other")
    return {"A": str(EMBEDDED_MODEL), "B": str(other)}


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> Iterator[dict[str, Engine]]:
    """The oracles: one per kind of weights, without drafts and cache."""
    simple = {**SETTINGS, "speculative_algorithm": "NONE", "disable_radix_cache": True}
    with Engine(folders["A"], **simple) as first, Engine(folders["B"], **simple) as second:
        yield {"A": first, "B": second}


def sampling(tokens: int, seed: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "sampling_seed": seed, "temperature": 0.9, "ignore_eos": True}


class Trainer:
    """Acts at random on an engine, and remembers what it was told."""

    def __init__(self, engine: Engine, folders: dict[str, str], draw: random.Random) -> None:
        self.engine, self.folders, self.draw = engine, folders, draw
        self.asked: dict[str, dict[str, Any]] = {}
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.replies: dict[str, Any] = {}
        self.version, self.paused, self.released = "default", False, False

    async def post(self, path: str, **body: Any) -> Any:
        answer = await asyncio.wait_for(self.engine.async_post(path, body), 120)
        assert answer.status == 200, (path, body, answer.body)
        return answer.body

    async def act(self, number: int) -> None:
        kinds = ["generate"] * 5 + ["rest"] * 3 + ["pause", "proceed", "proceed", "abort"]
        kinds += ["update", "release", "resume", "resume"]
        await getattr(self, self.draw.choice(kinds))(f"r{number}")
        for name in [name for name, task in self.running.items() if task.done()]:
            self.replies[name] = self.running.pop(name).result()
        if len(self.running) > 12:
            await self.finish()

    async def generate(self, name: str) -> None:
        params = sampling(self.draw.randint(1, 40), self.draw.randrange(99))
        body = {"input_ids": self.draw.choice(IDS), "sampling_params": params, "rid": name}
        self.asked[name] = body
        self.running[name] = asyncio.create_task(self.post("/generate", **body))
        await asyncio.sleep(0)

    async def rest(self, name: str) -> None:
        await asyncio.sleep(self.draw.random() * 0.02)

    async def pause(self, name: str) -> None:
        modes = ["in_place", "retract", "abort"]
        if not self.paused and not self.released and self.draw.random() < 0.3:
            answer = await self.engine.async_post("/pause", {"mode": "wait"})
            assert answer.status == 200
        else:
            await self.post("/pause_generation", mode=self.draw.choice(modes))
        self.paused = True

    async def proceed(self, name: str) -> None:
        await self.post("/continue_generation")
        self.paused = False

    async def abort(self, name: str) -> None:
        if self.running and self.draw.random() < 0.8:
            await self.post("/abort_request", rid=self.draw.choice(sorted(self.running)))
        else:
            await self.post("/abort_request", abort_all=True)

    async def update(self, name: str) -> None:
        kind = self.draw.choice("AB")
        self.version = f"{kind} {name}"
        path = "/update_weights_from_disk"
        await self.post(path, model_path=self.folders[kind], weight_version=self.version)

    async def release(self, name: str) -> None:
        if not self.released:
            await self.post("/release_memory_occupation")
        self.released = True

    async def resume(self, name: str) -> None:
        if self.released:
            await self.post("/resume_memory_occupation")
        self.released = False

    async def finish(self) -> None:
        """All end, and the engine says which weights it has."""
        await self.resume("")
        await self.proceed("")
        self.replies |= {name: await task for name, task in self.running.items()}
        self.running.clear()
        told = await self.post("/get_weight_version")
        assert told["weight_version"] == self.version


def check(name: str, asked: dict[str, Any], reply: Any, plain: dict[str, Engine]) -> int:
    """Each span of tokens is what an engine that has only those weights says; their number."""
    output, meta = reply["output_ids"], reply["meta_info"]
    params = asked["sampling_params"]
    kind = meta["finish_reason"]["type"]
    assert kind == "abort" or (kind == "length" and len(output) == params["max_new_tokens"])
    whole = [{"version": meta["weight_version"], "start": 0, "end": len(output)}]
    spans = meta.get("weight_versions") or (whole if output else [])
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][:-1]
    for span in spans:
        oracle = plain["A" if span["version"] == "default" else span["version"][0]]
        start, end = span["start"], span["end"]
        given = asked["input_ids"] + output[:start]
        length = {"max_new_tokens": end - start}
        wanted = oracle.generate(input_ids=given, sampling_params={**params, **length})
        assert wanted["output_ids"] == output[start:end], (name, span)
    return len(spans)


def test_random_acts_mix_no_weights_and_nothing_hangs(
    folders: dict[str, str], plain: dict[str, Engine]
) -> None:
    async def run() -> Trainer:
        trainer = Trainer(engine, folders, random.Random(SEED))
        for number in range(ACTS):
            await trainer.act(number)
        await trainer.finish()
        return trainer

    with Engine(folders["A"], **SETTINGS) as engine:
        trainer = asyncio.run(run())
    assert trainer.replies.keys() == trainer.asked.keys()
    asked, replies = trainer.asked, trainer.replies
    spans = [check(name, asked[name], replies[name], plain) for name in asked]
    several = sum(count > 1 for count in spans)
    print(f"{ACTS} acts: {len(spans)} replies, {several} of several weights")
    assert several > ACTS / 200


def test_a_text_that_was_cut_off_goes_on_as_it_would_have(plain: dict[str, Engine]) -> None:
    """After an abort, a retraction and a restart: prompt and tokens so far, and the same seed."""
    params = sampling(160, 7)
    ids: list[int] = IDS[0]
    wanted = plain["A"].generate(input_ids=ids, sampling_params=params)["output_ids"]

    def rest(engine: Engine, made: list[int]) -> list[int]:
        left = {**params, "max_new_tokens": len(wanted) - len(made)}
        found: list[int] = engine.generate(input_ids=ids + made, sampling_params=left)["output_ids"]
        return made + found

    async def cut_off(engine: Engine, mode: str) -> list[int]:
        """What a request has in the end that was paused in the middle."""
        made: list[int] = []
        begun = False
        async for event in engine.async_stream(input_ids=ids, sampling_params=params):
            made += event["output_ids"]
            if not begun and len(made) > 5:
                begun = True
                await engine.async_post("/pause_generation", {"mode": mode})
                await engine.async_post("/continue_generation", {})
        return made

    with Engine(**SETTINGS) as engine:
        made = asyncio.run(cut_off(engine, "abort"))
        assert len(made) < len(wanted) and rest(engine, made) == wanted
        assert asyncio.run(cut_off(engine, "retract")) == wanted
    with Engine(**SETTINGS) as engine:
        assert rest(engine, wanted[:19]) == wanted
