"""Which adapters there are, which have a slot on the device, and who waits for one.

    LoadAdapter ─▶ read by all ranks ─▶ by name ─▶ copied to a slot, read by requests ─▶ replaced
                                           └─▶ UnloadAdapter ─▶ its last request ends ─▶ dropped

A slot belongs to its adapter for as long as a request that holds slots reads it; after that, until
another adapter needs it. Since plans are executed in order, a plan may copy an adapter to a slot
whose last request it releases.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from mamba_eagle import message
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_ADAPTERS

NOT_SERVED = "this server loads no adapters: start it with --max-loras N"


@dataclass(eq=False)
class Adapter:
    """One that was read, under a number that no other ever has."""

    number: int
    name: str
    live: int = 0  # requests that have not ended
    holding: int = 0  # those that hold slots, among them ended ones


@dataclass
class Reading:
    """One that ranks read."""

    asked: message.LoadAdapter
    answers: list[str] = field(default_factory=list)  # problems, one for each rank so far


class Adapters:
    """``take_unsent`` is what the runner is to do beside its steps."""

    def __init__(self, num_slots: int, num_ranks: int = 1) -> None:
        self.num_slots, self.num_ranks = num_slots, num_ranks
        self._by_name: dict[str, Adapter] = {}
        self._reading: dict[int, Reading] = {}  # by number
        self._num_loaded = 0
        self._in_slot: OrderedDict[int, Adapter] = OrderedDict()  # the one used last comes last
        self._unsent: list[message.ReadAdapter | message.DropAdapter] = []

    # ── loading ──

    def load(self, asked: message.LoadAdapter) -> message.Done | None:
        """None: the answer comes from ``read``."""
        problem = ""
        if not self.num_slots:
            problem = NOT_SERVED
        elif any(each.asked.name == asked.name for each in self._reading.values()):
            problem = f"{shown(asked.name)} is being loaded: wait for the answer"
        elif asked.name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
            problem = f"{MAX_ADAPTERS} adapters are loaded: unload one first"
        if problem:
            return message.Done(call_id=asked.call_id, problem=problem)
        self._num_loaded += 1
        self._reading[self._num_loaded] = Reading(asked)
        self._unsent.append(message.ReadAdapter(number=self._num_loaded, path=asked.path))
        return None

    def read(self, answer: message.AdapterRead) -> message.Done | None:
        """The answer to a client, once all ranks have read it."""
        reading = self._reading[answer.number]
        reading.answers.append(answer.problem)
        if len(reading.answers) < self.num_ranks:
            return None
        del self._reading[answer.number]
        problem = next(filter(None, reading.answers), "")
        if problem:
            self._unsent.append(message.DropAdapter(number=answer.number))
        else:
            name = reading.asked.name
            self._forget(self._by_name.pop(name, None))
            self._by_name[name] = Adapter(answer.number, name)
        return message.Done(call_id=reading.asked.call_id, problem=problem)

    def unload(self, asked: message.UnloadAdapter) -> message.Done:
        adapter = self._by_name.pop(asked.name, None)
        self._forget(adapter)
        problem = "" if adapter else f"no adapter {shown(asked.name)} is loaded"
        return message.Done(call_id=asked.call_id, problem=problem)

    def _forget(self, adapter: Adapter | None) -> None:
        """It has no name any more; its requests go on."""
        if adapter is not None and not adapter.live:
            self._unsent.append(message.DropAdapter(number=adapter.number))

    def take_unsent(self) -> list[message.ReadAdapter | message.DropAdapter]:
        """What the runner has to read and to forget, once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    # ── requests ──

    def of(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def begin(self, adapter: Adapter | None) -> None:
        """A request has come."""
        if adapter is not None:
            adapter.live += 1

    def end(self, adapter: Adapter | None) -> None:
        """It has ended; it may still hold slots."""
        if adapter is not None:
            adapter.live -= 1
            if self._by_name.get(adapter.name) is not adapter:
                self._forget(adapter)

    def has_room(self, adapter: Adapter) -> bool:
        """Whether it has a slot, or could have one now."""
        held = self._in_slot.values()
        return len(held) < self.num_slots or any(
            each is adapter or not each.holding for each in held
        )

    def enter(self, adapter: Adapter | None) -> list[message.AdapterCopy]:
        """A request of it is admitted, for which there is room: what has to be copied."""
        if adapter is None:
            return []
        adapter.holding += 1
        slot, copies = self.slot_of(adapter), []
        if slot < 0:
            slot = len(self._in_slot)
            if slot == self.num_slots:
                slot = next(slot for slot, each in self._in_slot.items() if not each.holding)
            self._in_slot[slot] = adapter
            copies = [message.AdapterCopy(slot, adapter.number)]
        self._in_slot.move_to_end(slot)
        return copies

    def slot_of(self, adapter: Adapter | None) -> int:
        """-1: none."""
        return next((slot for slot, each in self._in_slot.items() if each is adapter), -1)

    def leave(self, adapter: Adapter | None) -> None:
        """It holds slots no longer."""
        if adapter is not None:
            adapter.holding -= 1

    def empty_slots(self) -> None:
        """The device has lost what is in them. No request holds one."""
        self._in_slot.clear()

    @property
    def are_read(self) -> bool:
        """Whether the runner is reading none."""
        unsent = sum(isinstance(each, message.ReadAdapter) for each in self._unsent)
        return len(self._reading) == unsent

    def check_integrity(self, holding: int) -> None:
        """Raises: RuntimeError with numbers, unless slots know of as many requests as hold slots
        and have an adapter."""
        counted = sum(each.holding for each in self._in_slot.values())
        if counted != holding:
            raise RuntimeError(
                f"slots of adapters have {counted} requests, and {holding} hold slots"
            )
