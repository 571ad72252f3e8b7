"""Random requests that share, edit and continue each other's texts, on engines with small budgets,
aborts and stops: every text is that of an engine that has neither cache nor drafts. Half of the
engines have lower tiers of the cache as well, and start again with what is on disk, some of it
damaged, on one rank or two.

MAMBA_EAGLE_CHAOS_SCALE multiplies the cases, MAMBA_EAGLE_CHAOS_SEED makes others of them.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_rig import runner_of
from peer_models import PEERS, make_peer

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.message import Generate, RequestOutput
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.parallel import shard, stages
from mamba_eagle.resolve import resolve

SCALE = int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1"))
SEED = int(os.environ.get("MAMBA_EAGLE_CHAOS_SEED", "1"))
CASES = 8 * SCALE  # per engine
EMBEDDED = ("EAGLE", "EAGLE3", "NEXTN")  # drafters that the embedded model has
LONGEST = 24  # tokens of an output
MAX_PROMPT = 320
# at SCALE 1 a few families, one mode each
CHOSEN = [(name, mode) for name in PEERS for mode in ("deferred", "snapshot")]
CHOSEN = CHOSEN if SCALE > 1 else CHOSEN[::9]
WAYS = [(1, 1), (2, 1), (1, 2)]  # TP x PP of engines that follow each other in one folder
ENGINES = 2 if SCALE == 1 else 4
COUNTS: Counter[str] = Counter()

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300 * SCALE)]


@cache
def peer(name: str, folder: Path) -> Path:
    make_peer(name).save_pretrained(folder / name)
    return folder / name


def engine_of(model: Path, **settings: Any) -> OfflineEngine:
    values = {"device": "cpu", "max_total_tokens": 1500, "speculative_algorithm": "NONE"}
    config = resolve(EngineConfig(model_path=str(model), **{**values, **settings}))
    engine = OfflineEngine(config, runner_of(config))
    for passage in engine.scheduler.tiers.passages:
        passage.min_gain = 1  # prompts are short here
    return engine


class Reference:
    """Texts of an engine without cache and drafts, one request at a time."""

    def __init__(self, model: Path, tp_size: int = 1) -> None:
        alone = {"disable_radix_cache": True, "max_running_requests": 1}
        self.model, self.engine = model, engine_of(model, tp_size=tp_size, **alone)
        self.known: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def of_two(self) -> Reference:
        """Of two ranks, whose sums round otherwise: near-ties, of experts most of all, may fall
        the other way."""
        return Reference(self.model, tp_size=2)

    def text(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        key = (sampling.seed, int(sampling.temperature), *prompt)
        if key not in self.known:
            how = SamplingParams(
                max_new_tokens=LONGEST,
                seed=sampling.seed,
                temperature=sampling.temperature,
                ignore_eos=True,
            )
            self.engine.add(Generate(rid=f"{len(self.known)}", token_ids=prompt, sampling=how))
            tokens: list[int] = []
            while not self.engine.idle:
                tokens += [token for output in self.engine.step() for token in output.token_ids]
            self.known[key] = tokens
        return self.known[key][: sampling.max_new_tokens]


class Session:
    """Requests on one engine; ``texts`` are what later ones are made from."""

    def __init__(self, engine: OfflineEngine, reference: Reference, rng: random.Random) -> None:
        self.engine, self.reference, self.rng = engine, reference, rng
        vocab = engine.runner.ready.vocab_size
        self.token = lambda: rng.randrange(3, vocab)
        self.texts = [[self.token() for _ in range(rng.randint(1, 170))] for _ in range(3)]
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.stopped: dict[str, int] = {}

    def track_some(self) -> None:
        """Some requests leave prefixes that the drafter has not followed."""
        policy = self.engine.scheduler.policy
        policy.tracks_next = lambda catches_up: len(self.asked) % 3 > 0  # type: ignore[method-assign]

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.got[output.rid] += output.token_ids
            if output.finish is not None:
                self.ended[output.rid] = output
                prompt, _ = self.asked[output.rid]
                kept = self.got[output.rid][: self.stopped.get(output.rid, LONGEST)]
                if len(prompt) < 300:
                    self.texts.append(prompt + kept)

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.scheduler.check_integrity()

    def prompt(self) -> list[int]:
        rng, text = self.rng, self.rng.choice(self.texts[-12:])
        kept = max(1, len(text) - rng.choice([0, 0, 1, 2, rng.randint(0, 64), rng.randint(0, 200)]))
        more = rng.choice([0, 0, 1, rng.randint(1, 9), rng.randint(1, 150)])
        return (text[:kept] + [self.token() for _ in range(more)])[:MAX_PROMPT]

    def ask(self, number: int) -> None:
        rng, rid = self.rng, f"r{number}"
        sampling = SamplingParams(
            max_new_tokens=rng.choice([1, 2, 5, LONGEST, LONGEST]),
            seed=rng.randrange(2),
            temperature=float(rng.randrange(2)),
            ignore_eos=True,
        )
        self.asked[rid], self.got[rid] = (self.prompt(), sampling), []
        salt = rng.choice(["", "", "", "a", "b"])
        message = Generate(rid=rid, token_ids=self.asked[rid][0], sampling=sampling, salt=salt)
        self.take(self.engine.add(message))
        for _ in range(rng.choice([0, 1, 3, 40])):
            if not self.engine.idle:
                self.step()
        other, chance = f"r{rng.randint(max(0, number - 4), number)}", rng.random()
        if other in self.ended:
            return
        if chance < 0.06:
            self.take(self.engine.scheduler.abort(other))
        elif chance < 0.2 and self.got[other]:
            self.stopped[other] = rng.randint(0, len(self.got[other]))
            outputs = self.engine.scheduler.stop_at(other, self.stopped[other], "x")
            self.take(outputs)

    def finish(self) -> None:
        while not self.engine.idle:
            self.step()
        for rid, (prompt, sampling) in self.asked.items():
            wanted, finish = self.reference.text(prompt, sampling), self.ended[rid].finish
            assert finish is not None
            got = self.got[rid]
            if got != wanted[: len(got)]:  # perhaps another of two nearly equal tokens
                wanted = self.reference.of_two.text(prompt, sampling)
                COUNTS["near-ties"] += 1
            if finish.kind == "abort" or rid in self.stopped:
                assert got == wanted[: len(got)], rid
            else:
                assert got == wanted, rid


def settings_of(rng: random.Random) -> dict[str, Any]:
    """Budgets from ample to those that hold one request."""
    states = rng.choice([1, 2, 4, 9, 40])
    return {
        "max_mamba_cache_size": states,
        "max_running_requests": min(states, rng.choice([1, 2, 4])),
        "max_journals": rng.choice([-1, 0, 1, 3, 40]),
        "max_total_tokens": rng.choice([400, 700, 3000]),
        "chunked_prefill_size": rng.choice([16, 100, 1024]),
        "mamba_checkpoint_interval": rng.choice([0, 16, 64]),
        "schedule_policy": rng.choice(["fcfs", "lpm"]),
    }


def damage(folder: Path, rng: random.Random) -> None:
    """Flips bits in what a disk tier has left, and cuts off the end of its log."""
    (units,) = folder.glob("*/units")
    data = np.memmap(units, mode="r+")
    used = np.flatnonzero(data)
    for _ in range(min(len(used), 20)):
        data[rng.choice(used)] ^= 1 << rng.randrange(8)
    data.flush()
    log = units.with_name("log")
    os.truncate(log, rng.randint(0, log.stat().st_size))


def split_problems(model: Path, tp_size: int, pp_size: int) -> list[str]:
    config = read_model_config(str(model))
    return shard.problems(config, tp_size) + stages.size_problems(config, pp_size)


def run(model: Path, rng: random.Random, reference: Reference, **settings: Any) -> None:
    settings = {**settings_of(rng), **settings}
    if rng.random() < 0.5:
        return run_once(model, rng, reference, settings, [])
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"host_cache_gb": rng.choice([0.02, 0.1])}
        if rng.random() < 0.7:
            settings |= {"cache_dir": folder, "disk_cache_gb": rng.choice([0.02, 0.2])}
        texts: list[list[int]] = []
        ways = [way for way in WAYS if not split_problems(model, *way)]
        for tp_size, pp_size in rng.choices(ways, k=ENGINES):
            ranks = {"tp_size": tp_size, "pp_size": pp_size}
            run_once(model, rng, reference, {**settings, **ranks}, texts)
            COUNTS[f"engines of {tp_size} x {pp_size} ranks"] += 1
            if "cache_dir" in settings and rng.random() < 0.3:
                damage(Path(folder), rng)


def run_once(
    model: Path,
    rng: random.Random,
    reference: Reference,
    settings: dict[str, Any],
    texts: list[list[int]],
) -> None:
    """texts: of the engine before, and then of this one."""
    if settings.get("speculative_algorithm", "NONE") != "NONE":
        steps = rng.randint(1, 4)
        topk = rng.choice([1, 2, 3])
        nodes = rng.randint(2, 1 + topk + (steps - 1) * topk**2)
        settings |= {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": min(nodes, 16),
            "speculative_adaptive": rng.random() < 0.5,
        }
    try:
        engine = engine_of(model, **settings)
        session = Session(engine, reference, rng)
        session.texts += texts
        if rng.random() < 0.5:
            session.track_some()
        for number in range(CASES):
            session.ask(number)
        session.finish()
    except AssertionError as error:
        raise AssertionError(f"with {settings}: {error}") from error
    texts += session.texts
    engine.runner.retire()
    scheduler = session.engine.scheduler
    COUNTS["requests"] += CASES
    COUNTS["hits"] += sum(output.cached_tokens > 0 for output in session.ended.values())
    COUNTS["journal hits"] += scheduler.cache_use().hits["journal"]
    for tier, tokens in scheduler.cache_use().loaded_tokens.items():
        COUNTS[f"tokens from {tier}"] += tokens
    COUNTS["lost copies"] += sum(scheduler.cache_use().lost_copies.values())
    COUNTS["retractions"] += int(scheduler.state()["num_retracted_reqs"])
    COUNTS["ended early"] += len(session.stopped)


@pytest.mark.parametrize("name, mode", CHOSEN)
def test_every_family_gives_the_texts_of_an_engine_without_cache(
    name: str, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(f"{SEED} {name} {mode}")
    model = peer(name, tmp_path_factory.getbasetemp() / "peers")
    reference = Reference(model)
    algorithms = ["NONE", "NGRAM", "STANDALONE"]
    for algorithm in algorithms if SCALE > 1 else [rng.choice(algorithms)]:
        draft = str(model) if algorithm == "STANDALONE" else ""
        run(
            model,
            rng,
            reference,
            mamba_verify_mode=mode,
            speculative_algorithm=algorithm,
            speculative_draft_model_path=draft,
        )


@pytest.mark.skipif(SCALE == 1, reason="a long form; test_runner_journals.py has all drafters")
@pytest.mark.parametrize("mode", ["deferred", "snapshot"])
@pytest.mark.parametrize("algorithm", EMBEDDED)
def test_every_head_gives_the_texts_of_an_engine_without_cache(algorithm: str, mode: str) -> None:
    rng = random.Random(f"{SEED} {algorithm} {mode}")
    run(
        EMBEDDED_MODEL,
        rng,
        Reference(EMBEDDED_MODEL),
        mamba_verify_mode=mode,
        speculative_algorithm=algorithm,
    )


def test_the_cases_use_what_they_are_about() -> None:
    """After the tests above, if they have run."""
    print(dict(COUNTS))
    assert COUNTS["journal hits"] >= COUNTS["requests"] // 100
    assert COUNTS["near-ties"] <= COUNTS["requests"] // 200
