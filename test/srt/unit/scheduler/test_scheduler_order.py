"""Who is served first, who steps back, and who has waited too long."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, SamplingParams
from mamba_eagle.message import ChangeModel
from mamba_eagle.scheduler.adapters import Adapter

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def server(requests: int = 2, kv_slots: int = 2000, **settings: object) -> Server:
    config = EngineConfig(speculative_algorithm="NONE", **settings)
    return Server(config, FakeRunner(kv_slots, 40, requests, 400))


def running(serving: Server) -> set[str]:
    admitted = serving.scheduler._admitted
    return {request.rid for request in admitted if not request.leaving}


def test_a_request_of_higher_priority_takes_the_place_of_the_lowest() -> None:
    serving = server(schedule_policy="priority")
    texts = {}
    for number, priority in enumerate([1, 0, 0, 5, -1]):
        rid, prompt = f"r{number}", [number] * 10
        texts[rid] = expected_text(prompt, LONG)
        serving.add(rid, prompt, LONG, priority=priority)
        for _ in range(6):
            serving.step()
    # r0 and r1 ran; r2 waited; r3 came and r1, the lowest, stepped back.
    assert running(serving) == {"r0", "r3"}
    waiting = [request.rid for request in serving.scheduler.prefill.waiting]
    assert waiting == ["r1", "r2", "r4"]  # who has run before comes first among equals
    serving.finish()
    assert serving.texts == texts
    assert serving.last["r1"].retractions == 1


@pytest.mark.parametrize("holders", [[0, 0], [0, 6]], ids=["lower", "also_higher"])
def test_only_who_holds_the_slot_of_an_adapter_steps_back_for_another(holders: list[int]) -> None:
    """A place that others left would be taken by those that wait, again and again."""
    serving = server(requests=3, schedule_policy="priority", max_loras=1)
    serving.scheduler.adapters._by_name = {name: Adapter(ord(name), name) for name in "ab"}
    for number, priority in enumerate(holders):
        serving.add(f"r{number}", [number] * 10, LONG, adapter="a", priority=priority)
    serving.add("plain", [2] * 10, LONG)
    serving.step()
    serving.add("first", [3] * 10, LONG, adapter="b", priority=5)
    serving.add("last", [4] * 10, LONG)
    for _ in range(9):
        serving.step()
    if holders == [0, 0]:
        assert running(serving) == {"first", "plain", "last"}
        assert serving.scheduler.stats.num_retracted == 2
    else:
        assert running(serving) == {"r0", "r1", "plain"}
        assert serving.scheduler.stats.num_retracted == 0
    serving.finish()
    for number, rid in enumerate(["r0", "r1", "plain", "first", "last"]):
        assert serving.texts[rid] == expected_text([number] * 10, LONG)


def test_equal_priorities_keep_the_order_of_arrival() -> None:
    serving = server(requests=1, schedule_policy="priority")
    ended = []
    for number in range(5):
        serving.add(f"r{number}", [number] * 10, LONG, priority=3)
    while not serving.scheduler.idle:
        serving.step()
        ended += [rid for rid, last in serving.last.items() if last.finish and rid not in ended]
    assert ended == [f"r{number}" for number in range(5)]
    assert serving.scheduler.stats.num_retracted == 0


@pytest.mark.parametrize("stop", ["keep", "wait", "released"])
def test_nobody_waits_too_long_because_of_a_pause(stop: str) -> None:
    """The time begins anew when it ends, whether a request came before it or meanwhile."""
    serving = server(requests=1, queue_timeout=5.0)
    scheduler, pauses = serving.scheduler, serving.scheduler.pauses
    serving.add("r0", [0] * 10, LONG, arrival_time=100.0)
    serving.add("r1", [1] * 10, LONG, arrival_time=100.0)
    if stop == "released":
        pauses.change = ChangeModel(release=["weights"])
        pauses.changed(worked=True)
    else:
        scheduler.pause(stop)
    serving.add("r2", [2] * 10, LONG, arrival_time=101.0)
    assert scheduler.expire(now=200.0) == []
    pauses.released.clear()
    scheduler.resume()
    serving.step()
    assert scheduler.expire(now=204.0) == []
    late = scheduler.expire(now=206.0)
    assert [output.rid for output in late] == ["r1", "r2"]


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_a_request_that_waits_too_long_is_told_so(timeout: float) -> None:
    serving = server(requests=1, queue_timeout=timeout)
    for number in range(3):
        serving.add(f"r{number}", [number] * 10, LONG, arrival_time=100.0 + number)
    for _ in range(5):
        serving.step()
    outputs = serving.scheduler.expire(now=106.5)
    assert [output.rid for output in outputs] == (["r1"] if timeout else [])
    for output in outputs:
        assert output.finish.failure is Failure.TIMEOUT
        assert "--queue-timeout" in output.finish.message
    serving.take(outputs)
    serving.finish()
    kept = {"r0", "r2"} if timeout else {"r0", "r1", "r2"}
    assert {rid for rid, text in serving.texts.items() if len(text) == 60} == kept
