"""The loop of a runner process: messages in, results out."""

import sys
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import zmq
from torch import nn

from mamba_eagle.message import (
    AskRanks,
    ChangeModel,
    CompileGrammar,
    Done,
    DropAdapter,
    FromRunner,
    GrammarCompiled,
    Plan,
    Profile,
    ReadAdapter,
    Shutdown,
    SimulateAcceptance,
    ToRunner,
)
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.runner.adapter_reader import AdapterReader
from mamba_eagle.runner.agreement import RanksDiffer
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.profiler import StepProfiler
from mamba_eagle.runner.pulse import Pulse
from mamba_eagle.runner.renewal import Renewal
from mamba_eagle.runner.steps.launched import Launched
from mamba_eagle.runner.transfers import Member, Transfers
from mamba_eagle.runner.turns import Begun, PlanTooEarly

# Between two looks at a GPU step, which takes milliseconds and has no file descriptor to wait for.
POLL_SECONDS = 2e-5
# Between two looks at grammars and adapters that are made ready, while nothing else is done.
COMPILED_MS = 1
# After that long without a plan an earlier pipeline stage commits what it has begun.
PATIENCE_MS = 100


class Worker:
    """Executes what the scheduler asks for, in order."""

    def __init__(
        self, runner: ModelRunner, context: zmq.Context[Any], socket_dir: str, rank: int = 0
    ) -> None:
        """Reports that the runner is ready. The pulse is not started."""
        self.runner, self.rank = runner, rank
        self.renewal = Renewal(runner)
        self.answers = rank == runner.config.answering_rank
        self.plans: Receiver[ToRunner] = Receiver(context, socket_dir, "to_runner", rank)
        self.results: Sender[FromRunner] = Sender(context, socket_dir, "from_runner")
        self.pulse = Pulse(socket_dir, runner.backend.place.on_host, rank)
        self.received: deque[ToRunner] = deque()  # and not yet handled
        self.launched: deque[Launched] = deque()
        self.constraints = runner.constraints
        self.compiling: dict[int, Future[Any]] = {}  # grammars, in threads beside the steps
        self.reading = AdapterReader(runner.adapters)
        self.transfers = Transfers(Member(rank, self.renewal.writes, runner.backend.device))
        self.profiler = StepProfiler(runner.backend.place, finish=self._send_all)
        self._adopt(runner)
        self.results.send(runner.ready)

    def serve(self) -> None:
        """Returns when it receives Shutdown.

        Raises: ConfigError if other weights could not be loaded, when the old ones are gone.
        """
        while not isinstance(message := self._next(), Shutdown):
            if isinstance(message, SimulateAcceptance):
                self.runner.simulate_accept_length(message.length)
            elif isinstance(message, Profile):
                if self.rank == 0:  # the others' steps are the same
                    self.results.send(self.profiler.answer(message))
            elif isinstance(message, ChangeModel):
                self._change(message)
            elif isinstance(message, CompileGrammar):
                self.compiling[message.number] = self.constraints.compile(message.text)
            elif isinstance(message, ReadAdapter):
                self.reading.begin(message)
            elif isinstance(message, DropAdapter):
                self.runner.adapters.drop(message.number)
            elif isinstance(message, AskRanks):
                self.transfers.begin(message, self.renewal.config, self._modules())
            elif message is not None:
                self._launch(message)
            while self.launched and self.launched[0].done:
                self._send_result()
            for number in [number for number, made in self.compiling.items() if made.done()]:
                del self.compiling[number]
                if self.answers:
                    self.results.send(GrammarCompiled(number=number))
            for read in self.reading.take_done():
                self.results.send(read)
            for reply in self.transfers.take_done():
                self.results.send(reply)

    def close(self) -> None:
        """After ``serve``: the runner leaves the others."""
        self.transfers.close()
        self.renewal.close()

    def _adopt(self, runner: ModelRunner) -> None:
        """It executes the plans from now on."""
        self.runner, self.reading.adapters = runner, runner.adapters
        runner.before_waiting = self._send_all

    def _change(self, asked: ChangeModel) -> None:
        """Only between steps: the scheduler waits for the answer."""
        self._send_all()
        problem = self.renewal.change(asked, self._let_go)
        if self.renewal.runner is not None:
            self._adopt(self.renewal.runner)
        if self.answers:
            self.results.send(Done(call_id=asked.call_id, problem=problem))

    def _modules(self) -> dict[str, nn.Module]:
        """Those with weights, by what stands before the names of these."""
        runner = self.renewal.runner
        if runner is None:
            return {}
        parts = vars(getattr(runner.drafter, "network", runner.drafter)).items()
        heads = {f"drafter.{name}.": part for name, part in parts if isinstance(part, nn.Module)}
        return {
            "": runner.model,
            **{k: head for k, head in heads.items() if head is not runner.model},
        }

    def _let_go(self) -> None:
        del self.runner, self.reading.adapters

    def _next(self) -> ToRunner | None:
        """The next message; None if the oldest launched step is done before one comes, if a
        grammar may be, or if the next plan's launch can wait for those after it."""
        if not self.received and (message := self._wait()) is not None:
            self.received.append(message)
        while self._drafts_ahead and (message := self.plans.receive(timeout_ms=0)):
            self.received.append(message)
        if self._can_wait:
            self.runner.look_ahead(self._received_plans)
            time.sleep(POLL_SECONDS)
            return None
        return self.received.popleft() if self.received else None

    @property
    def _drafts_ahead(self) -> bool:
        return self.renewal.runner is not None and self.runner.drafts_ahead

    @property
    def _received_plans(self) -> list[Plan]:
        return [message for message in self.received if isinstance(message, Plan)]

    @property
    def _can_wait(self) -> bool:
        """Whether nothing is lost if the next plan is launched once those have come whose trees
        earlier stages verify beside it: the device executes another one, and these trees are to
        be drafted before it goes on with the next."""
        expected = self.runner.parts.cohorts if self._drafts_ahead else 0
        if not (self.launched and 0 < len(self.received) < expected):
            return False
        newest, following = self.launched[-1], self.received[0]
        others_work = isinstance(following, Plan) and following.after < newest.number
        return others_work and not newest.done

    def _wait(self) -> ToRunner | None:
        plans = self.plans
        beside = self.compiling or self.transfers
        if self.renewal.runner is None and not beside:
            return plans.receive()
        if not self.launched:
            if beside or self.reading:
                return plans.receive(timeout_ms=COMPILED_MS)
            if not self.runner.turns:
                return plans.receive()
            if (plan := plans.receive(timeout_ms=PATIENCE_MS)) is None:
                self.runner.turns.commit()
            return plan
        while (plan := plans.receive(timeout_ms=0)) is None and not self.launched[0].done:
            time.sleep(POLL_SECONDS)
        return plan

    def _launch(self, plan: Plan) -> None:
        try:
            with self.pulse.launching():
                self.runner.look_ahead([plan, *self._received_plans])
                step = self.runner.launch(plan)
        except (RanksDiffer, PlanTooEarly) as error:
            sys.exit(f"error: {error}")
        if isinstance(step, Begun):
            self.pulse.step_ended()  # no one waits for what this rank finds
        else:
            self.launched.append(step)
        self.profiler.launched()

    def _send_result(self) -> None:
        result = self.launched.popleft().result()
        if self.answers:
            self.results.send(result)
        self.pulse.step_ended()

    def _send_all(self) -> None:
        while self.launched:
            self._send_result()
