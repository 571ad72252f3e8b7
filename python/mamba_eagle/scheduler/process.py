"""The scheduler process: sockets around the ``Scheduler``."""

import contextlib
import logging
import math
import sys
import time
from typing import Any

import zmq

from mamba_eagle import message
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.events_config import read_events_config
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.lifetime import begin, end_in_order, ignore_end_signal
from mamba_eagle.message.link import Guard, read_link
from mamba_eagle.scheduler.answers import Answers
from mamba_eagle.scheduler.events import EventPublisher
from mamba_eagle.scheduler.grammars import GrammarQueue
from mamba_eagle.scheduler.scheduler import Scheduler

log = logging.getLogger("mamba_eagle.scheduler")
CHECK_SECONDS = 1.0  # minimum time between two integrity checks
MAX_CHECKED = 8192  # nodes of the prefix cache: a check of more makes a new request wait
RECEIVE_SECONDS = 0.005  # for what has come from the server, before runners get the next plan
GOODBYE_MS = 500  # time for Shutdown to reach the runner


class SchedulerProcess:
    """Three kinds of events: requests, room for a plan, results."""

    def __init__(self, config: EngineConfig, context: zmq.Context[Any], socket_dir: str) -> None:
        self.requests: Receiver[message.ToScheduler] = Receiver(context, socket_dir, "to_scheduler")
        self.outputs: Sender[message.ToServer] = Sender(context, socket_dir, "to_server")
        self.heartbeats: Sender[message.ToWatchdog] = Sender(context, socket_dir, "to_watchdog")
        self.config = config
        self.scheduler: Scheduler
        self.answers: Answers
        self.grammars: GrammarQueue
        self.events: EventPublisher | None = None
        self.changed = False  # since the last integrity check
        self.checked_at = 0.0
        self.next_beat = 0.0
        self.poller = zmq.Poller()
        self.poller.register(self.requests.socket, zmq.POLLIN)
        # plans go to all ranks, results come from one
        ranks = range(config.num_ranks)
        self.plans: Sender[message.ToRunner] = Sender(context, socket_dir, "to_runner", ranks)
        self.results: Receiver[message.FromRunner] = Receiver(context, socket_dir, "from_runner")
        self.poller.register(self.results.socket, zmq.POLLIN)

    def start(self) -> None:
        """Waits for all ranks of the runner and tells the server process what there is room for,
        which is the same on all of them."""
        found: dict[int, message.Ready] = {}
        while len(found) < self.config.num_ranks:
            answer = self.results.receive()
            assert isinstance(answer, message.Ready)
            found[answer.rank] = answer
        ready = found[self.config.answering_rank]
        self.scheduler = Scheduler(self.config, ready)
        self.grammars = self.scheduler.prefill.grammars = GrammarQueue()
        send = (self.outputs.send, self.plans.send)
        self.answers = Answers(self.scheduler, *send, self.publish)
        events, slots = read_events_config(self.config.kv_events_config), self.scheduler.slots
        if events is not None and slots.stores:
            self.events = EventPublisher(events, slots.cache)
        self.load_first_adapters()
        self.outputs.send(ready)

    def load_first_adapters(self) -> None:
        """Raises: ConfigError with all that cannot be served of --lora-modules."""
        adapters, wrong = self.scheduler.adapters, []
        for name, path in self.config.first_adapters.items():
            adapters.load(message.LoadAdapter(call_id=0, name=name, path=path))
            self.send_unsent()
            reply = None
            while reply is None:
                answer = self.results.receive()
                assert isinstance(answer, message.AdapterRead)
                reply = adapters.read(answer)
            if reply.problem:
                wrong.append(f"--lora-modules {name}: {reply.problem}")
        if wrong:
            raise ConfigError(wrong)

    def turn(self) -> None:
        self.wait()
        self.beat()
        self.receive_requests()
        self.send_plans()
        self.receive_results()  # last: the runner is busy with the plan just sent
        self.send_plans()
        self.when_idle()

    def wait(self) -> None:
        """Sleeps until a message comes or the next heartbeat is due."""
        seconds = max(0.0, self.next_beat - time.monotonic())
        self.poller.poll(math.ceil(seconds * 1000))

    def beat(self) -> None:
        """Tells the watchdog that this loop still turns, and what there is to do."""
        now = time.monotonic()
        if now >= self.next_beat:
            self.next_beat = now + message.BEAT_SECONDS
            busy = self.scheduler.busy and not self.scheduler.pauses.any
            steps = self.scheduler.stats.num_steps
            self.heartbeats.send(message.Heartbeat(role="scheduler", busy=busy, steps=steps))

    def receive_requests(self) -> None:
        outputs = self.scheduler.expire(time.time())
        until = time.monotonic() + RECEIVE_SECONDS
        while (asked := self.requests.receive(timeout_ms=0)) is not None:
            self.changed = True
            match asked:
                case message.Generate():
                    outputs += self.scheduler.add(asked)
                case message.Abort():
                    outputs += self.scheduler.abort(asked.rid)
                case message.StopAt():
                    outputs += self.scheduler.stop_at(asked.rid, asked.num_tokens, asked.matched)
                case _:
                    self.answers.take(asked)
            if time.monotonic() >= until:
                break  # the rest in the next turn
        self.send_outputs(outputs)

    def send_plans(self) -> None:
        while (plan := self.scheduler.plan()) is not None:
            self.plans.send(plan)
            self.publish()
        self.send_unsent()

    def send_unsent(self) -> None:
        """What the runner is to do beside its steps."""
        for grammar in self.grammars.take_unsent():
            self.plans.send(grammar)
        if not (self.answers.runner_changes or self.scheduler.pauses.released):  # else no slots
            for asked in self.scheduler.adapters.take_unsent():
                self.plans.send(asked)

    def receive_results(self) -> None:
        result = self.results.receive(timeout_ms=0)
        if isinstance(result, message.StepResult):
            self.send_outputs(self.scheduler.process(result))
        elif isinstance(result, message.GrammarCompiled):
            self.grammars.compiled(result.text)
        elif result is not None:
            assert not isinstance(result, message.Ready)
            self.answers.take_from_runner(result)

    def send_outputs(self, outputs: list[message.RequestOutput]) -> None:
        if outputs:
            self.outputs.send(outputs)

    def when_idle(self) -> None:
        self.answers.answer_waiting()
        now = time.monotonic()
        if self.changed and self.scheduler.idle and now - self.checked_at >= CHECK_SECONDS:
            if self.scheduler.num_nodes <= MAX_CHECKED:
                self.scheduler.check_integrity()
            self.changed = False
            self.checked_at = now

    def publish(self) -> None:
        if self.events is not None:
            self.events.publish()

    def close(self) -> None:
        """Tells the runner to end as well."""
        if self.events is not None:
            self.events.close()
        self.plans.linger(GOODBYE_MS)
        with contextlib.suppress(zmq.Again):  # a rank of another machine that is gone
            self.plans.send(message.Shutdown())
        pipes: Any = (self.requests, self.results, self.plans, self.outputs, self.heartbeats)
        for pipe in pipes:
            pipe.close()


def main() -> None:
    config, socket_dir, _ = begin("scheduler")
    end_in_order()
    context = zmq.Context()
    link = read_link(socket_dir)
    guard = Guard(context, link.peer) if link else None
    try:
        process = SchedulerProcess(config, context, socket_dir)
    except zmq.ZMQError as error:
        sys.exit(f"error: cannot listen for ranks of other nodes: {error}")
    try:
        try:
            process.start()
        except ConfigError as error:
            sys.exit(f"error: {error}")
        while True:  # until a signal ends the process
            process.turn()
    finally:
        ignore_end_signal()
        process.close()
        if guard is not None:
            guard.stop()
        context.term()


if __name__ == "__main__":
    main()
