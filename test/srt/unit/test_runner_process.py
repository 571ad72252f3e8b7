"""The end of the runner process, whatever signals come with it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import Plan, RunnerReady, Shutdown
from mamba_eagle.message.channel import Receiver, Sender

# The runner as it is, with a model to which END_SIGNAL comes at a chosen moment.
CHILD = """
import os, signal, sys, types
import mamba_eagle.runner.model_runner as model_runner
from mamba_eagle.message import RunnerReady
from mamba_eagle.message.lifetime import END_SIGNAL
from mamba_eagle.runner.process import main

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)  # is ignored
    os.kill(os.getpid(), END_SIGNAL)

class Runner:
    backend = types.SimpleNamespace(place=types.SimpleNamespace(on_host=True))
    constraints = types.SimpleNamespace(prepare=lambda: None)

    def __init__(self, config, group, stages):
        self.ready = RunnerReady(
            max_kv_slots=1, max_state_slots=1, max_running_requests=1, context_length=1,
            vocab_size=1, eos_token_ids=[], pid=os.getpid(), details={},
        )
    MOMENT = terminate

model_runner.ModelRunner = Runner
main()
"""
WAIT_SECONDS = 30


@pytest.mark.parametrize(
    "moment", ["__del__", "launch"], ids=["told-to-stop-and-signalled", "signalled-at-work"]
)
def test_a_runner_that_is_told_to_stop_says_nothing(moment: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(EngineConfig(cpu_threads=1))))
    context = zmq.Context()
    plans = Sender(context, str(tmp_path), "to_runner")
    results = Receiver(context, str(tmp_path), "from_runner")
    command = [sys.executable, "-c", CHILD.replace("MOMENT", moment)]
    command += ["--socket-dir", str(tmp_path), "--config-file", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert isinstance(results.receive(timeout_ms=WAIT_SECONDS * 1000), RunnerReady)
        plans.send(Shutdown() if moment == "__del__" else Plan(step=1))
        assert process.communicate(timeout=WAIT_SECONDS)[1] == ""
        assert process.returncode == 0
    finally:
        process.kill()
        context.destroy(linger=0)
