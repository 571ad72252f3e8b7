"""The model-runner process: receives plans, executes them in order, sends results."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import FromRunner, Plan, Shutdown, ToRunner
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.lifetime import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--config-file", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group; the launcher decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent()
    # before torch is imported: OpenMP threads that spin while they wait take the core that the
    # tokenizer needs (8 s instead of 0.2 s for a request, measured on two busy cores)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config = msgspec.json.decode(Path(arguments.config_file).read_bytes(), type=EngineConfig)
    run(config, arguments.socket_dir)
    # told to stop by a message: a signal on top of it must not interrupt the interpreter's exit
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run(config: EngineConfig, socket_dir: str) -> None:
    """Load the model, report what fits, then serve plans until told to stop."""
    import torch  # after the signals are set: it takes a second

    from mamba_eagle.runner.model_runner import START_ERRORS, ModelRunner

    logging.basicConfig(
        level=config.log_level.upper(),
        format="[%(asctime)s runner] %(levelname)s: %(message)s",
    )
    torch.set_num_threads(config.cpu_threads or default_threads())
    context = zmq.Context()
    plans: Receiver[ToRunner] = Receiver(context, socket_dir, "to_runner")
    results: Sender[FromRunner] = Sender(context, socket_dir, "from_runner")
    try:
        runner = ModelRunner(config)
    except START_ERRORS as error:
        sys.exit(f"error: {error}")
    results.send(runner.ready)
    while True:
        plan = plans.receive()
        if isinstance(plan, Shutdown):
            return
        assert isinstance(plan, Plan)
        results.send(runner.execute(plan))


def default_threads() -> int:
    """All cores but one: the tokenizer and the scheduler need theirs."""
    return max(1, (os.cpu_count() or 1) - 1)


def _leave(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
