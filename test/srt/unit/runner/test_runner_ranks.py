"""Several ranks serve what one rank serves: the same tokens for random requests with every drafter,
in both verify modes, with cache hits, retraction and aborts.

MAMBA_EAGLE_CASES gives the number of random engines (CI: 3), each with a dozen requests.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from runner_harness import Settings, random_prompt
from thread_ranks import Recorder, RunnerRanks, replay
from tiny_blocks import DSPARK_CONFIG
from tiny_drafters import DRAFTERS, TinyDrafter, block
from tiny_model import write_model

from mamba_eagle.backend.place import FreeMemory, Host
from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.drafting.dflash import BlockDrafter
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.message import DecodeBatch, Generate, Plan
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.leader import LeadingRunner, make_runner
from mamba_eagle.runner.ranks import RanksDiffer
from mamba_eagle.runner.warm_up import rehearse

torch.set_num_threads(1)
CASES = int(os.environ.get("MAMBA_EAGLE_CASES", "3"))
FIRST_SEED = 7  # the first engines hit, retract and draft
REQUESTS = 12
SPLIT, COPIED = 0, 10**12  # Place.bytes_per_sum: whether a drafter's layers are split
CHECKED = ("eagle", "dflash", "mtp", "ngram")  # drafters in CI; all of them in the long form

TRIED = {  # and one that lists the best tokens of all ranks before it looks at them
    **DRAFTERS,
    "dspark-listed": TinyDrafter(
        "DSPARK", block(DSPARK_CONFIG, dspark_draft_topk=12, markov_head_type="rnn")
    ),
}

MODELS: dict[str, dict[str, Any]] = {
    "groups-straddle": {"mamba_num_heads": 9, "n_groups": 3},
    "one-group": {"mamba_num_heads": 8, "n_groups": 1},
    "experts": {
        "hybrid_override_pattern": "ME*E",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root, made = tmp_path_factory.mktemp("ranks"), {}

    def folder(model: str, drafter: str) -> tuple[Path, Path | None]:
        target = root / model
        if not target.exists():
            write_model(target, **MODELS[model])
        if drafter != "none" and (model, drafter) not in made:
            made[model, drafter] = TRIED[drafter].write(root / f"{model}-{drafter}", target)
        return target, made.get((model, drafter))

    return folder


class Case(NamedTuple):
    """An engine with random settings, and what is asked of it."""

    config: EngineConfig
    requests: list[Generate]
    arrivals: list[int]  # the step before which each comes
    aborts: dict[str, int]  # request -> the step before which it is aborted


def random_case(rng: random.Random, folders: Any, tight: bool) -> Case:
    """tight: with so few KV slots that requests are retracted."""
    drafter = rng.choice([*(DRAFTERS if CASES > 100 else CHECKED), "none"])
    return case_of(rng, drafter, folders(rng.choice(list(MODELS)), drafter), tight)


def case_of(
    rng: random.Random,
    drafter: str,
    folders: tuple[Path, Path | None],
    tight: bool,
    count: int = REQUESTS,
) -> Case:
    """``count`` requests for a model and its drafter, whose folders these are."""
    model, head = folders
    topk, steps, nodes = rng.choice([(1, 3, 4), (2, 3, 8), (4, 4, 12), (3, 1, 4)])
    algorithm = TRIED[drafter].algorithm if drafter != "none" else "NONE"
    settings = Settings(algorithm, rng.choice(["deferred", "snapshot"]), topk, steps, nodes)
    config = settings.config(
        model,
        head,
        max_running_requests=5 if tight else rng.choice([2, 5]),
        max_total_tokens=130 if tight else 400,
        max_mamba_cache_size=rng.choice([6, 24]),
        chunked_prefill_size=rng.choice([7, 32, None]),
        disable_radix_cache=rng.random() < 0.2,
        speculative_adaptive=False,
        check_ranks=1,
    )
    shared = random_prompt(40, rng.randrange(10**6))
    requests = []
    for i in range(count):
        prompt = shared[: rng.choice([0, 17, 33, 40])] + random_prompt(rng.randrange(1, 20), i)
        requests.append(Generate(rid=str(i), token_ids=prompt, sampling=random_sampling(rng)))
        if rng.random() < 0.3:
            requests[-1].return_logprob, requests[-1].top_logprobs = True, 3
            requests[-1].logprob_start = rng.choice([-1, 0, 2])
    arrivals = [rng.randrange(2 if tight else 20) for _ in requests]
    cut = rng.sample(range(count), 2)
    return Case(config, requests, arrivals, {str(i): arrivals[i] + rng.randrange(9) for i in cut})


def random_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rng.choice([1, 9, 30]),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([-1, -1, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.randrange(2**40),
        ignore_eos=rng.random() < 0.7,
    )


def serve(case: Case, runner: Any) -> tuple[dict[str, list[int]], Counter[str]]:
    """The tokens of all requests, and how often something happened."""
    engine = OfflineEngine(case.config, runner)
    texts: dict[str, list[int]] = {request.rid: [] for request in case.requests}
    seen: Counter[str] = Counter()
    ended: set[str] = set()
    step = 0
    while len(ended) < len(texts):
        for request, arrival in zip(case.requests, case.arrivals):
            if arrival == step:
                outputs = engine.add(request)
                ended |= {output.rid for output in outputs if output.finish}
        for rid, at in case.aborts.items():
            if at == step:
                engine.scheduler.abort(rid)
                ended.add(rid)
        for output in engine.step():
            texts[output.rid] += output.token_ids
            seen["tokens"] += len(output.token_ids)
            seen["hits"] += output.finish is not None and output.cached_tokens > 0
            seen["retracted"] += output.retractions if output.finish is not None else 0
            seen["drafts"] += output.accepted_drafts if output.finish is not None else 0
            seen["logprobs"] += len(output.logprobs)
            if output.finish is not None:
                ended.add(output.rid)
        step += 1
    while not engine.idle:
        engine.step()
    engine.scheduler.check_integrity()
    return texts, seen


def test_random_requests_get_the_tokens_that_one_rank_gives(
    folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    total: Counter[str] = Counter()
    for number in range(FIRST_SEED, FIRST_SEED + CASES):
        rng = random.Random(number)
        case = random_case(rng, folders, tight=number % 2 == 0)
        expected, _ = serve(case, assemble(case.config))
        size = rng.choice([2, 3, 4])
        monkeypatch.setattr(Host, "bytes_per_sum", rng.choice([SPLIT, COPIED]))
        ranks = RunnerRanks(replace(case.config, tp_size=size), size)
        texts, seen = serve(case, ranks)
        total += seen
        for rid, tokens in expected.items():
            n = min(len(tokens), len(texts[rid])) if rid in case.aborts else None
            assert texts[rid][:n] == tokens[:n], f"case {number}, request {rid}, {size} ranks"
    assert min(total[name] for name in ("hits", "retracted", "drafts", "logprobs")) > 0, total


class Way(NamedTuple):
    """How a drafter is split, and what it drafts."""

    size: int
    layers: int  # SPLIT or COPIED
    topk: int
    mode: str = "deferred"


WAYS = {
    "eagle": Way(3, SPLIT, 3),
    "eagle-mamba": Way(2, SPLIT, 3, "snapshot"),
    "eagle3": Way(2, SPLIT, 2),  # a part of the vocabulary
    "mtp": Way(2, SPLIT, 1),  # experts
    "mtp-mamba": Way(3, COPIED, 3),
    "mtp-modules": Way(3, SPLIT, 2, "snapshot"),
    "standalone": Way(3, SPLIT, 2),  # has Mamba2 layers
    "dflash": Way(2, SPLIT, 3, "snapshot"),
    "dspark": Way(3, SPLIT, 2),
    "dspark-listed": Way(2, COPIED, 3),
}


def ways(drafter: str) -> list[Way]:
    if CASES <= 100:
        return [WAYS[drafter]]
    return [Way(*way) for way in product((2, 3), (SPLIT, COPIED), (1, 3), ("deferred", "snapshot"))]


@pytest.mark.parametrize("drafter", WAYS)
def test_drafts_are_those_of_one_rank(
    folders, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Every tree of every step: its tokens and parents, whether requests are greedy or not."""
    model, head = folders("one-group", drafter)
    for number, way in enumerate(ways(drafter)):
        algorithm = TRIED[drafter].algorithm
        settings = Settings(algorithm, way.mode, way.topk, 3, 4 if way.topk == 1 else 8)
        case = case_of(random.Random(number), drafter, (model, head), tight=True, count=4)
        config = settings.config(model, head, speculative_adaptive=False, check_ranks=1)
        for request in case.requests:
            request.return_spec_trace, request.return_logprob = True, False
        one = Recorder(assemble(config))
        serve(case._replace(config=config), one)
        monkeypatch.setattr(Host, "bytes_per_sum", way.layers)
        ranks = RunnerRanks(replace(config, tp_size=way.size), way.size)
        replay(one.steps, ranks)
        assert sum(each.trace is not None for _, result in one.steps for each in result.decode) > 5
        whole, parts = one.runner.drafter, [runner.drafter for runner in ranks.runners]
        assert isinstance(whole, ModelDrafter | BlockDrafter)
        own = [vocabulary_of(part).columns.span.size for part in parts]
        assert sum(own) == vocabulary_of(whole).columns.span.size
        for runner in ranks.runners:  # the memory plan knows how much of it is here
            pools = (runner.kv, runner.drafter.kv)
            held = sum(pool.k[:, 0].nbytes + pool.v[:, 0].nbytes for pool in pools)
            assert held == runner.memory.kv_slot_bytes
        if way.layers == SPLIT:  # also of two heads of keys and values, or one, over three ranks
            assert max(part.num_bytes for part in parts) < whole.num_bytes
            assert {part.kv.k.shape[2] for part in parts} == {1}


def vocabulary_of(drafter: Any) -> DraftVocabulary:
    return drafter.trees.vocabulary if isinstance(drafter, BlockDrafter) else drafter.vocabulary


@pytest.fixture(scope="module")
def two(folders) -> RunnerRanks:
    model, head = folders("one-group", "eagle")
    config = Settings(topk=2, steps=3, nodes=8).config(model, head, check_ranks=1)
    return RunnerRanks(replace(config, tp_size=2), 2)


def test_ranks_that_differ_end_with_the_first_field_that_does(two: RunnerRanks) -> None:
    two.execute(Plan(step=1))
    two.runners[1].table.last_token[3] += 1
    with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 in last_token of request s"):
        two.execute(Plan(step=2))
    two.runners[1].table.last_token[3] -= 1
    two.execute(Plan(step=3))


def test_a_rank_that_drafts_something_else_changes_nothing(two: RunnerRanks) -> None:
    """Near-ties may round differently on another device: the trees of rank 0 count."""
    drafter = two.runners[1].drafter
    propose = drafter.propose

    def other(*args: Any) -> Any:
        tree = propose(*args)
        return tree._replace(tokens=(tree.tokens + 1) % 90)

    drafter.propose = other  # type: ignore[method-assign]
    try:
        shape = TreeShape(topk=2, depth=3, nodes=8)
        batch = DecodeBatch(shape=shape, slots=[0], kv_slots=[list(range(1, 9))])
        two.execute(Plan(step=4, decode=batch))  # compares results and tables of all ranks
    finally:
        drafter.propose = propose  # type: ignore[method-assign]


def test_slots_are_as_many_as_fit_on_every_rank(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 9 heads rank 0 of two has 4 and rank 1 has 5: more bytes per state, fewer slots."""
    model, _ = folders("groups-straddle", "none")
    free = FreeMemory(32_000_000, None, "memory")
    monkeypatch.setattr(Host, "memory", lambda self: free)
    config = EngineConfig(
        model_path=str(model), device="cpu", speculative_algorithm="NONE", tp_size=2
    )
    ranks = RunnerRanks(config, 2)
    ready = [runner.ready for runner in ranks.runners]
    assert ready[0].max_kv_slots == ready[1].max_kv_slots
    assert ready[0].max_state_slots == ready[1].max_state_slots
    plans = [runner.memory for runner in ranks.runners]
    assert plans[0].state_slot_bytes < plans[1].state_slot_bytes
    # what both hold together, as /server_info shows
    for runner in ranks.runners:
        assert runner.ready.details["checkpoint_bytes"] == sum(
            each.pool.num_bytes for each in ranks.runners
        )


def test_a_benchmark_leads_ranks_in_processes_of_their_own(folders) -> None:
    """Over gloo, as pipeline stages; the next set of ranks ends the one before."""
    model, head = folders("groups-straddle", "eagle")
    config = Settings(topk=2, steps=3, nodes=8).config(model, head, check_ranks=2)
    prompts = [random_prompt(9, seed) for seed in (1, 2)]
    expected = BatchEngine(config, assemble(config)).generate(prompts, greedy(12)).tokens
    leader = make_runner(replace(config, pp_size=2, pp_layers="1,3"))
    assert isinstance(leader, LeadingRunner)
    try:
        assert BatchEngine(config, leader).generate(prompts, greedy(12)).tokens == expected
        assert leader.ready.details["pp_size"] == 2
    finally:
        leader.close()
    assert [process.returncode for process in leader.others] == [0]
    assert not Path(leader.folder).exists()


def test_a_rehearsal_exchanges_nothing(two: RunnerRanks) -> None:
    """Ranks whose kernels are there already have none, so the others must not wait for them."""
    before = two.ranks.meeting.operations
    two.ranks.run(lambda group: rehearse(two.runners[1]) if group.rank == 1 else None)
    assert two.ranks.meeting.operations == before


def test_too_many_ranks_are_refused(folders) -> None:
    model, _ = folders("one-group", "none")
    config = EngineConfig(
        model_path=str(model), device="cpu", speculative_algorithm="NONE", tp_size=9
    )
    with pytest.raises(ConfigError, match="--tp-size 9: the model has 8 heads in a Mamba2 layer"):
        RunnerRanks(config, 9)
