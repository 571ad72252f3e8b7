"""Requests whose grammars are being compiled hold up nobody."""

from __future__ import annotations

from fake_runner import FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, SamplingParams
from mamba_eagle.scheduler import grammars
from mamba_eagle.scheduler.grammars import GrammarQueue

FREE = SamplingParams(max_new_tokens=6, ignore_eos=True)


def under(text: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=6, ignore_eos=True, grammar=text)


def server() -> tuple[Server, GrammarQueue]:
    config = EngineConfig(speculative_algorithm="NONE", queue_timeout=5.0)
    serving, queue = Server(config, FakeRunner(4000, 40, 2, 400)), GrammarQueue()
    serving.scheduler.prefill.grammars = queue
    return serving, queue


def admitted(serving: Server) -> set[str]:
    return {request.rid for request in serving.scheduler._admitted}


def test_a_request_waits_for_its_grammar_and_others_overtake_it() -> None:
    """More than are ever looked at, too."""
    serving, queue = server()
    for number in range(70):
        serving.add(f"w{number}", [number] * 5, under("a"))
    asked = queue.take_unsent()
    assert [each.text for each in asked] == ["a"] and queue.take_unsent() == []
    assert serving.scheduler.plan() is None  # nothing to do meanwhile
    serving.add("free", [1] * 5, FREE)
    for _ in range(20):
        serving.step()
        assert admitted(serving) <= {"free"}
    assert serving.texts["free"] == expected_text([1] * 5, FREE)
    queue.compiled(asked[0].text)
    serving.finish()
    assert serving.texts["w69"] == expected_text([69] * 5, FREE)


def test_a_grammar_is_asked_for_once_as_long_as_the_runner_has_it(monkeypatch) -> None:
    monkeypatch.setattr(grammars, "REMEMBERED", 2)
    serving, queue = server()
    compiled = ""
    for number, text in enumerate("abacab"):
        serving.add(f"r{number}", [number] * 5, under(text))
        for asked in queue.take_unsent():
            queue.compiled(asked.text)
            compiled += asked.text
        serving.finish()
        assert serving.last[f"r{number}"].finish.kind != "abort"
    assert compiled == "abcb"  # "b" was forgotten when "c" came


def test_a_grammar_that_was_forgotten_in_the_queue_is_asked_for_again(monkeypatch) -> None:
    """Once, when there is room for its request, and not before."""
    monkeypatch.setattr(grammars, "REMEMBERED", 1)
    serving, queue = server()
    for rid in ("one", "two"):
        serving.add(rid, [1] * 5, FREE)
    serving.step()  # no slot is left
    for text in "ab":
        serving.add(text, [ord(text)] * 5, under(text))
    for asked in queue.take_unsent():
        queue.compiled(asked.text)
    assert serving.scheduler.prefill.waiting and queue.take_unsent() == []
    while not (again := queue.take_unsent()):
        serving.step()
    assert [each.text for each in again] == ["a"]
    queue.compiled(again[0].text)
    while not serving.scheduler.idle:
        serving.step()
        for asked in queue.take_unsent():
            queue.compiled(asked.text)
    assert {rid for rid, last in serving.last.items() if last.finish} == {"one", "two", "a", "b"}


def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_expires() -> None:
    serving, queue = server()
    serving.add("late", [1] * 5, under("a"), arrival_time=100.0)
    serving.add("gone", [2] * 5, under("a"), arrival_time=104.0)
    (asked,) = queue.take_unsent()
    assert [output.rid for output in serving.scheduler.expire(106.0)] == ["late"]
    assert [output.rid for output in serving.scheduler.abort("gone")] == ["gone"]
    assert serving.scheduler.idle
    queue.compiled(asked.text)
    assert serving.scheduler.plan() is None


def test_a_grammar_that_the_runner_cannot_follow_is_refused_and_compiled_anew() -> None:
    serving, queue = server()
    serving.add("bad", [1] * 5, under("a"))
    for asked in queue.take_unsent():
        queue.compiled(asked.text)
    request = serving.scheduler.prefill.waiting[0]
    output = serving.scheduler.results.fail(request, "the grammar cannot be followed", "a limit")
    assert output.finish is not None and output.finish.failure is Failure.REFUSED
    serving.add("next", [2] * 5, under("a"))
    assert [asked.text for asked in queue.take_unsent()] == ["a"]


def test_nobody_steps_back_for_one_that_waits_for_its_grammar() -> None:
    """As long as others wait, too, a place that it left would be theirs, again and again."""
    config = EngineConfig(speculative_algorithm="NONE", schedule_policy="priority")
    serving, queue = Server(config, FakeRunner(4000, 40, 1, 400)), GrammarQueue()
    serving.scheduler.prefill.grammars = queue
    serving.add("r0", [0] * 5, SamplingParams(max_new_tokens=60, ignore_eos=True))
    serving.step()
    serving.add("first", [1] * 5, under("a"), priority=1)
    serving.add("r1", [2] * 5, FREE)
    for _ in range(4):
        serving.step()
    assert serving.scheduler.stats.num_retracted == 0
    queue.compiled(queue.take_unsent()[0].text)
    serving.finish()
    assert serving.last["r0"].retractions == 1 and serving.last["r1"].retractions == 0
