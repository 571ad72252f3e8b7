"""Sessions: what their last request has run is evicted last; samples of one prompt share it."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_SESSIONS

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
CHAT = [(i * i + i // 7) % 50 for i in range(60)]


def server(kv: int = 400, states: int = 8) -> Server:
    return Server(EngineConfig(speculative_algorithm="NONE"), FakeRunner(kv, states, 4, 2000))


def turn(serving: Server, rid: str, prompt: list[int], session: str = "") -> list[int]:
    """The prompt and its output."""
    serving.add(rid, prompt, SHORT, session=session)
    serving.finish()
    assert serving.texts[rid] == expected_text(prompt, SHORT)
    return [*prompt, *serving.texts[rid]]


def flood(serving: Server, name: str) -> None:
    """Far more than there is room for."""
    for i in range(12):
        turn(serving, f"{name}{i}", [50 + i, *CHAT])


def test_a_session_outlives_others_in_the_cache_until_it_is_closed() -> None:
    serving = server()
    assert not serving.scheduler.sessions.open("chat", 300.0)
    text, other = turn(serving, "a1", CHAT, "chat"), turn(serving, "b1", [7, *CHAT], "never opened")
    for i in range(3):
        flood(serving, f"x{i} ")
        before, text = len(text), turn(serving, f"a{i + 2}", [*text, 1, 2, 3], "chat")
        assert serving.last[f"a{i + 2}"].cached_tokens == before - 1
        pins = serving.scheduler.slots.cache.pins
        assert pins.kv == len(text) - 1, "earlier turns are not counted again"
    turn(serving, "b2", [*other, 1])
    assert serving.last["b2"].cached_tokens == 0
    assert not serving.scheduler.sessions.close("chat")
    flood(serving, "y")
    turn(serving, "a9", [*text, 1])
    assert serving.last["a9"].cached_tokens == 0
    serving.scheduler.check_integrity()


def test_a_session_ends_when_no_request_names_it_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving, now = server(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert not serving.scheduler.sessions.open("chat", 10.0)
    for i in range(3):
        turn(serving, f"r{i}", CHAT, "chat")
        now += 9.0  # each request gives it time again
    assert serving.scheduler.slots.cache.pins.kv
    now += 2.0
    turn(serving, "late", CHAT, "chat")
    assert not serving.scheduler.slots.cache.pins.kv
    assert "not open" in serving.scheduler.sessions.close("other")
    assert not serving.scheduler.sessions.open("chat", 10.0)
    for i in range(MAX_SESSIONS - 1):
        assert not serving.scheduler.sessions.open(f"s{i}", 10.0)
    assert "close some" in serving.scheduler.sessions.open("more", 10.0)


def test_what_is_pinned_after_a_flush_is_pinned_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving, now = server(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for name in ("before", "after"):
        assert not serving.scheduler.sessions.open(name, 10.0)
        turn(serving, name, CHAT, name)
        assert serving.scheduler.slots.cache.pins.kv
        now += 11.0
        turn(serving, f"late {name}", CHAT)
        assert not serving.scheduler.slots.cache.pins.kv
        serving.scheduler.flush()


def test_samples_of_one_prompt_share_its_slots() -> None:
    """One copy of the prompt's keys and values, and one more state slot for each sample."""
    serving = server(kv=2000, states=20)
    many = SamplingParams(max_new_tokens=30, ignore_eos=True)
    for i in range(4):
        serving.add(f"r{i}", CHAT, many)
    most = 0
    while not serving.scheduler.idle:
        serving.step()
        pools = serving.scheduler.slots
        most = max(most, pools.kv.total - pools.kv.num_free)
    assert most <= len(CHAT) + 4 * (30 + 4), "four prompts would be 240"
    assert serving.runner.prefilled_tokens == len(CHAT) + 3
    assert [serving.last[f"r{i}"].cached_tokens for i in range(4)] == [0, *[len(CHAT) - 1] * 3]
