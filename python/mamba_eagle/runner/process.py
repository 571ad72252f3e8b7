"""A model-runner process: receives plans, executes them in order, sends results.

With --tp-size and --pp-size there are several, the ranks. All get the same plans and execute them
together; one alone sends the results.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import (
    FromRunner,
    Plan,
    Profile,
    Shutdown,
    SimulateAcceptance,
    ToRunner,
)
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.lifetime import begin, ignore_end_signal
from mamba_eagle.runner.pulse import Pulse
from mamba_eagle.runner.threads import default_threads

if TYPE_CHECKING:  # it imports torch
    from mamba_eagle.runner.steps.launched import Launched

# Between two looks at a GPU step, which takes milliseconds and has no file descriptor to wait for.
POLL_SECONDS = 2e-5


def main() -> None:
    # Set before torch is imported: OpenMP threads that spin while they wait take the core that
    # the server process needs (8 s instead of 0.2 s per request, measured on two busy cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config, socket_dir, rank = begin("runner")
    run(config, socket_dir, rank)


def run(config: EngineConfig, socket_dir: str, rank: int = 0) -> None:
    """Loads the model, reports what fits, then executes plans until told to stop."""
    # after the signals are set: torch takes a second
    from mamba_eagle.kernels.threads import set_threads
    from mamba_eagle.runner.agreement import RanksDiffer
    from mamba_eagle.runner.model_runner import START_ERRORS, ModelRunner
    from mamba_eagle.runner.profiler import StepProfiler
    from mamba_eagle.runner.ranks import join_ranks
    from mamba_eagle.runner.turns import Begun, PlanTooEarly

    set_threads(config.cpu_threads or default_threads(config.ranks_per_node))
    context = zmq.Context()
    plans: Receiver[ToRunner] = Receiver(context, socket_dir, "to_runner", rank)
    results: Sender[FromRunner] = Sender(context, socket_dir, "from_runner")
    try:
        ranks = join_ranks(config, rank, socket_dir)
        runner = ModelRunner(config, *ranks)
    except START_ERRORS as error:
        sys.exit(f"error: {error}")
    results.send(runner.ready)
    pulse = Pulse(socket_dir, computes_on_cpu=runner.backend.place.on_host, rank=rank)
    pulse.start()
    launched: deque[Launched] = deque()
    received: deque[ToRunner] = deque()  # and not yet handled

    def send_result() -> None:
        result = launched.popleft().result()
        if rank == config.answering_rank:
            results.send(result)
        pulse.step_ended()

    def send_all() -> None:
        while launched:
            send_result()

    profiler = StepProfiler(finish=send_all)
    runner.before_waiting = send_all
    runner.constraints.prepare()
    while True:
        if not received and (message := next_plan(plans, launched)) is not None:
            received.append(message)
        while runner.drafts_ahead and (message := plans.receive(timeout_ms=0)) is not None:
            received.append(message)
        plan = None
        if received:
            try:
                runner.look_ahead([each for each in received if isinstance(each, Plan)])
            except PlanTooEarly as error:
                sys.exit(f"error: {error}")
            plan = received.popleft()
        if isinstance(plan, Shutdown):
            ignore_end_signal()  # before pools and sockets are destroyed, as this returns
            runner.close()
            ranks.close()
            return
        if isinstance(plan, SimulateAcceptance):
            runner.simulate_accept_length(plan.length)
        elif isinstance(plan, Profile):
            if rank == 0:  # the others' steps are the same
                results.send(profiler.answer(plan))
        elif plan is not None:
            try:
                with pulse.launching():
                    step = runner.launch(plan)
            except (RanksDiffer, PlanTooEarly) as error:
                sys.exit(f"error: {error}")
            if isinstance(step, Begun):
                pulse.step_ended()  # nobody waits for what this rank finds
            else:
                launched.append(step)
            profiler.launched()
        while launched and launched[0].done:
            send_result()


def next_plan(plans: Receiver[ToRunner], launched: Sequence[Launched]) -> ToRunner | None:
    """The next message; None if the oldest launched step is done before one comes."""
    if not launched:
        return plans.receive()
    while (plan := plans.receive(timeout_ms=0)) is None and not launched[0].done:
        time.sleep(POLL_SECONDS)
    return plan


if __name__ == "__main__":
    main()
