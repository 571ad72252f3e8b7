"""A server and its clients in virtual time: the real scheduler, and a runner that only takes time.

It shows what the order of things is worth, and no more than that: how long each part takes is
given. Three hosts work one thing after the other, as the three processes of a server do, and the
device beside them:

    clients ─▶ scheduler ─▶ runner ─▶ device          a plan is launched while the device
       ▲                      │         │             executes the one before
       └───── server ◀── scheduler ◀────┘             a result is sent between two launches
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from benchmark.lib.served import Scenario, Stream, Summary, Timing, summarize
from mamba_eagle.bench.client import Body
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import (
    Generate,
    Plan,
    Ready,
    RequestOutput,
    RequestResult,
    StepResult,
)
from mamba_eagle.scheduler.scheduler import Scheduler

TOKEN = 17  # what every request is answered with; no stop token


def between(corners: Sequence[tuple[int, float]], requests: int) -> float:
    """On the lines between corners (requests, seconds)."""
    numbers, seconds = ([corner[i] for corner in corners] for i in (0, 1))
    return float(np.interp(requests, numbers, seconds))


@dataclass(frozen=True)
class Costs:
    """Seconds, unless named otherwise."""

    decode: Sequence[tuple[int, float]]  # (requests, of a decode step); lines between
    tokens: int  # of a request per decode step, not seconds
    per_prompt_token: float
    pass_fixed: float  # of a pass over prompts, beside its tokens
    pass_least: float = 0.0  # of its tokens, however few
    launch_pass: float = 0.0  # the host's part of a pass
    launch_prompt: float = 0.0  # the same, for each prompt
    launch_decode: float = 0.0
    plan: float = 0.0006  # the scheduler's part
    plan_request: float = 8e-6
    output: float = 60e-6  # the server's part of one output of one request
    network: float = 0.002  # of a new request
    overlaps: bool = True  # the next step is launched while one is executed
    jitter: float = 0.0  # standard deviation of what the device does, as a share of it
    launch_jitter: float = 0.0  # launches take up to that share longer
    stalls: Sequence[tuple[int, float]] = ()  # (step, how much longer the launch of its prompts is)

    def decode_step(self, requests: int) -> float:
        return between(self.decode, requests)

    def prompts(self, tokens: int) -> float:
        return self.pass_fixed + max(self.pass_least, tokens * self.per_prompt_token)


# Nemotron-Nano-9B-v2's geometry in bfloat16; trees of 8 nodes with a drafter of two Llama layers.
H200 = Costs(
    decode=((1, 0.0062), (8, 0.0069), (32, 0.0112), (64, 0.018), (128, 0.034)),
    tokens=3,
    per_prompt_token=27e-6,
    pass_fixed=0.003,
    pass_least=0.005,
    launch_pass=0.012,
    launch_prompt=0.0002,
    launch_decode=0.0008,
)
H200_PLAIN = replace(
    H200,
    decode=((1, 0.005), (8, 0.0055), (32, 0.0068), (64, 0.009), (128, 0.0135)),
    tokens=1,
)
# The same in FP8. Passes of fewer than 1,200 tokens are executed faster than launched; pass_least
# was chosen so that the times between tokens are spread as those of a real server were.
H200_FP8 = replace(
    H200,
    decode=((1, 0.0037), (8, 0.0049), (32, 0.0082), (64, 0.014), (128, 0.026)),
    per_prompt_token=17e-6,
    pass_fixed=0.001,
    pass_least=0.021,
)
# The embedded model.
CPU = Costs(
    decode=((1, 0.00035), (8, 0.0011), (64, 0.006)),
    tokens=1,
    per_prompt_token=25e-6,
    pass_fixed=0.0002,
    plan=0.0002,
    output=40e-6,
    overlaps=False,
)


def ready(
    requests: int, kv_slots: int = 2_000_000, states: int = 370, prompt_tokens: int = 8192
) -> Ready:
    """What the runner of such a server says that it has room for."""
    return Ready(
        max_kv_slots=kv_slots,
        max_state_slots=states,
        max_running_requests=requests,
        context_length=131_072,
        vocab_size=131_072,
        eos_token_ids=[12],
        chunked_prefill_size=prompt_tokens,
    )


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, what: Callable[..., object], *arguments: Any) -> None:
        """No sooner than now; events of one time happen in the order in which they were added."""
        event = (max(when, self.now), next(self._numbers), what, arguments)
        heapq.heappush(self._events, event)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)


class VirtualRunner:
    """Launches plans in order; each request gets the tokens that it asked for."""

    def __init__(self, clock: Clock, costs: Costs, send: Callable[[StepResult], None]) -> None:
        """send: is called with each result, when it leaves this process."""
        self.clock, self.costs, self.send = clock, costs, send
        self.seconds = 0.0  # in which the device executed steps
        self._plans: deque[Plan] = deque()
        self._left: dict[int, int] = {}  # output tokens, by request slot
        self._host_free = self._device_free = 0.0
        self._wakes = False
        self._rng = random.Random(7)

    def take(self, plan: Plan) -> None:
        self._plans.append(plan)
        self._wake()

    def _wake(self) -> None:
        if self._plans and not self._wakes:
            self._wakes = True
            self.clock.at(self._host_free, self._launch)

    def _launch(self) -> None:
        self._wakes = False
        plan, costs, host = self._plans.popleft(), self.costs, self.clock.now
        began = decode_began = ended = max(self._device_free, host)
        if plan.prefill:
            tokens = sum(len(item.token_ids) for item in plan.prefill)
            host += self._launch_of_prompts(plan)
            ended = max(began + self._varied(costs.prompts(tokens)), host)
        if plan.decode is not None:
            host += costs.launch_decode
            decode_began = max(ended, host)
            requests = len(plan.decode.slots)
            ended = decode_began + self._varied(costs.decode_step(requests))
        result = self._answer(plan)
        result.seconds, result.idle_seconds = ended - began, began - self._device_free
        result.decode_seconds = ended - decode_began if plan.decode is not None else 0.0
        self.seconds += result.seconds
        self._device_free, self._host_free = ended, host if costs.overlaps else ended
        self.clock.at(ended, self._done, result)
        self._wake()

    def _launch_of_prompts(self, plan: Plan) -> float:
        costs = self.costs
        seconds = costs.launch_pass + costs.launch_prompt * len(plan.prefill)
        seconds *= 1 + costs.launch_jitter * self._rng.random()
        return seconds + dict(costs.stalls).get(plan.step, 0.0)

    def _varied(self, seconds: float) -> float:
        return seconds * max(0.2, self._rng.gauss(1.0, self.costs.jitter))

    def _done(self, result: StepResult) -> None:
        self.clock.at(self._host_free, self.send, result)

    def _answer(self, plan: Plan) -> StepResult:
        for release in plan.releases:
            del self._left[release.slot]
        result = StepResult(step=plan.step)
        for item in plan.prefill:
            if item.first is not None:
                self._left[item.slot] = item.first.sampling.max_new_tokens
            tokens = self._make(item.slot, 1 if item.is_last else 0)
            result.prefill.append(RequestResult(tokens=tokens))
        for slot in plan.decode.slots if plan.decode is not None else []:
            tokens = self._make(slot, self.costs.tokens)
            result.decode.append(RequestResult(tokens=tokens, nodes=[*range(len(tokens))]))
        return result

    def _make(self, slot: int, most: int) -> list[int]:
        made = min(most, self._left[slot])
        self._left[slot] -= made
        return [TOKEN] * made


class VirtualServer:
    """Scheduler, runner and HTTP server, with what waits between them."""

    def __init__(
        self,
        costs: Costs,
        config: EngineConfig,
        ready: Ready,
        runner: type[VirtualRunner] = VirtualRunner,
    ) -> None:
        """runner: takes these costs."""
        self.costs, self.clock = costs, Clock()
        self.scheduler = Scheduler(config, ready)
        self.runner = runner(self.clock, costs, self._take_result)
        self.listeners: dict[str, Callable[[RequestOutput], None]] = {}
        self._requests: deque[Generate] = deque()
        self._results: deque[StepResult] = deque()
        self._wakes = False
        self._free = self._server_free = 0.0  # when scheduler and server have time

    def ask(
        self, rid: str, prompt: list[int], output: int, listener: Callable[[RequestOutput], None]
    ) -> None:
        """A client sends a request; ``listener`` hears its outputs."""
        self.listeners[rid] = listener
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True, temperature=0.0)
        request = Generate(rid=rid, token_ids=prompt, sampling=sampling)
        self.clock.at(self.clock.now + self.costs.network, self._take_request, request)

    def _take_request(self, request: Generate) -> None:
        self._requests.append(request)
        self._wake()

    def _take_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._wake()

    def _wake(self) -> None:
        if not self._wakes:
            self._wakes = True
            self.clock.at(self._free, self._turn)

    def _turn(self) -> None:
        """As that of scheduler/process.py."""
        self._wakes = False
        now, outputs = self.clock.now, []
        while self._requests:
            outputs += self.scheduler.add(self._requests.popleft())
        now = self._send_plans(now)
        if self._results:
            result = self._results.popleft()
            outputs += self.scheduler.process(result)
            now += self.costs.plan_request * len(result.decode)
            self.clock.at(now, self._tell, outputs)
            now = self._send_plans(now)
        self._free = now
        if self._requests or self._results:
            self._wake()

    def _send_plans(self, now: float) -> float:
        """Returns when they are sent."""
        while (plan := self.scheduler.plan()) is not None:
            requests = len(plan.decode.slots) if plan.decode is not None else 0
            now += self.costs.plan + self.costs.plan_request * requests
            self.clock.at(now, self.runner.take, plan)
        return now

    def _tell(self, outputs: list[RequestOutput]) -> None:
        now = max(self.clock.now, self._server_free)
        for output in outputs:
            now += self.costs.output
            self.clock.at(now, self.listeners[output.rid], output)
        self._server_free = now


class VirtualClient:
    """Sends the next request when the last one is answered."""

    def __init__(
        self,
        server: VirtualServer,
        name: str,
        bodies: Iterator[tuple[Body, list[list[int]]]],
        timings: list[Timing],
    ) -> None:
        self.server, self.name, self.bodies, self.timings = server, name, bodies, timings
        self.sent = 0
        self.stream: Stream
        self.answer: list[list[int]]
        self.send_next()

    def send_next(self) -> None:
        following = next(self.bodies, None)
        if following is None:
            return
        body, self.answer = following
        self.sent += 1
        self.stream, self.prompt = Stream(self.server.clock.now), body["input_ids"]
        output = body["sampling_params"]["max_new_tokens"]
        self.server.ask(f"{self.name} {self.sent}", self.prompt, output, self.hear)

    def hear(self, output: RequestOutput) -> None:
        self.stream.hear(self.server.clock.now, output.token_ids)
        if output.finish is None:
            return
        assert output.finish.kind == "length", output.finish
        self.timings.append(self.stream.timing(output.cached_tokens, len(self.prompt)))
        self.answer.append(self.stream.output)
        self.send_next()


def play(server: VirtualServer, *scenarios: Scenario) -> list[Summary]:
    """All clients of all scenarios at once, until each has its answers. What the clients of each
    scenario saw."""
    began, busy = server.clock.now, server.runner.seconds
    timings: list[list[Timing]] = [[] for _ in scenarios]
    for scenario, found in zip(scenarios, timings):
        for number in range(scenario.clients):
            VirtualClient(server, f"{scenario.name} {number}", scenario.client(number), found)
    server.clock.run()
    server.scheduler.check_integrity()
    seconds, busy = server.clock.now - began, server.runner.seconds - busy
    return [summarize(found, 0, seconds, busy, compiled=0) for found in timings]


def play_arrivals(server: VirtualServer, scenario: Scenario, per_second: float) -> Summary:
    """The scenario's clients come at random times, and send what the scenario has for each of them
    one after the other. What they saw."""
    timings: list[Timing] = []
    rng, when = random.Random(scenario.name), server.clock.now
    for number in range(scenario.clients):
        when += rng.expovariate(per_second)
        name, bodies = f"{scenario.name} {number}", scenario.client(number)
        server.clock.at(when, VirtualClient, server, name, bodies, timings)
    began, busy = server.clock.now, server.runner.seconds
    server.clock.run()
    seconds, busy = server.clock.now - began, server.runner.seconds - busy
    return summarize(timings, 0, seconds, busy, compiled=0)
