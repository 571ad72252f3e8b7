"""Any of the last tokens of a prompt or of an output can be continued after: by a journal.

``fake_runner.py`` compares every row of a journal with the prefix that it is read for.
"""

from __future__ import annotations

import random

import pytest
from fake_runner import FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.scheduler.speculation import Choice, FixedShape

PROMPT = [(i * i + i // 7) % 50 for i in range(600)]
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}


def server(journals: int = 20, states: int = 60, **settings) -> Server:
    runner_settings = {
        name: settings.pop(name)
        for name in ("moves_anchors", "journal_rows", "drafter_reads")
        if name in settings
    }
    config = EngineConfig(**{"speculative_algorithm": "NONE", **settings})
    runner = FakeRunner(20000, states, 8, 3000, journals=journals, **runner_settings)
    return Server(config, runner)


def served(serving: Server, rid: str, prompt: list[int], sampling=SHORT, **rest) -> list[int]:
    serving.add(rid, prompt, sampling, **rest)
    serving.finish()
    assert serving.texts[rid] == expected_text(prompt, sampling)
    return serving.texts[rid]


@pytest.mark.parametrize("chunk", [8192, 100, 31])
@pytest.mark.parametrize("cut", [0, 1, 2, 40, 64, 126])
def test_a_prompt_that_ends_earlier_runs_one_token(chunk, cut):
    serving = server(chunked_prefill_size=chunk)
    served(serving, "a", PROMPT)
    served(serving, "b", PROMPT[: len(PROMPT) - cut])
    assert serving.last["b"].cached_tokens == len(PROMPT) - cut - 1
    served(serving, "c", [*PROMPT[: len(PROMPT) - cut - 1], 49, 48, 47])
    assert serving.last["c"].cached_tokens == len(PROMPT) - cut - 1


@pytest.mark.parametrize("drafts", [{}, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("count", [10, 64, 100, 300])
def test_an_output_cut_by_up_to_64_tokens_is_cached_up_to_the_cut(drafts, count):
    serving = server(**drafts)
    how = SamplingParams(max_new_tokens=count, ignore_eos=True)
    text = PROMPT[:100] + served(serving, "a", PROMPT[:100], how)
    for cut in (0, 1, 2, 20, 63, 64):
        kept = len(text) - 1 - cut
        if kept > 100:
            served(serving, f"cut{cut}", [*text[:kept], 49, 48, 47])
            assert serving.last[f"cut{cut}"].cached_tokens == kept
    assert serving.scheduler.cache_use().hits["journal"] > 0
    assert (serving.runner.moves > 0) == (count > 200)


@pytest.mark.parametrize("journals, most", [(200, 0), (9, 64)])
def test_a_fork_in_a_long_output_runs_no_more_than_the_interval(journals, most):
    """Nothing, if journals are free as well."""
    serving = server(journals, **TREE, mamba_checkpoint_interval=64, states=200)
    how = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    text = PROMPT[:100] + served(serving, "a", PROMPT[:100], how)
    for kept in range(150, 1090, 37):
        served(serving, f"kept{kept}", [*text[:kept], 49, 48, 47])
        assert serving.last[f"kept{kept}"].cached_tokens >= kept - most


def test_without_anchors_that_move_a_long_output_is_served_at_its_end():
    serving = server(moves_anchors=False)
    how = SamplingParams(max_new_tokens=300, ignore_eos=True)
    text = PROMPT[:100] + served(serving, "a", PROMPT[:100], how)
    assert serving.runner.moves == 0
    served(serving, "b", [*text, 49, 48])
    assert serving.last["b"].cached_tokens == len(text) - 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_follow_up_sent_at_once_hits_all_that_it_shares(overlap, cut):
    """However little that is beyond what is cached already."""
    serving = server(disable_overlap_schedule=not overlap)
    chat = PROMPT[:100]
    for turn in range(5):
        how = SamplingParams(max_new_tokens=45, ignore_eos=True, seed=turn)
        serving.add(f"turn{turn}", chat, how)
        while (last := serving.last.get(f"turn{turn}")) is None or last.finish is None:
            serving.step()
        text = chat + serving.texts[f"turn{turn}"]
        if turn:
            assert last.cached_tokens == len(chat) - 1 - (cut == 0) * 3
        chat = text[: len(text) - cut] + [turn, 49, 48] * (cut == 0)
    serving.finish()


@pytest.mark.parametrize("kept", [5, 200, 290])
def test_a_fork_in_a_long_output_may_be_sent_at_once(kept):
    serving = server(**TREE)
    serving.add("a", PROMPT[:100], SamplingParams(max_new_tokens=300, ignore_eos=True))
    while (last := serving.last.get("a")) is None or last.finish is None:
        serving.step()
    prompt = [*PROMPT[:100], *serving.texts["a"][:kept], 49, 48]
    served(serving, "b", prompt)
    assert serving.last["b"].cached_tokens >= 100 + kept


@pytest.mark.parametrize("late", [0, 1, 5, 30])
def test_a_stop_string_leaves_the_text_that_it_ends(late):
    """Also if S0 is past its end when the scheduler hears of it."""
    serving = server(**TREE)
    how = SamplingParams(max_new_tokens=400, ignore_eos=True)
    serving.add("a", PROMPT[:100], how)
    while len(serving.texts.get("a", [])) < 150 + late:
        serving.step()
    serving.take(serving.scheduler.stop_at("a", 150, "x"))
    text = PROMPT[:100] + serving.texts["a"][:150]
    serving.add("b", [*text, 49, 48], SHORT)
    serving.finish()
    assert serving.last["b"].cached_tokens == len(text) - 1
    assert serving.texts["b"] == expected_text([*text, 49, 48], SHORT)


def test_trails_take_a_quarter_of_the_states_at_most():
    serving = server(states=16)
    for i in range(8):
        serving.add(f"r{i}", [i, *PROMPT[:50]], SamplingParams(max_new_tokens=90, ignore_eos=True))
    for _ in range(40):
        serving.step()
    assert serving.scheduler.slots.num_trails == 4
    serving.finish()
    assert serving.scheduler.slots.num_trails == 0


def test_a_journal_that_leaves_is_folded_so_that_its_end_is_served():
    serving = server(journals=2)
    for i in range(5):
        served(serving, f"r{i}", [i, *PROMPT[:300]])
    assert serving.scheduler.state()["num_cached_journals"] == 2
    assert serving.runner.moves > 0
    for i in range(5):
        served(serving, f"again{i}", [i, *PROMPT[:300]])
        assert serving.last[f"again{i}"].cached_tokens == 300


def test_a_journal_that_leaves_is_folded_to_where_prompts_part():
    """Behind it others go on, whereas its end was of use to one prompt."""
    serving = server(journals=2)
    served(serving, "a", PROMPT[:340])
    for i in range(6):
        served(serving, f"b{i}", [*PROMPT[:300], i, *PROMPT[301:340]])
        assert serving.last[f"b{i}"].cached_tokens >= 300
        served(serving, f"other{i}", [i, *PROMPT[:300]])


def test_where_anchors_cannot_move_journals_leave_with_their_states_only():
    serving = server(journals=2, moves_anchors=False)
    for i in range(5):
        served(serving, f"r{i}", [i, *PROMPT[:300]])
    for i in range(5):
        served(serving, f"again{i}", [i, *PROMPT[:300]])
        assert serving.last[f"again{i}"].cached_tokens == 300
    assert serving.runner.moves == 0


class SomeTracked(FixedShape):
    """Tracks some of the requests, and not always to their ends."""

    def __init__(self, shape, rng: random.Random) -> None:
        super().__init__(shape)
        self.rng, self.next = rng, True

    def tracks_next(self, catches_up: bool) -> bool:
        return self.next

    def admit(self, request, catches_up: bool = True) -> None:
        super().admit(request, catches_up)
        self.next = self.rng.random() < 0.6

    def choose(self, requests, in_flight):
        tracked = [i for i, each in enumerate(requests) if each.tracked]
        some = tracked[:1] if self.rng.random() < 0.03 else []
        return Choice(self.shape, untracked=some)


@pytest.mark.parametrize("reads", ["features", "tokens"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_drafter_catches_up_with_what_it_has_not_followed(reads, recurrent):
    """``fake_drafter.py`` compares what the cache says that it has followed."""
    serving = server(drafter_reads=reads, moves_anchors=not recurrent, **TREE)
    policy, how = serving.scheduler.policy, SamplingParams(max_new_tokens=500, ignore_eos=True)
    policy.tracks_next = lambda catches_up: False
    served(serving, "a", PROMPT[:400])
    policy.tracks_next = lambda catches_up: True
    served(serving, "b", PROMPT[:400])  # so few tokens are not worth running 400 again
    assert serving.last["b"].cached_tokens == 399
    caught_up = serving.runner.drafter.caught_up
    assert caught_up == (0 if reads == "features" else 399)
    served(serving, "c", PROMPT[:400], how)
    assert serving.last["c"].cached_tokens == (0 if reads == "features" else 399)
    assert serving.runner.drafter.copied == (400 if reads == "features" else 1)
    served(serving, "d", PROMPT[:500], how)
    assert serving.last["d"].cached_tokens >= 399


# 107: a request heals nodes behind one that it did not heal
@pytest.mark.parametrize("seed", [*range(5), 107])
def test_edits_forks_and_chats_keep_their_texts(seed):
    """With few states and journals, aborts and stops; integrity is checked after each step."""
    rng = random.Random(seed)
    serving = server(
        rng.choice([1, 3, 12]),
        rng.choice([4, 9, 30]),
        drafter_reads=rng.choice(["features", "tokens"]),
        **rng.choice([{}, TREE]),
        chunked_prefill_size=rng.choice([16, 200]),
        moves_anchors=rng.random() < 0.7,
        journal_rows=rng.choice([24, 40, 128]),
        mamba_checkpoint_interval=rng.choice([0, 16]),
    )
    serving.rng = rng
    policy = SomeTracked(serving.scheduler.shape, rng)
    serving.scheduler.policy = serving.scheduler.results.policy = policy
    serving.scheduler.prefill.policy = serving.scheduler.prefill.catch_up.policy = policy
    texts, wanted = [PROMPT[:60]], {}
    for i in range(50):
        text = rng.choice(texts)
        prompt = text[: max(1, len(text) - rng.choice([0, 0, 1, 5, 30, 64, 200]))]
        prompt = prompt + [rng.randrange(50) for _ in range(rng.choice([0, 1, 9, 40]))]
        how = SamplingParams(max_new_tokens=rng.choice([1, 5, 40, 150]), seed=rng.randrange(3))
        rid = f"r{i}"
        serving.add(rid, prompt, how)
        for _ in range(rng.choice([0, 2, 60])):
            serving.step()
        if rng.random() < 0.1:
            serving.take(serving.scheduler.abort(rid))
        elif rng.random() < 0.2 and serving.texts.get(rid):
            kept = rng.randint(0, len(serving.texts[rid]))
            serving.take(serving.scheduler.stop_at(rid, kept, "x"))
        else:
            wanted[rid] = expected_text(prompt, how)
            if len(prompt) < 800:
                texts.append(prompt + wanted[rid])
    serving.finish()
    for rid, text in wanted.items():
        assert serving.texts[rid] == text
    assert serving.runner.replays > 0
