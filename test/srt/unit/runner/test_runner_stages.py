"""Pipeline stages: the recorded plans of one stage, executed by several, give its results bit for
bit, whatever the family, the drafter and the verify mode; and what is wrong with a stage shows.

MAMBA_EAGLE_CASES gives the number of random engines (CI: 4), each with 6 or 12 requests.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from grammar_rig import EOS, text_of, under, vocabulary
from runner_harness import Settings, random_prompt
from test_runner_graphs import LikeGpu, without_graphs
from test_runner_ranks import Case, case_of, serve
from thread_ranks import Recorder, RunnerRanks, Step, replay
from tiny_drafters import DRAFTERS
from tiny_model import VOCAB, write_folder, write_model
from torch import Tensor

from mamba_eagle.backend.place import Host
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.cpu.backend import CpuBackend
from mamba_eagle.message import Generate
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.registry import model_class, parse_config
from mamba_eagle.parallel.groups import ALONE, Channel
from mamba_eagle.runner import loading
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.steps.graphs import GraphedSteps

torch.set_num_threads(1)
CASES = int(os.environ.get("MAMBA_EAGLE_CASES", "4"))
REQUESTS = 6

HYBRID = {"hybrid_override_pattern": "M*M-MM-*M"}
EXPERTS = {
    "hybrid_override_pattern": "MEM*MEM",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
ZAMBA = {  # its layers read the embeddings too, and share blocks
    "architectures": ["Zamba2ForCausalLM"],
    "model_type": "zamba2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
    "mamba_d_state": 24,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_attention_heads": 4,
    "num_mem_blocks": 2,
    "adapter_rank": 8,
    "intermediate_size": 80,
    "eos_token_id": 2,
}


def write_zamba(folder: Path) -> Path:
    config = parse_config(ZAMBA)
    model = model_class(config)(config)
    random_weights(model, 0)
    with torch.no_grad():  # tied to the head: wider logits
        model.parts.embedding.weight.mul_(10.0)
    return write_folder(folder, ZAMBA, model)


MODELS: dict[str, Callable[[Path], Path]] = {
    "hybrid": lambda folder: write_model(folder, **HYBRID),
    "experts": lambda folder: write_model(folder, **EXPERTS),
    "zamba2": write_zamba,
}


class Engine(NamedTuple):
    model: str
    drafter: str
    stages: int


# eagle3 taps layers of all stages; eagle-mamba has states of its own
CHECKED = [
    Engine("hybrid", "eagle3", 4),
    Engine("zamba2", "eagle-mamba", 3),
    Engine("experts", "mtp", 2),
    Engine("hybrid", "none", 3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root, made = tmp_path_factory.mktemp("stages"), {}

    def folder(model: str, drafter: str) -> tuple[Path, Path | None]:
        target = root / model
        if not target.exists():
            MODELS[model](target)
        if drafter != "none" and (model, drafter) not in made:
            made[model, drafter] = DRAFTERS[drafter].write(root / f"{model}-{drafter}", target)
        return target, made.get((model, drafter))

    return folder


class Recorded(NamedTuple):
    case: Case
    steps: list[Step]
    seen: Counter[str]


def engine_of(number: int) -> Engine:
    if number < len(CHECKED):
        return CHECKED[number]
    rng = random.Random(number)
    model = rng.choice(list(MODELS))
    fitting = [name for name in DRAFTERS if model != "zamba2" or not name.startswith("mtp")]
    return Engine(model, rng.choice([*fitting, "none"]), rng.choice([2, 3, 4]))


def recorded(number: int, folders: Any) -> Recorded:
    """What one stage answers to the plans of engine ``number``."""
    rng, engine = random.Random(number), engine_of(number)
    own = folders(engine.model, engine.drafter)
    tight = number % 2 == 0
    case = case_of(rng, engine.drafter, own, tight, count=2 * REQUESTS if tight else REQUESTS)
    recorder = Recorder(assemble(case.config))
    _, seen = serve(case, recorder)
    return Recorded(case, recorder.steps, seen)


@pytest.fixture(scope="module")
def first(folders) -> Recorded:
    return recorded(0, folders)


def staged(case: Case, stages: int, size: int = 1) -> RunnerRanks:
    return RunnerRanks(replace(case.config, tp_size=size, pp_size=stages), size, stages)


def test_plans_of_one_stage_give_its_results_on_several(folders, first: Recorded) -> None:
    """Logprobs included. Tables of all stages are compared after every step."""
    total = Counter(first.seen)
    for number in range(CASES):
        run = first if number == 0 else recorded(number, folders)
        replay(run.steps, staged(run.case, engine_of(number).stages))
        total += run.seen
    assert min(total[name] for name in ("hits", "retracted", "drafts", "logprobs")) > 0, total


def test_grammars_are_followed_where_tokens_are_sampled(folders) -> None:
    """On a CPU they also steer the drafts: other stages must verify the trees that come of it, and
    ranks collect the logits that masks are for."""
    model, head = folders("hybrid", "eagle3")
    config = Settings("EAGLE3").config(model, head, check_ranks=1)
    matchers = Matchers(vocabulary, VOCAB, (EOS,))
    asked = [under("schema", 20), under("open", 20, seed=3)]
    requests = [
        Generate(rid=str(i), token_ids=random_prompt(9, i), sampling=sampling)
        for i, sampling in enumerate(asked)
    ]
    runner = assemble(config)
    runner.constraints.matchers = matchers
    recorder = Recorder(runner)
    case = Case(config, requests, [0, 1], {})
    texts, seen = serve(case, recorder)
    assert text_of(texts["0"]).startswith("{") and seen["drafts"] > 0
    stages = RunnerRanks(replace(config, pp_size=3), 1, 3)
    stages.constraints.matchers = matchers
    replay(recorder.steps, stages)
    ranks = RunnerRanks(replace(config, tp_size=2), 2)
    for each in ranks.runners:
        each.constraints.matchers = matchers
    assert serve(case, ranks)[0] == texts


def capture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by kind on a CPU, drafts included (test_runner_graphs.py)."""
    backend = CpuBackend(LikeGpu())
    monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    monkeypatch.setattr(CpuBackend, "attention_on_device", True)  # so drafts are in graphs
    without_graphs(monkeypatch)
    run_again = GraphedSteps.record

    def quietly(self: GraphedSteps, work: Callable[[], None]) -> Any:
        with getattr(self.step.chooser, "group", ALONE).quiet():
            return run_again(self, work)

    monkeypatch.setattr(GraphedSteps, "record", quietly)


@pytest.mark.parametrize(("drafter", "stages"), [("eagle3", 2), ("ngram", 2), ("eagle3", 1)])
def test_captured_steps_exchange_when_they_are_repeated(
    folders, monkeypatch: pytest.MonkeyPatch, drafter: str, stages: int
) -> None:
    """Stages have graphs of different kinds, since one alone drafts, so making one exchanges
    nothing. NGRAM drafts on the host, before the graph. Ranks of one stage draft together."""
    capture_again(monkeypatch)
    model, head = folders("hybrid", drafter)
    case = case_of(random.Random(5), drafter, (model, head), tight=False, count=REQUESTS)
    if stages == 1:
        monkeypatch.setattr(Host, "bytes_per_sum", 0)  # so that layers are split, too
        for request in case.requests:  # sums of parts round differently
            request.return_logprob = False
    recorder = Recorder(assemble(case.config))
    _, seen = serve(case, recorder)
    assert isinstance(recorder.runner.steps, GraphedSteps) and seen["drafts"] > 0
    # what looks like a GPU has no memory that peers could write into
    in_turn = case._replace(config=replace(case.config, pp_turns=True))
    replay(recorder.steps[:30], staged(in_turn, stages, size=3 - stages))


def drop_a_node(x: Tensor, before: list[Tensor]) -> Tensor:
    """The target's token at the root is another one: no child is accepted."""
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    return changed


def come_late(x: Tensor, before: list[Tensor]) -> Tensor:
    """The tokens of the step before."""
    before.append(x)
    fits = len(before) > 1 and before[-2].shape == x.shape
    return before[-2] if fits else x


@pytest.mark.parametrize("wrong", [drop_a_node, come_late])
def test_a_stage_that_learns_something_else_is_noticed(
    first: Recorded, wrong: Callable[[Tensor, list[Tensor]], Tensor]
) -> None:
    """By the results alone, without a look at its tables."""
    runner = staged(first.case, 2)
    for each in runner.runners:
        each.config = replace(each.config, check_ranks=0)
    runner.compares_stages = False
    before: list[Tensor] = []

    def tamper(stage: int, kind: Channel, x: Tensor) -> Tensor:
        is_target = kind == Channel.TOKENS and x.shape[1] > 1
        return wrong(x, before) if is_target else x

    runner.ranks.posts[0].tamper = tamper
    with pytest.raises(AssertionError, match="step [0-9]+ differs"):
        replay(first.steps, runner)


def test_stages_may_be_split_themselves(folders, first: Recorded) -> None:
    """Sums of parts round differently, so texts are compared rather than bits."""
    runner = staged(first.case, 2, size=2)
    texts, _ = serve(first.case, runner)
    expected, _ = serve(first.case, assemble(first.case.config))
    for rid, tokens in expected.items():
        n = min(len(tokens), len(texts[rid])) if rid in first.case.aborts else None
        assert texts[rid][:n] == tokens[:n]
    runners = runner.runners
    assert {each.ready.max_kv_slots for each in runners} == {runner.ready.max_kv_slots}
    held = [each.model.config.held_layers for each in runners]
    assert held[0] == held[1] and held[1].end == held[2].begin and held[2] == held[3]
    assert runner.ready.details["pp_size"] == 2
    states = sum(each.pool.num_bytes for each in runners)
    assert runner.ready.details["checkpoint_bytes"] == states


def test_numbers_of_layers_are_checked(folders) -> None:
    model, _ = folders("hybrid", "none")
    config = EngineConfig(model_path=str(model), device="cpu", speculative_algorithm="NONE")
    for layers, wrong in {
        "4,5,x": "must be numbers with commas between",
        "4,5": "2 numbers for --pp-size 3",
        "4,5,0": "each stage needs 1 layer or more",
    }.items():
        problems = replace(config, pp_size=3, pp_layers=layers).problems()
        assert len(problems) == 1 and wrong in problems[0], problems
    with pytest.raises(ConfigError, match="--pp-layers 4,4: 8 layers, the model has 9"):
        RunnerRanks(replace(config, pp_size=2, pp_layers="4,4"), 1, 2)
    with pytest.raises(ConfigError, match="--pp-size 6: the model has 5 recurrent layers"):
        RunnerRanks(replace(config, pp_size=6), 1, 6)
