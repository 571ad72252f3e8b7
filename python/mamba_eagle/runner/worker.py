"""The loop of a runner process: messages in, results out; beside it, adapters that are read and
traces that are recorded."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import zmq
from torch import nn

# torch.profiler's own imports torch's compiler first, which takes seconds beside running requests.
from torch.autograd.profiler import profile

from mamba_eagle import message
from mamba_eagle.backend.place import Place
from mamba_eagle.lora.slots import HostAdapter
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.pulse import Pulse
from mamba_eagle.runner.ranks import RanksDiffer
from mamba_eagle.runner.renewal import Renewal
from mamba_eagle.runner.steps.launched import Launched
from mamba_eagle.runner.transfers import Member, Transfers
from mamba_eagle.runner.turns import Begun, PlanTooEarly

log = logging.getLogger("mamba_eagle.runner")


class StepProfiler:
    """At most one trace at a time. It is written after the last step asked for, or when stopped."""

    def __init__(self, place: Place, finish: Callable[[], None]) -> None:
        """place: where steps run. finish: waits until the steps that were launched are done."""
        self.path = ""  # of the latest trace
        self.steps = 0  # that it holds
        self._place, self._finish = place, finish
        self._most = 0
        self._running: profile | None = None

    def answer(self, asked: message.Profile) -> message.ProfileReply:
        """Begins a trace, or with 0 steps ends it."""
        problem = self._start(asked.path, asked.steps) if asked.steps else self._stop()
        return message.ProfileReply(
            call_id=asked.call_id, path=self.path, steps=self.steps, problem=problem
        )

    def launched(self) -> None:
        """Another step was launched; after the last one that was asked for the trace is written."""
        if self._running is not None:
            self.steps += 1
            if self.steps >= self._most:
                self._stop()

    def _start(self, path: str, steps: int) -> str:
        """Why it cannot, or ""."""
        if self._running is not None:
            return f"a trace is being recorded ({self.path}): stop it first (/stop_profile)"
        self.path, self.steps, self._most = path, 0, steps
        self._running = profile(use_device=None if self._place.on_host else "cuda")
        self._running.__enter__()
        return ""

    def _stop(self) -> str:
        """Writes the trace. Why it cannot, or ""; if it was written already, nothing happens."""
        if not self.path:
            return "nothing is being recorded: start it first (/start_profile)"
        running, self._running = self._running, None
        if running is None:
            return ""
        self._finish()
        running.__exit__(None, None, None)
        try:
            running.export_chrome_trace(self.path)
        except (OSError, RuntimeError) as error:
            log.warning("no trace could be written to %s: %s", self.path, error)
            return f"the trace could not be written to {self.path}: {error}"
        return ""


class UnderWay(NamedTuple):
    """Work in a thread beside the steps: a grammar, an adapter, or what a trainer sends."""

    made: Future[Any]
    answer: Callable[[], message.FromRunner]  # called once it is done


# Between two looks at a GPU step, which takes milliseconds and has no file descriptor to wait for.
POLL_SECONDS = 2e-5
# Between two looks at what threads do, while nothing else is done.
BESIDE_MS = 1
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
        self.plans: Receiver[message.ToRunner] = Receiver(context, socket_dir, "to_runner", rank)
        self.results: Sender[message.FromRunner] = Sender(context, socket_dir, "from_runner")
        self.pulse = Pulse(socket_dir, runner.backend.place.on_host, rank)
        self.received: deque[message.ToRunner] = deque()  # and not yet handled
        self.launched: deque[Launched] = deque()
        self.ranks, self.constraints = runner.parts.ranks, runner.constraints
        self.beside: list[UnderWay] = []
        self.reader = ThreadPoolExecutor(1, "adapters")
        self.transfers = Transfers(Member(rank, self.renewal.writes, runner.backend.device))
        self.profiler = StepProfiler(runner.backend.place, finish=self._send_all)
        self._adopt(runner)
        self.results.send(runner.ready)

    def serve(self) -> None:
        """Returns when it receives Shutdown.

        Raises: ConfigError if other weights could not be loaded, when the old ones are gone.
        """
        while not isinstance(asked := self._next(), message.Shutdown):
            if isinstance(asked, message.Profile):
                if self.rank == 0:  # the others' steps are the same
                    self.results.send(self.profiler.answer(asked))
            elif isinstance(asked, message.ChangeModel):
                self._change(asked)
            elif isinstance(asked, message.CompileGrammar):
                self._compile(asked)
            elif isinstance(asked, message.ReadAdapter):
                read = self.reader.submit(self.runner.adapters.read, asked.path)
                self.beside.append(UnderWay(read, partial(self._keep, asked.number, read)))
            elif isinstance(asked, message.DropAdapter):
                self.runner.adapters.drop(asked.number)
            elif isinstance(asked, message.AskRanks):
                made = self.transfers.begin(asked, self.renewal.config, self._modules())
                answer = partial(self.transfers.answer, asked, made)
                self.beside.append(UnderWay(made, answer))
            elif asked is not None:
                self._launch(asked)
            while self.launched and self.launched[0].done:
                self._send_result()
            for each in [each for each in self.beside if each.made.done()]:
                self.beside.remove(each)
                self.results.send(each.answer())

    def close(self) -> None:
        """After ``serve``: the runner leaves the others."""
        self.transfers.close()
        self.renewal.close()

    def _adopt(self, runner: ModelRunner) -> None:
        """It executes the plans from now on."""
        self.runner = runner
        runner.before_waiting = self._send_all

    def _change(self, asked: message.ChangeModel) -> None:
        """Only between steps: the scheduler waits for the answer."""
        self._send_all()
        problem = self.renewal.change(asked, self._let_go)
        if self.renewal.runner is not None:
            self._adopt(self.renewal.runner)
        if self.answers:
            self.results.send(message.Done(call_id=asked.call_id, problem=problem))

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
        del self.runner

    def _compile(self, asked: message.CompileGrammar) -> None:
        if self.ranks.samples:  # earlier stages follow no grammars
            made = self.constraints.matchers.compile(asked.text)
            if self.answers:
                answer = partial(message.GrammarCompiled, text=asked.text)
                self.beside.append(UnderWay(made, answer))

    def _keep(self, number: int, read: Future[HostAdapter]) -> message.AdapterRead:
        problem = ""
        try:
            self.runner.adapters.keep(number, read.result())
        except Exception as error:  # no folder may end what others are served by
            problem = str(error) or type(error).__name__
        return message.AdapterRead(number=number, problem=problem)

    def _next(self) -> message.ToRunner | None:
        """The next message; None if the oldest launched step is done before one comes, if work
        beside the steps may be, or if the next plan's launch can wait for those after it."""
        if not self.received and (asked := self._wait()) is not None:
            self.received.append(asked)
        while self._drafts_ahead and (asked := self.plans.receive(timeout_ms=0)):
            self.received.append(asked)
        if self._can_wait:
            self.runner.look_ahead(self._received_plans)
            time.sleep(POLL_SECONDS)
            return None
        return self.received.popleft() if self.received else None

    @property
    def _drafts_ahead(self) -> bool:
        return self.renewal.runner is not None and self.runner.drafts_ahead

    @property
    def _received_plans(self) -> list[message.Plan]:
        return [each for each in self.received if isinstance(each, message.Plan)]

    @property
    def _can_wait(self) -> bool:
        """Whether nothing is lost if the next plan is launched once those have come whose trees
        earlier stages verify beside it: the device executes another one, and these trees are to
        be drafted before it goes on with the next."""
        expected = self.runner.parts.cohorts if self._drafts_ahead else 0
        if not (self.launched and 0 < len(self.received) < expected):
            return False
        newest, following = self.launched[-1], self.received[0]
        others_work = isinstance(following, message.Plan) and following.after < newest.number
        return others_work and not newest.done

    def _wait(self) -> message.ToRunner | None:
        plans = self.plans
        if not self.launched:
            if self.beside:
                return plans.receive(timeout_ms=BESIDE_MS)
            if self.renewal.runner is None or not self.runner.turns:
                return plans.receive()
            if (plan := plans.receive(timeout_ms=PATIENCE_MS)) is None:
                self.runner.turns.commit()
            return plan
        while (plan := plans.receive(timeout_ms=0)) is None and not self.launched[0].done:
            time.sleep(POLL_SECONDS)
        return plan

    def _launch(self, plan: message.Plan) -> None:
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
