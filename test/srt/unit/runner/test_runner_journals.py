"""Prompts that begin with any part of an earlier prompt or output: text and drafts are those of an
engine without a cache, and the state that rows give is that of a prefill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_rig import Sequential, Served
from runner_harness import SETTINGS, Engine, Settings, greedy, random_prompt, sampled
from tensor_checks import torch_path
from tiny_drafters import DRAFTERS
from tiny_model import write_delta_model, write_head

from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.message import JournalPart, Plan

torch.set_num_threads(1)

SCHEMES = ["none", "tree", "tree-torch", "tree-snapshot", "tree-snapshot-torch"]
TREE = Settings(topk=2, steps=3, nodes=6)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), model)


def check_cuts(
    cached: Sequential, plain: Sequential, outputs: bool = True, drafts: bool = True
) -> None:
    """A prompt, its output, and both cut at several tokens."""

    def same(one: Served, other: Served) -> bool:
        return one == other if drafts else one.tokens == other.tokens

    prompt = random_prompt(150, seed=1)
    first = cached.serve(prompt, sampled(90, 3))
    assert same(first, plain.serve(prompt, sampled(90, 3)))
    text = prompt + first.tokens
    for kept in (99, 149, 151, 177, 239):
        longer = [*text[:kept], 5, 6, 7]
        served = cached.serve(longer, sampled(9, kept))
        assert same(served, plain.serve(longer, sampled(9, kept)))
        if kept in (99, 149, 239) or (outputs and kept > 176):
            assert served.cached == min(kept, 239), f"of {kept} tokens"
    assert cached.hits("journal") >= 2


def check_untracked(cached: Sequential, plain: Sequential) -> None:
    """A prompt whose last request was untracked, and a tracked one that continues it."""
    policy, ready = cached.engine.scheduler.policy, cached.runner.ready

    def serve(prompt: list[int], count: int, tracks: bool) -> Served:
        policy.tracks_next = lambda catches_up: tracks  # type: ignore[method-assign]
        served = cached.serve(prompt, sampled(count, 4))
        wanted = plain.serve(prompt, sampled(count, 4))
        assert served == wanted if tracks else served.tokens == wanted.tokens
        return served

    prompt = random_prompt(90, seed=5)
    serve(prompt[:30], 2, tracks=True)
    text = [*prompt, *serve(prompt, 40, tracks=False).tokens[:-1], 5, 6, 7]
    serve(text, 2, tracks=False)
    first = serve(text, 110, tracks=True)
    # the target runs again what the drafter must read of it
    assert first.cached <= 30 if ready.drafter_reads == "features" else first.cached > 130
    # once: then the drafter has followed all of it
    assert serve([*text, 8], 9, tracks=True).cached >= len(text) - 1
    assert serve([*text, *first.tokens[:-1], 5, 6], 9, tracks=True).cached > len(text) + 60


@pytest.mark.parametrize("name", SCHEMES)
def test_text_and_drafts_are_those_without_a_cache(model: Path, head: Path, name: str) -> None:
    settings = SETTINGS[name]
    cached = Sequential(settings, model, head)
    plain = Sequential(settings, model, head, disable_radix_cache=True)
    check_cuts(cached, plain)


@pytest.mark.parametrize("name, within", [("tree", 1e-6), ("tree-snapshot", 3e-6)])
def test_a_delta_rule_leaves_the_texts_drafts_and_states_of_plain_runs(
    tmp_path: Path, name: str, within: float
) -> None:
    """Two prompts that begin alike, and the first again; then states after many steps, whose
    inputs other kernels make with snapshots than in prompts."""
    settings, model = SETTINGS[name], write_delta_model(tmp_path / "model")
    head = write_head(tmp_path / "head", model)
    cached = Sequential(settings, model, head)
    plain = Sequential(settings, model, head, disable_radix_cache=True)
    first = random_prompt(110, seed=6)
    second = [*first[:70], *random_prompt(60, seed=7)]
    for prompt, hit in ((first, 0), (second, 70), (first, 109)):
        served = cached.serve(prompt, sampled(24, 3))
        assert served == plain.serve(prompt, sampled(24, 3))
        assert served.cached == hit
    engine = Engine(model, head, settings)
    live = engine.start(first, sampled(90, 3))
    engine.finish([live])
    kept = engine.release(live, live.processed)
    assert kept is not None
    prefilled = engine.start(kept.tokens, greedy(1)).state_slot
    pool = engine.runner.pool
    for part in (*pool.ssm, *pool.conv):  # layer by layer
        found, wanted = part[kept.state_slot], part[prefilled]
        assert (found - wanted).norm() <= within * wanted.norm()


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_is_blind_behind_a_hit(model: Path, tmp_path: Path, name: str) -> None:
    """Recurrent ones process again what the target takes from rows."""
    drafter = DRAFTERS[name]
    folder = drafter.write(tmp_path / "drafter", model)
    settings = TREE._replace(algorithm=drafter.algorithm)
    cached = Sequential(settings, model, folder)
    plain = Sequential(settings, model, folder, disable_radix_cache=True)
    # n-grams are counted once per token that was run, so drafts depend on what was cached
    check_cuts(cached, plain, cached.runner.ready.moves_anchors, drafter.algorithm != "NGRAM")
    if drafter.algorithm != "NGRAM":
        check_untracked(cached, plain)


@pytest.mark.parametrize("name", ["tree", "tree-torch"])
@pytest.mark.parametrize("position", [101, 102, 130, 155])
def test_the_state_after_rows_is_that_of_a_prefill(
    model: Path, head: Path, name: str, position: int
) -> None:
    engine = Engine(model, head, SETTINGS[name], max_journals=2)
    prompt = random_prompt(160, seed=2)
    live = engine.admit(prompt, sampled(1, 0))
    item = engine.chunk(live, 160, saves=(100, position))
    item.journal = JournalPart(1, 100, 160)
    engine.after_chunk(live, item, engine.execute(prefill=[item]).prefill[0])
    anchor, wanted = live.saved[100].state_slot, live.saved[position].state_slot
    pool = engine.runner.pool
    with torch_path(not engine.fused), torch.inference_mode():
        engine.runner.journals.replay(JournalPart(1, 100, position), anchor)
    if engine.fused:  # prompts and replays step a state alike
        assert torch.equal(pool.ssm[:, anchor], pool.ssm[:, wanted])
    scale = pool.ssm[:, wanted].norm()
    assert (pool.ssm[:, anchor] - pool.ssm[:, wanted]).norm() <= 3e-6 * scale
    assert torch.equal(pool.conv[:, anchor], pool.conv[:, wanted])
    torch.testing.assert_close(pool.feature[anchor], pool.feature[wanted], rtol=0, atol=1e-5)


def test_rows_of_an_ended_request_are_kept_no_longer(model: Path, head: Path) -> None:
    """Its journal slot may be another's already."""
    engine = Engine(model, head, SETTINGS["tree"], max_journals=2)
    live = engine.admit(random_prompt(20, seed=3), sampled(30, 0))
    item = engine.chunk(live, 20)
    item.trail = 1
    engine.after_chunk(live, item, engine.execute(prefill=[item]).prefill[0])
    engine.execute(decode=[live])
    journals = engine.runner.journals
    assert journals.conv_in[:, 1].abs().sum() > 0
    engine.runner.execute(Plan(step=99, end_trails=[live.slot]))
    journals.conv_in[:, 1] = 0
    engine.execute(decode=[live])
    assert journals.conv_in[:, 1].abs().sum() == 0


@pytest.mark.parametrize("name", ["tree", "tree-snapshot"])
def test_with_one_state_slot_a_conversation_goes_on_in_it(
    model: Path, head: Path, name: str
) -> None:
    one = {"max_mamba_cache_size": 1, "max_running_requests": 1}
    cached = Sequential(SETTINGS[name], model, head, **one)
    plain = Sequential(SETTINGS[name], model, head, disable_radix_cache=True, **one)
    text = random_prompt(40, seed=4)
    for turn in range(3):
        served = cached.serve(text, sampled(20, turn))
        assert served == plain.serve(text, sampled(20, turn))
        assert served.cached == (len(text) - 4 if turn else 0)
        text = [*text, *served.tokens, 5, 6, 7]


def test_with_one_state_slot_a_drafter_catches_up_in_it(model: Path, tmp_path: Path) -> None:
    one = {"max_mamba_cache_size": 1, "max_running_requests": 1}
    folder = DRAFTERS["standalone"].write(tmp_path / "drafter", model)
    settings = TREE._replace(algorithm="STANDALONE")
    cached = Sequential(settings, model, folder, **one)
    plain = Sequential(settings, model, folder, disable_radix_cache=True, **one)
    policy, text = cached.engine.scheduler.policy, random_prompt(40, seed=4)
    for turn in range(3):
        policy.tracks_next = lambda catches_up, turn=turn: turn > 0  # type: ignore[method-assign]
        served = cached.serve(text, sampled(20, turn))
        wanted = plain.serve(text, sampled(20, turn))
        assert served == wanted if turn else served.tokens == wanted.tokens
        assert served.cached == (len(text) - 4 if turn else 0)
        text = [*text, *served.tokens, 5, 6, 7]


def test_a_replayed_state_of_16_bits_is_rounded_with_the_caches_noise(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position and layer, whoever has asked for it."""
    engine = Engine(model, head, SETTINGS["tree"], max_journals=2, mamba_ssm_dtype="bfloat16")
    live = engine.admit(random_prompt(160, seed=2), sampled(1, seed=5))
    item = engine.chunk(live, 160, saves=(100,))
    item.journal = JournalPart(1, 100, 160)
    engine.after_chunk(live, item, engine.execute(prefill=[item]).prefill[0])
    pool, anchor, seen = engine.runner.pool, live.saved[100].state_slot, []
    round_layers = pool.rounding.round_layers

    def watched(states: torch.Tensor, key: torch.Tensor | None, first: int) -> torch.Tensor:
        seen.append(states)
        return round_layers(states, key, first)

    monkeypatch.setattr(pool.rounding, "round_layers", watched)
    with torch.inference_mode():
        engine.runner.journals.replay(JournalPart(1, 100, 130), anchor)
    keys = token_keys(torch.tensor([0]), torch.tensor([130]))
    for layer, state in enumerate(torch.cat(seen)):
        expected = round_states(state[None], keys, layer, torch.bfloat16)[0]
        assert torch.equal(pool.ssm[layer, anchor], expected)
