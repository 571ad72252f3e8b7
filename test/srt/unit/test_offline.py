"""Scheduler and runner in one process, a step at a time."""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

import pytest
from fake_runner import FakeRunner, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, SamplingParams
from mamba_eagle.message import Generate, Plan, StepResult
from mamba_eagle.offline import OfflineEngine


class Launched(NamedTuple):
    runner: Device
    made: StepResult

    def result(self) -> StepResult:
        assert self.runner.in_flight.popleft() is self.made, "results are read in order"
        return self.made


class Device(FakeRunner):
    """Has done its work before anybody asks for the result."""

    def __init__(self, overlaps: bool) -> None:
        super().__init__(kv_slots=2000, state_slots=60, requests=4, context=200)
        self.overlaps = overlaps
        self.in_flight: deque[StepResult] = deque()
        self.most = 0

    def launch(self, plan: Plan) -> Launched:
        made = self.execute(plan)
        self.in_flight.append(made)
        self.most = max(self.most, len(self.in_flight))
        return Launched(self, made)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_request_gets_its_text(overlaps: bool) -> None:
    """More of them than run at once; where the device allows, two steps are under way."""
    device = Device(overlaps)
    engine = OfflineEngine(EngineConfig(speculative_algorithm="NONE"), device)
    expected, texts = {}, {}
    for i in range(9):
        prompt, sampling = [7 + i, 8, 9], SamplingParams(max_new_tokens=5 + i, ignore_eos=True)
        assert engine.add(Generate(rid=str(i), token_ids=prompt, sampling=sampling)) == []
        expected[str(i)], texts[str(i)] = expected_text(prompt, sampling), []
    while not engine.idle:
        for output in engine.step():
            texts[output.rid] += output.token_ids
    assert texts == expected
    assert engine.step() == []
    assert device.most == (2 if overlaps else 1)


def test_with_prompts_first_no_step_is_mixed_and_texts_are_the_same() -> None:
    """Requests come while others decode, and prompts take several steps each."""
    device = Device(overlaps=True)
    config = EngineConfig(
        speculative_algorithm="NONE", chunked_prefill_size=8, disable_radix_cache=True
    )
    engine = OfflineEngine(config, device, prompts_first=True)
    expected, texts, kinds = {}, {}, []
    for i in range(9):
        prompt, sampling = [7 + i] * 11, SamplingParams(max_new_tokens=5 + i, ignore_eos=True)
        engine.add(Generate(rid=str(i), token_ids=prompt, sampling=sampling))
        expected[str(i)], texts[str(i)] = expected_text(prompt, sampling), []
    while (step := engine.execute()) is not None:
        assert not (step.plan.prefill and step.plan.decode)
        kinds.append("p" if step.plan.prefill else "d" if step.plan.decode else "r")
        for output in step.outputs:
            texts[output.rid] += output.token_ids
    assert texts == expected
    first_four = "".join(kinds)[:7]
    assert first_four == "pppppp" + "d", "44 tokens, then all four decode"


@pytest.mark.parametrize(
    "prompt, expect",
    [
        ([], "the prompt is empty"),
        ([1] * 200, "200 tokens, but at most 199 fit"),
        ([1, 50], r"\[1\] = 50: .* between 0 and 49"),
    ],
)
def test_what_can_never_be_served_is_answered_at_once(prompt: list[int], expect: str) -> None:
    engine = OfflineEngine(EngineConfig(speculative_algorithm="NONE"), Device(False))
    (refused,) = engine.add(Generate(rid="a", token_ids=prompt, sampling=SamplingParams()))
    assert refused.finish is not None and refused.finish.failure is Failure.REFUSED
    assert re.search(expect, refused.finish.message), refused.finish.message
    assert engine.idle
