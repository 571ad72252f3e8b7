"""A model-runner process: receives plans, executes them in order, sends results.

With --tp-size and --pp-size there are several, the ranks. All get the same plans and execute them
together; one alone sends the results.
"""

from __future__ import annotations

import os
import sys

import zmq

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import FromRunner, ToRunner
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.lifetime import begin, ignore_end_signal
from mamba_eagle.runner.pulse import Pulse
from mamba_eagle.runner.threads import default_threads


def main() -> None:
    # Set before torch is imported: OpenMP threads that spin while they wait take the core that
    # the server process needs (8 s instead of 0.2 s per request, measured on two busy cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config, socket_dir, rank = begin("runner")
    run(config, socket_dir, rank)


def run(config: EngineConfig, socket_dir: str, rank: int = 0) -> None:
    """Loads the model, reports what fits, then executes plans until told to stop."""
    # after the signals are set: torch takes a second
    from mamba_eagle.devices import set_threads
    from mamba_eagle.models.registry import read_model_config
    from mamba_eagle.runner.assemble import START_ERRORS, assemble
    from mamba_eagle.runner.constraints import matchers_for
    from mamba_eagle.runner.ranks import join_ranks
    from mamba_eagle.runner.worker import Worker

    set_threads(config.cpu_threads or default_threads(config.ranks_per_node))
    context = zmq.Context()
    plans: Receiver[ToRunner] = Receiver(context, socket_dir, "to_runner", rank)
    results: Sender[FromRunner] = Sender(context, socket_dir, "from_runner")
    try:
        ranks = join_ranks(config, rank, socket_dir)
        matchers = matchers_for(config, read_model_config(config.model_path))
        if ranks.samples and config.tokenizer_path:
            matchers.prepare()  # a second of Python, which would hold up the first steps
        runner = assemble(config, ranks, matchers)
    except START_ERRORS as error:
        sys.exit(f"error: {error}")
    matchers.wait()
    results.send(runner.ready)
    pulse = Pulse(socket_dir, computes_on_cpu=runner.backend.place.on_host, rank=rank)
    pulse.start()
    Worker(runner, plans, results, pulse, rank).serve()
    ignore_end_signal()  # before pools and sockets are destroyed, as this returns
    runner.close()
    ranks.close()


if __name__ == "__main__":
    main()
