"""What the scheduler answers to questions that are not requests: gauges, sessions, adapters,
prefixes for other servers, pauses, other weights."""

from collections.abc import Callable

from mamba_eagle import message
from mamba_eagle.cache.slot_pools import top_nodes
from mamba_eagle.scheduler.scheduler import Scheduler

RELEASED = "the model's memory is released: resume it first"


class Answers:
    """Some wait until no step is under way, or for the runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Callable[[message.ToServer], None],
        order: Callable[[message.ToRunner], None],
        publish: Callable[[], None],
    ) -> None:
        """reply: to the server process. order: to the runner. publish: called when much of the
        cache has gone."""
        self.scheduler, self._reply, self._order, self._publish = scheduler, reply, order, publish
        self._flushes: list[int] = []  # calls that wait for the last plans to come back
        self._pauses: list[int] = []  # the same
        self._told_runner = False  # of the change of the model that is under way

    @property
    def runner_changes(self) -> bool:
        """Whether the runner knows of a change of the model, and has not answered."""
        return self.scheduler.pauses.change is not None and self._told_runner

    def take(self, asked: message.Asked) -> None:
        scheduler, number = self.scheduler, asked.call_id
        match asked:
            case message.FlushCache():
                self._flushes.append(number)
                self._answer_flushes()
            case message.GetState():
                self._reply(self._state(asked))
            case message.ExportPrefix() | message.ImportPrefix():
                self._move(asked)
            case message.OpenSession():
                problem = scheduler.sessions.open(asked.name, asked.seconds)
                self._reply(message.Done(call_id=number, problem=problem))
            case message.CloseSession():
                self._reply(
                    message.Done(call_id=number, problem=scheduler.sessions.close(asked.name))
                )
            case message.LoadAdapter() | message.AskRanks(task=message.SumWeights()) if (
                scheduler.pauses.without_memory
            ):
                self._reply(message.Done(call_id=number, problem=RELEASED))
            case message.Profile() | message.AskRanks():
                self._order(asked)
            case message.LoadAdapter():
                self._tell(scheduler.adapters.load(asked))
            case message.UnloadAdapter():
                self._tell(scheduler.adapters.unload(asked))
            case message.Pause():
                self._pauses.append(number)
                scheduler.pause(asked.mode)
            case message.Continue():
                scheduler.resume()
                self._answer_pauses()
                self._reply(message.Done(call_id=number))
            case message.ChangeModel():
                self._begin_change(asked)

    def take_from_runner(
        self, answer: message.ProfileReply | message.RankReply | message.Done | message.AdapterRead
    ) -> None:
        if isinstance(answer, message.AdapterRead):
            self._tell(self.scheduler.adapters.read(answer))
            return
        if isinstance(answer, message.Done):
            self.scheduler.pauses.changed(worked=not answer.problem)
        self._reply(answer)

    def answer_waiting(self) -> None:
        """Those whose time has come."""
        self._answer_flushes()
        self._answer_pauses()
        self._go_on_with_change()
        if (exchange := self.scheduler.tiers.exchange) is not None:
            for reply in exchange.take_replies():
                self._reply(reply)

    def _tell(self, answer: message.Done | None) -> None:
        if answer is not None:
            self._reply(answer)

    def _state(self, asked: message.GetState) -> message.StateReply:
        scheduler = self.scheduler
        return message.StateReply(
            call_id=asked.call_id,
            state=scheduler.state(),
            speculation=scheduler.policy.state(),
            cache=scheduler.cache_use(),
            nodes=top_nodes(scheduler.slots.cache.root, asked.max_nodes, asked.max_tokens),
        )

    def _move(self, asked: message.ExportPrefix | message.ImportPrefix) -> None:
        exchange = self.scheduler.tiers.exchange
        if exchange is None:
            problem = "it takes a server with --host-cache-gb and a prefix cache"
            self._reply(message.PrefixMoved(call_id=asked.call_id, problem=problem))
        elif self.scheduler.pauses.without_memory:
            self._reply(message.PrefixMoved(call_id=asked.call_id, problem=RELEASED))
        elif isinstance(asked, message.ExportPrefix):
            exchange.send(asked)
        else:
            exchange.receive(asked)

    def _begin_change(self, asked: message.ChangeModel) -> None:
        if problem := self.scheduler.pauses.problem(asked):
            self._reply(message.Done(call_id=asked.call_id, problem=problem))
        else:
            self._told_runner = False
            self.scheduler.begin_change(asked)

    def _go_on_with_change(self) -> None:
        """The runner changes the model once no slot is held and nothing is cached."""
        change = self.scheduler.pauses.change
        if change is not None and not self._told_runner and self.scheduler.may_change:
            self.scheduler.lose_all()
            self._publish()
            self._told_runner = True
            self._order(change)

    def _answer_pauses(self) -> None:
        """Once no step is under way; or a Continue has ended them before."""
        if self.scheduler.pauses.mode is None or self.scheduler.paused:
            self._answer_all(self._pauses, "")

    def _answer_flushes(self) -> None:
        """Refuses while requests run or wait. Once all have ended, a plan may still be on its way
        back; clients would not call that running, so the answer waits for it."""
        if not self._flushes:
            return
        if self.scheduler.needs_cache:
            state = self.scheduler.state()
            running, waiting = int(state["num_running_reqs"]), int(state["num_queue_reqs"])
            text = f"{running} requests run and {waiting} wait: flush when there are none"
            if self.scheduler.pauses.any:
                text = f"{running} requests are held in place: continue, or pause by another mode"
            self._answer_all(self._flushes, text)
        elif self.scheduler.holds_nothing:
            self.scheduler.flush()
            self._publish()
            self._answer_all(self._flushes, "")

    def _answer_all(self, calls: list[int], problem: str) -> None:
        for number in calls:
            self._reply(message.Done(call_id=number, problem=problem))
        calls.clear()
