"""The runner process: what it does when nothing comes, and its end, whatever signals it gets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import zmq

from mamba_eagle.config import EngineConfig
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.message import (
    FromRunner,
    Plan,
    Profile,
    ProfileReply,
    Ready,
    Shutdown,
    StepResult,
    ToRunner,
)
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.runner.worker import PATIENCE_MS, Worker

# The runner as it is, with a model to which END_SIGNAL comes at a chosen moment.
CHILD = """
import os, signal, sys, types
import mamba_eagle.runner.assemble as assemble
from mamba_eagle.message import Ready, StepResult
from mamba_eagle.message.lifetime import END_SIGNAL
from mamba_eagle.runner.process import main

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)  # is ignored
    os.kill(os.getpid(), END_SIGNAL)

class Runner:
    backend = types.SimpleNamespace(place=types.SimpleNamespace(on_host=True), device=None)
    parts = types.SimpleNamespace(ranks=types.SimpleNamespace(number=0))
    constraints = adapters = None
    drafts_ahead, turns = False, ()
    close = lambda self: None
    look_ahead = lambda self, plans: None

    def __init__(self, config, ranks, matchers):
        self.config, self.matchers = config, matchers

    @property
    def ready(self):
        return Ready(
            max_kv_slots=1, max_state_slots=1, max_running_requests=1, context_length=1,
            vocab_size=1, eos_token_ids=[],
            details={"has_vocabulary": int(self.matchers._vocabulary is not None)},
        )
    MOMENT

assemble.assemble = Runner
main()
"""
WAIT_SECONDS = 120  # only what hangs takes so long


STEP = """def launch(self, plan):
        import torch
        torch.ones(2, 2) @ torch.ones(2, 2)
        result = StepResult(step=plan.step)
        return types.SimpleNamespace(done=True, result=lambda: result)"""


class Child(NamedTuple):
    ready: Ready
    process: subprocess.Popen[str]
    plans: Sender[ToRunner]
    results: Receiver[FromRunner]

    def next(self) -> FromRunner | None:
        return self.results.receive(timeout_ms=WAIT_SECONDS * 1000)


@contextlib.contextmanager
def running(code: str, tmp_path: Path, tokenizer_path: str = "") -> Iterator[Child]:
    """A runner that is ready."""
    file = tmp_path / "config.json"
    folder = str(EMBEDDED_MODEL)
    config = EngineConfig(model_path=folder, tokenizer_path=tokenizer_path, cpu_threads=1)
    file.write_text(json.dumps(dataclasses.asdict(config)))
    context = zmq.Context()
    plans: Sender[ToRunner] = Sender(context, str(tmp_path), "to_runner")
    results: Receiver[FromRunner] = Receiver(context, str(tmp_path), "from_runner")
    command = [sys.executable, "-c", code]
    command += ["--socket-dir", str(tmp_path), "--config-file", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        ready = results.receive(timeout_ms=WAIT_SECONDS * 1000)
        assert isinstance(ready, Ready)
        yield Child(ready, process, plans, results)
    finally:
        process.kill()
        context.destroy(linger=0)


def test_a_runner_that_is_ready_has_the_vocabulary_of_grammars(tmp_path: Path) -> None:
    """If the server has a tokenizer at all: reading it would hold up the first steps."""
    for path in (str(EMBEDDED_MODEL), ""):
        with running(CHILD.replace("MOMENT", STEP), tmp_path, path) as child:
            assert child.ready.details["has_vocabulary"] == bool(path)


@pytest.mark.parametrize(
    "moment", ["__del__", "launch"], ids=["told-to-stop-and-signalled", "signalled-at-work"]
)
def test_a_runner_that_is_told_to_stop_says_nothing(moment: str, tmp_path: Path) -> None:
    with running(CHILD.replace("MOMENT", f"{moment} = terminate"), tmp_path) as child:
        child.plans.send(Shutdown() if moment == "__del__" else Plan(step=1))
        assert child.process.communicate(timeout=WAIT_SECONDS)[1] == ""
        assert child.process.returncode == 0


def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running(CHILD.replace("MOMENT", STEP), tmp_path) as child:

        def ask(number: int, steps: int) -> ProfileReply:
            child.plans.send(Profile(call_id=number, path=str(path) if steps else "", steps=steps))
            reply = child.next()
            assert isinstance(reply, ProfileReply) and reply.call_id == number
            return reply

        def step(number: int) -> None:
            child.plans.send(Plan(step=number))
            result = child.next()
            assert isinstance(result, StepResult) and result.step == number

        assert "start it first" in ask(1, 0).problem
        assert ask(2, 2) == ProfileReply(call_id=2, path=str(path))
        assert "stop it first" in ask(3, 2).problem
        step(1)
        step(2)
        step(3)  # is too many
        ended = ask(4, 0)
        assert (ended.path, ended.steps, ended.problem) == (str(path), 2, "")
        events = json.loads(path.read_text())["traceEvents"]
        assert [event["name"] for event in events].count("aten::matmul") == 2
        assert ask(5, 9).problem == ""
        step(4)
        assert ask(6, 0).steps == 1  # ended before it was full


PROFILED = """
import sys, types
import mamba_eagle.runner.start
from mamba_eagle.message import Profile
from mamba_eagle.runner.worker import StepProfiler
assert "numba" not in sys.modules  # a GPU does without
before = set(sys.modules)
profiler = StepProfiler(types.SimpleNamespace(on_host=True), finish=lambda: None)
assert profiler.answer(Profile(call_id=1, path=sys.argv[1], steps=1)).problem == ""
profiler.launched()
loaded = [name for name in set(sys.modules) - before if name.startswith("torch.")]
assert not loaded, loaded
"""


def test_neither_a_start_nor_a_trace_loads_what_takes_long(tmp_path: Path) -> None:
    """torch.profiler would import torch's compiler: seconds in which no step is made."""
    command = [sys.executable, "-c", PROFILED, str(tmp_path / "trace.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trace.json").exists()


def worker_of(tmp_path: Path, receive: Callable[..., ToRunner | None], **members: Any) -> Worker:
    """A worker that answers to nobody, of a runner with these members."""
    runner: Any = SimpleNamespace(
        constraints=None,
        adapters=None,
        backend=SimpleNamespace(place=SimpleNamespace(on_host=True), device=None),
        parts=SimpleNamespace(ranks=SimpleNamespace(number=0), cohorts=2),
        config=SimpleNamespace(answering_rank=1, ranks_per_node=1),
        ready=None,
        **members,
    )
    context = zmq.Context()
    worker = Worker(runner, context, str(tmp_path))
    context.destroy(linger=0)
    plans: Any = SimpleNamespace(receive=receive)
    worker.plans = plans
    return worker


def test_a_stage_that_hears_nothing_commits_what_is_open(tmp_path: Path) -> None:
    """So that an idle server holds no message back."""
    committed: list[bool] = []
    heard: list[int] = []

    class Turns:
        commit = staticmethod(lambda: committed.append(True))

        def __len__(self) -> int:
            return 1 - len(committed)

    def receive(timeout_ms: int = -1) -> Shutdown | None:
        heard.append(timeout_ms)
        return Shutdown() if committed else None

    worker_of(tmp_path, receive, turns=Turns(), drafts_ahead=False).serve()
    assert committed == [True] and heard == [PATIENCE_MS, -1]


@pytest.mark.parametrize("busy", [True, False], ids=["device-at-work", "device-idle"])
def test_trees_are_drafted_before_the_last_stage_verifies_others(
    busy: bool, tmp_path: Path
) -> None:
    """Earlier stages verify these meanwhile. An idle device is not kept waiting."""
    done: list[str] = []
    steps: dict[int, SimpleNamespace] = {}
    come: deque[ToRunner | None] = deque([Plan(step=1), None, Plan(step=2, after=0), *[None] * 3])
    come += [Plan(step=3, after=1), *[None] * 3, Plan(step=4, after=3), *[None] * 3, Shutdown()]

    def receive(timeout_ms: int = -1) -> ToRunner | None:
        for step in steps.values():
            step.done = step.done or len(come) < 2
        return come.popleft() if come else None

    def launch(plan: Plan) -> SimpleNamespace:
        done.append(f"launch {plan.step}")
        steps[plan.step] = SimpleNamespace(
            number=plan.step, done=not busy, result=lambda: StepResult(step=plan.step)
        )
        return steps[plan.step]

    def look_ahead(upcoming: Sequence[Plan]) -> None:
        drafts = [f"draft {plan.step}" for plan in upcoming]
        done.extend(draft for draft in drafts if draft not in done)

    members = {"drafts_ahead": True, "turns": (), "launch": launch, "look_ahead": look_ahead}
    worker_of(tmp_path, receive, **members).serve()
    late = ["draft 3", "launch 2"] if busy else ["launch 2", "draft 3"]
    begun = ["draft 1", "launch 1", "draft 2", *late]
    assert done[: len(begun)] == begun
    assert [each for each in done if "launch" in each] == [f"launch {n}" for n in range(1, 5)]
