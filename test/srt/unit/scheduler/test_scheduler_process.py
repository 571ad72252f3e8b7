"""The scheduler process over its sockets, with the fake runner at the other end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import zmq
from fake_runner import FakeRunner, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import (
    Abort,
    CompileGrammar,
    Done,
    FlushCache,
    Generate,
    GetState,
    GrammarCompiled,
    Plan,
    Ready,
    Shutdown,
    StateReply,
    StopAt,
)
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.lifetime import END_SIGNAL

WAIT_SECONDS = 120.0  # only what hangs takes so long
LONG = SamplingParams(max_new_tokens=300, ignore_eos=True, seed=1)


class Rig:
    """Both neighbours of a scheduler process."""

    def __init__(self, folder, context: zmq.Context) -> None:
        self.runner = FakeRunner(2000, 40, 8, 1000)
        config = EngineConfig(speculative_algorithm="NONE")
        file = folder / "config.json"
        file.write_text(json.dumps(dataclasses.asdict(config)))
        self.to_scheduler = Sender(context, str(folder), "to_scheduler")
        self.from_runner = Sender(context, str(folder), "from_runner")
        self.to_runner = Receiver(context, str(folder), "to_runner")
        self.to_server = Receiver(context, str(folder), "to_server")
        command = [sys.executable, "-m", "mamba_eagle.scheduler.process"]
        command += ["--socket-dir", str(folder), "--config-file", str(file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.from_runner.send(self.runner.ready)
        self.shutdown = False
        self.received: list = []

    def turn(self) -> None:
        """One plan executed, if there is one; what the tokenizer is sent is kept."""
        plan = self.to_runner.receive(timeout_ms=2)
        if isinstance(plan, Plan):
            self.from_runner.send(self.runner.execute(plan))
        if isinstance(plan, CompileGrammar):
            self.from_runner.send(GrammarCompiled(text=plan.text))
        self.shutdown = self.shutdown or isinstance(plan, Shutdown)
        while (item := self.to_server.receive(timeout_ms=0)) is not None:
            self.received += item if isinstance(item, list) else [item]

    def until(self, done, seconds: float = WAIT_SECONDS):
        """Turns until ``done`` holds for something received; returns that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for item in self.received:
                if done(item):
                    return item
            self.turn()
        raise AssertionError(f"not received in {seconds} s; got {self.received[-3:]}")

    def until_end_of(self, rid: str):
        return self.until(lambda item: getattr(item, "rid", "") == rid and item.finish)

    def text(self, rid: str) -> list[int]:
        parts = [item.token_ids for item in self.received if getattr(item, "rid", "") == rid]
        return [token for part in parts for token in part]

    def state(self) -> dict[str, float]:
        self.received.clear()
        self.to_scheduler.send(GetState(call_id=1))
        return self.until(lambda item: isinstance(item, StateReply)).state


@pytest.fixture
def rig(tmp_path):
    context = zmq.Context()
    made = Rig(tmp_path, context)
    yield made
    made.process.kill()
    made.process.wait()
    context.destroy(linger=0)


def test_serves_requests_and_answers_questions(rig):
    ready = rig.until(lambda item: isinstance(item, Ready))
    assert ready.max_kv_slots == 2000
    prompt = list(range(20))
    rig.to_scheduler.send(Generate(rid="a", token_ids=prompt, sampling=LONG))
    rig.to_scheduler.send(FlushCache(call_id=7))
    refusal = rig.until(lambda item: isinstance(item, Done))
    # whether the request has begun by then depends on when the two messages were read
    assert refusal.problem
    assert "0 requests run and 1 wait" in refusal.problem or "1 requests run" in refusal.problem
    rig.until_end_of("a")
    assert rig.text("a") == expected_text(prompt, LONG)

    # The last plan may still be out; a client that has its answer must not be refused.
    rig.to_scheduler.send(FlushCache(call_id=8))
    assert rig.until(lambda item: isinstance(item, Done) and item.call_id == 8).problem == ""
    state = rig.state()
    assert state["num_cached_tokens"] == 0 and state["generation_tokens_total"] == 300

    for rid in ("b", "c"):
        rig.to_scheduler.send(Generate(rid=rid, token_ids=prompt, sampling=LONG))
    rig.until(lambda item: getattr(item, "rid", "") == "c")
    rig.to_scheduler.send(StopAt(rid="b", num_tokens=2, matched="x"))
    rig.to_scheduler.send(Abort(rid="c"))
    assert rig.until_end_of("b").finish.matched == "x"
    assert rig.until_end_of("c").finish.kind == "abort"
    assert rig.state()["num_aborted_requests_total"] == 1

    # the fake runner ignores what the grammar says, but not that it is to be compiled
    constrained = msgspec.structs.replace(LONG, grammar="start: /a/")
    rig.to_scheduler.send(Generate(rid="d", token_ids=prompt, sampling=constrained))
    rig.until_end_of("d")
    assert rig.text("d") == expected_text(prompt, constrained)
    time.sleep(0.1)
    assert rig.process.poll() is None, rig.process.stderr.read()


def test_sleeps_when_there_is_nothing_to_do(rig):
    rig.until(lambda item: isinstance(item, Ready))

    def cpu_seconds() -> float:
        with open(f"/proc/{rig.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def share() -> float:
        before = cpu_seconds()
        time.sleep(0.5)
        return (cpu_seconds() - before) / 0.5

    # A loop without pauses takes all that it can get, each time.
    assert any(share() < 0.2 for _ in range(20))


def test_a_signal_ends_it_quietly_and_the_runner_with_it(rig):
    rig.until(lambda item: isinstance(item, Ready))
    rig.to_scheduler.send(Generate(rid="a", token_ids=[1, 2, 3], sampling=LONG))
    # The server process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        rig.process.send_signal(number)
    rig.until(lambda item: getattr(item, "completion_tokens", 0) > 20)
    rig.process.send_signal(END_SIGNAL)
    deadline = time.monotonic() + WAIT_SECONDS
    while not rig.shutdown and time.monotonic() < deadline:
        rig.turn()
    assert rig.shutdown
    assert rig.process.wait(WAIT_SECONDS) == 0
    assert rig.process.stderr.read() == ""


def test_a_process_whose_parent_went_before_it_began_ends(tmp_path):
    """It would wait for ranks for ever."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(EngineConfig())))
    command = [sys.executable, "-m", "mamba_eagle.scheduler.process", "--parent", str(gone.pid)]
    command += ["--socket-dir", str(tmp_path), "--config-file", str(file)]
    ended = subprocess.run(command, timeout=WAIT_SECONDS, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_child_does_not_outlive_its_parent():
    child = (
        "import time; from mamba_eagle.message.lifetime import die_with_parent;"
        "import os; die_with_parent(os.getppid()); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        while time.monotonic() < deadline:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return  # dead; nobody reaps orphans here
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the child is still there")
