"""Steps by kind, without a GPU: what a graph would repeat is run again instead.

What is captured sees the same memory as on a GPU: inputs, padding, logits, results. Capturing
itself is what test_drafters.py sees, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # imported late, parts of it would see the torch.cuda that tests replace
from adapter_rig import write_adapter
from grammar_rig import constrain, plain_choices, under
from peer_models import make_peer
from runner_harness import (
    Engine,
    Settings,
    Tiny,
    approximately,
    greedy,
    random_prompt,
    sampled,
)
from torch import Tensor

from mamba_eagle.backend.place import Host, Timestamp
from mamba_eagle.core import PLAIN
from mamba_eagle.cpu.backend import CpuBackend
from mamba_eagle.drafting.waiting import MAX_WITHOUT_ROWS
from mamba_eagle.runner import assemble, loading, masks_ahead, model_runner
from mamba_eagle.runner.steps import graphs, prompt_graphs
from mamba_eagle.runner.steps.decode_step import EagerSteps
from mamba_eagle.runner.steps.graphs import GraphedSteps, batch_ladder
from mamba_eagle.runner.steps.prompt_graphs import PromptPass

TREE = Settings(topk=3, steps=3, nodes=9)
SETTINGS = {
    "none": Settings("NONE"),
    "tree": TREE,
    "tree-snapshot": TREE._replace(scheme="snapshot"),
    "ngram": Settings("NGRAM", topk=3, steps=3, nodes=9),
}


def again(self: GraphedSteps, work: Callable[[], None]) -> SimpleNamespace:
    """In place of a graph: results go to the memory of the first ones, as a graph's do."""
    results = {
        "_draft": ("drafted",),
        "_verify": ("verified",),
        "_draft_and_verify": ("verified",),
        "_commit": ("committed",),
        "_step": ("verified", "committed"),
    }
    graph, names = work.__self__, results.get(work.__name__, ())
    work()
    kept = {name: getattr(graph, name) for name in names}

    def replay() -> None:
        work()
        for name, first in kept.items():
            for own, new in zip(tensors(first), tensors(getattr(graph, name)), strict=True):
                own.copy_(new)
            setattr(graph, name, first)

    return SimpleNamespace(replay=replay)


def tensors(parts: Tensor | np.ndarray | tuple | None) -> list[Tensor]:
    """All of nested tuples."""
    if parts is None:
        return []
    if not isinstance(parts, tuple):
        return [torch.as_tensor(parts)]
    return [each for part in parts for each in tensors(part)]


class LikeGpu(Host):
    """A CPU whose tensors are read as seldom as a GPU's."""

    on_host = False
    padding_slots = 1


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend(LikeGpu())
    monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    without_graphs(monkeypatch)


def without_graphs(monkeypatch: pytest.MonkeyPatch, prompts: tuple[int, ...] = ()) -> None:
    """Steps by kind, which run again what a graph would repeat. prompts: sizes of their passes."""
    monkeypatch.setattr(GraphedSteps, "record", again)
    monkeypatch.setattr(PromptPass, "record", lambda self: None)
    monkeypatch.setattr(PromptPass, "replay", PromptPass.once)
    monkeypatch.setattr(prompt_graphs, "SIZES", prompts)
    monkeypatch.setattr(assemble, "_never_waits", lambda *_: True)
    cuda = SimpleNamespace(
        is_available=lambda: False,
        is_initialized=lambda: False,
        empty_cache=lambda: None,
        graph_pool_handle=lambda: None,
        Stream=lambda device: None,
        mem_get_info=lambda device: (0, 0),
    )
    monkeypatch.setattr(graphs.torch, "cuda", cuda)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_the_plain_models(tiny: Tiny, graphed: None, name: str) -> None:
    """Batches of every size, so most are padded; requests end at different steps, and plain steps
    come between."""
    head = tiny.head if SETTINGS[name].algorithm == "EAGLE" else None
    engine = Engine(tiny.model, head, SETTINGS[name])
    steps = engine.runner.steps
    assert isinstance(steps, GraphedSteps)
    lives = [
        engine.start(random_prompt(9 + i, i), greedy(14 + 5 * i) if i % 2 else sampled(20, i))
        for i in range(5)
    ]
    for _ in range(3):
        engine.execute(decode=lives)
        engine.execute(decode=lives, shape=PLAIN)
    engine.finish(lives)
    for live in lives:
        assert live.output == tiny.plain.choices(live)
    end = lives[0].processed
    left = engine.release(lives[0], fold_to=end)
    turn = engine.start(lives[0].tokens[:end] + [5, 9], greedy(20), hit=left)
    engine.finish([turn])
    assert turn.output == tiny.plain.choices(turn)
    used = {kind.batch for kind in steps.graphs}
    assert used <= set(steps.ladder) and len(used) > 1


def test_captured_prompts_read_adapters(
    tiny: Tiny, graphed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In passes that are filled up and whose rows had other adapters, or none, before."""
    used = []

    def once(self: PromptPass, *given: Any) -> None:
        used.append((self.size, self.adapters is not None))
        PromptPass.once(self, *given)

    monkeypatch.setattr(PromptPass, "replay", once)
    adapters = [write_adapter(tmp_path / str(i), tiny.model, i) for i in range(2)]
    found = []
    for sizes in ((12, 32), ()):
        monkeypatch.setattr(prompt_graphs, "SIZES", sizes)
        engine = tiny.engine(SETTINGS["none"], max_loras=2)
        kept = engine.runner.adapters
        for slot, folder in enumerate(adapters):
            kept.keep(slot, kept.read(str(folder)))
            kept.load(slot, slot)
        outputs = []
        for slots in ((0, 1), (-1, 1), (-1, -1), (1,), (-1,)):
            lives = [
                engine.admit(random_prompt(9 + i, i), greedy(3), adapter=slot)
                for i, slot in enumerate(slots)
            ]
            items = [engine.chunk(live, len(live.tokens)) for live in lives]
            for made in zip(lives, items, engine.execute(prefill=items).prefill, strict=True):
                engine.after_chunk(*made)
            engine.finish(lives)
            outputs += [live.output for live in lives]
            for live in lives:
                engine.release(live)
        found.append(outputs)
    assert found[0] == found[1]
    assert found[0][0] != found[0][4] != found[0][6], "adapters change texts"
    assert used == [(32, True), (32, True), (32, False), (12, True), (12, False)]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    make_peer("nemotron-3-nano").save_pretrained(tmp_path)
    return tmp_path


def test_with_experts_larger_passes_are_captured(
    tiny: Tiny, mixture: Path, graphed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as a pass may be. Filled up, they give what kernels launched one by one do."""
    sizes, outputs = [], []
    monkeypatch.setattr(model_runner, "LEAST_FREE", 0)
    for model, larger in ((tiny.model, (40, 90)), (mixture, (40, 90)), (mixture, ())):
        monkeypatch.setattr(prompt_graphs, "SIZES", (8,))
        monkeypatch.setattr(prompt_graphs, "LARGER_SIZES", larger)
        engine = Engine(model, None, SETTINGS["none"], chunked_prefill_size=64)
        live = engine.start(random_prompt(30, 1), greedy(5))
        engine.finish([live])
        sizes.append([each.size for each in engine.runner.prompts.graphs.passes])
        outputs.append(live.output)
    assert sizes == [[8], [40, 8], [8]]
    assert outputs[1] == outputs[2]
    monkeypatch.setattr(model_runner, "LEAST_FREE", 1 << 62)
    monkeypatch.setattr(prompt_graphs, "LARGER_SIZES", (40,))
    engine = Engine(mixture, None, SETTINGS["none"])
    assert [each.size for each in engine.runner.prompts.graphs.passes] == [8], "memory is short"


class Unhurried(Timestamp):
    """Of a device that takes long: the host has time for everything."""

    reached = False  # type: ignore[assignment]

    def until(self, later: Timestamp) -> float:
        return 1e6


@pytest.mark.parametrize(
    ("name", "few_masks", "time"),
    [
        ("none", 0, Timestamp),
        ("tree", 0, Timestamp),
        ("tree", 0, Unhurried),
        ("tree", 99, Unhurried),
    ],
)
def test_with_grammars_draft_and_verify_are_graphs_of_their_own(
    tiny: Tiny,
    graphed: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    few_masks: int,
    time: type[Timestamp],
) -> None:
    """A batch in which some requests have one, and plain steps; texts are the plain model's, with
    masks of all nodes first, on demand, or as many ahead as there is time for."""
    monkeypatch.setattr(masks_ahead, "FEW_MASKS", few_masks)
    monkeypatch.setattr(LikeGpu, "timestamp", lambda self: time())
    engine = constrain(tiny.engine(SETTINGS[name]))
    engine.runner.drafter.on_device = True  # as it is on a GPU
    lives = [
        engine.start(random_prompt(9, 1), under("schema", seed=1)),
        engine.start(random_prompt(8, 2), sampled(12, 2)),
        engine.start(random_prompt(7, 3), under("open", 15)),
        engine.start(random_prompt(6, 4), under("schema", seed=4, top_k=5, top_p=0.9)),
        engine.start(random_prompt(5, 5), under("open", 15, seed=5, presence_penalty=0.5)),
    ]
    engine.execute(decode=lives)
    engine.execute(decode=lives, shape=PLAIN)
    engine.finish(lives)
    assert lives[1].output == tiny.plain.choices(lives[1])
    for live in (lives[0], lives[2]):
        assert live.output == plain_choices(tiny.plain, live, engine.eos)
    host = constrain(tiny.engine("none"))
    for live in lives[3:]:
        assert live.output == host.generate(live.tokens[: live.prompt_len], live.sampling).output
    steps = engine.runner.steps
    assert isinstance(steps, GraphedSteps)
    assert any(kind.apart for kind in steps.graphs) == (name == "tree")


def test_plain_steps_have_graphs_with_the_drafter_and_without(tiny: Tiny, graphed: None) -> None:
    engine = tiny.engine(TREE)
    engine.runner.drafter.on_device = True  # as it is on a GPU
    steps = engine.runner.steps
    assert isinstance(steps, GraphedSteps)
    steps.graphs.clear()
    with torch.inference_mode():
        steps.warm_up([PLAIN, engine.shape])
    kinds = {(kind.shape, kind.drafter_commits) for kind in steps.graphs}
    assert kinds == {(PLAIN, True), (PLAIN, False), (engine.shape, True)}
    live = engine.start(random_prompt(12, 1), greedy(30))
    known = len(steps.graphs)
    for untrack in ([], [live]):
        engine.execute(decode=[live], shape=PLAIN, untrack=untrack)
    engine.finish([live])
    assert live.output == tiny.plain.choices(live)
    assert len(steps.graphs) == known, "nothing new is captured"


def test_plain_steps_are_caught_up_on_by_a_graph_of_their_own(tiny: Tiny, graphed: None) -> None:
    """Five requests in one for six, after more steps than entries could wait."""
    drafted = []
    for with_graphs in (True, False):
        engine = tiny.engine(TREE, max_running_requests=8)
        engine.runner.drafter.on_device = True  # as it is on a GPU
        if not with_graphs:
            engine.runner.steps = EagerSteps(engine.runner.step)
        lives = [engine.start(random_prompt(9 + i, i), greedy(80)) for i in range(5)]
        for _ in range(MAX_WITHOUT_ROWS + 3):
            engine.execute(decode=lives, shape=PLAIN)
        engine.execute(decode=lives)
        drafted.append([live.proposals[-1] for live in lives])
        engine.finish(lives)
        assert [live.output for live in lives] == [tiny.plain.choices(live) for live in lives]
        if isinstance(engine.runner.steps, GraphedSteps):
            assert set(engine.runner.steps.catching_up) == {6}
    assert drafted[0] == approximately(drafted[1])


def test_padding_changes_nothing_of_a_request(tiny: Tiny, graphed: None) -> None:
    engine = tiny.engine(TREE)
    live = engine.start(random_prompt(12, 1), greedy(12))
    table, steps = engine.runner.table, engine.runner.steps
    assert isinstance(steps, GraphedSteps)
    before = {name: part.clone() for name, part in vars(table).items() if torch.is_tensor(part)}
    steps.warm_up([PLAIN, engine.shape])
    for name, part in before.items():
        assert torch.equal(getattr(table, name)[:-1], part[:-1]), name
    engine.finish([live])
    assert live.output == tiny.plain.choices(live)


def test_a_batch_finds_a_graph_that_holds_it_and_little_more() -> None:
    for most in (1, 5, 32, 100, 300):
        ladder = batch_ladder(most)
        assert ladder[0] == most and ladder == sorted(set(ladder), reverse=True)
        for size in range(1, most + 1):
            holds = min(each for each in ladder if each >= size)
            assert holds <= max(size + 1, 1.5 * size)
