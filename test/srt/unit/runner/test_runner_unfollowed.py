"""Requests that the drafter does not follow get the right texts, and are in nobody's way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import (
    PlainModel,
    Settings,
    approximately,
    greedy,
    random_prompt,
    sampled,
)
from tiny_drafters import DRAFTERS
from tiny_model import write_model

from mamba_eagle.core import PLAIN
from mamba_eagle.drafting.dflash import BlockDrafter
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.waiting import MAX_WITHOUT_ROWS

torch.set_num_threads(1)

TREE = Settings(topk=3, steps=3, nodes=9)
CHAIN = Settings(topk=1, steps=3, nodes=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), mamba_head_dim=16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_the_plain_models(
    target: Path, tmp_path: Path, drafter: str, settings: Settings, device: str
) -> None:
    """Never tracked, given up while the prompt is run, or later; in trees all the same, and
    over more plain steps than entries could wait."""
    plain = PlainModel(target)
    engine = DRAFTERS[drafter].engine(tmp_path, target, settings, device=device, dtype="float32")
    tracked = engine.start(random_prompt(19, 1), greedy(40))
    never = engine.start(random_prompt(26, 2), sampled(90, 2), cuts=(5, 6), track=False)
    later = engine.start(random_prompt(9, 3), sampled(100, 3))
    halfway = engine.admit(random_prompt(20, 4), greedy(30))
    for end in (8, 20):
        item = engine.chunk(halfway, end)
        engine.after_chunk(halfway, item, engine.execute(prefill=[item]).prefill[0])
        halfway.asks["track"] = False
        engine.execute(untrack=[halfway], decode=[never, later])
    lives = [tracked, never, later, halfway]
    engine.execute(decode=lives)
    engine.execute(decode=lives, untrack=[later])
    for step in range(MAX_WITHOUT_ROWS):
        running = [live for live in lives if not engine.ended(live)]
        engine.execute(decode=running, shape=PLAIN if step % 20 else None)
    engine.finish(lives)
    for live in lives:
        assert live.output == plain.choices(live)
    ends = [live.processed for live in (never, later)]
    left = [engine.release(live, end) for live, end in zip((never, later), ends)]
    after = [
        engine.start(live.tokens[:end] + [5, 9], sampled(20, 4), hit=hit)
        for live, end, hit in zip((never, later), ends, left)
    ]
    engine.finish(after)
    assert [live.output for live in after] == [plain.choices(live) for live in after]


@pytest.mark.parametrize("track", [False, True], ids=["untracked", "tracked"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_others_are_drafted_for_as_if_they_were_alone(
    target: Path, tmp_path: Path, drafter: str, track: bool
) -> None:
    """Beside another request, their prompts in one pass; and after it, in its slot."""
    prompt, asked = random_prompt(19, 1), greedy(25)
    alone = DRAFTERS[drafter].engine(tmp_path, target, TREE).generate(prompt, asked)
    engine = DRAFTERS[drafter].engine(tmp_path, target, TREE, max_running_requests=2)
    other = engine.admit(random_prompt(12, 2), greedy(40), track=track)
    beside = engine.admit(prompt, asked)
    items = [engine.chunk(live, len(live.tokens)) for live in (other, beside)]
    made = engine.execute(prefill=items).prefill
    for live, item, result in zip((other, beside), items, made):
        engine.after_chunk(live, item, result)
    engine.finish([other, beside])
    assert beside.proposals == approximately(alone.proposals)
    slot = other.slot
    engine.release(other)
    after = engine.generate(prompt, asked)
    assert after.slot == slot
    if drafter != "ngram":  # which drafts from finished texts, too
        assert after.proposals == approximately(alone.proposals)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_drafter_does_nothing_for_them(
    target: Path, tmp_path: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the prompt, nor in plain steps, nor when they leave."""
    engine = DRAFTERS[drafter].engine(tmp_path, target, TREE)
    model = engine.runner.drafter
    live = engine.start(random_prompt(9, 3), sampled(60, 3))
    engine.execute(decode=[live], untrack=[live])
    if not isinstance(model, ModelDrafter | BlockDrafter):
        index = model.index  # type: ignore[attr-defined]
        known = int(index.state[0])  # nodes that were ever used
        engine.start(random_prompt(30, 1), greedy(20), track=False)
        assert index.state[0] <= known + 1, "a root, and nothing below it"
        assert not index.lengths[live.slot]
        return

    def never(*args: object) -> None:
        raise AssertionError("the drafter's network was run")

    if isinstance(model, BlockDrafter):
        monkeypatch.setattr(model.model, "context", never)
    else:
        monkeypatch.setattr(model.network, "run_entries", never)
    new = engine.start(random_prompt(30, 1), greedy(20), track=False, cuts=(11,))
    for each in (live, new):
        while not engine.ended(each):
            engine.execute(decode=[each], shape=PLAIN)
        engine.release(each, each.processed)
