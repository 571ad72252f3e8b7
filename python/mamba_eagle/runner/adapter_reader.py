"""Adapters that the scheduler has asked for and that a thread reads beside the steps."""

from concurrent.futures import Future, ThreadPoolExecutor

from mamba_eagle.lora.peft import AdapterError
from mamba_eagle.lora.slots import AdapterSlots, HostAdapter
from mamba_eagle.message import AdapterRead, ReadAdapter


class AdapterReader:
    """What is being read; true as long as anything is."""

    def __init__(self, adapters: AdapterSlots) -> None:
        self.adapters = adapters
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._made: dict[int, Future[HostAdapter]] = {}  # by number

    def __bool__(self) -> bool:
        return bool(self._made)

    def begin(self, asked: ReadAdapter) -> None:
        self._made[asked.number] = self._thread.submit(self.adapters.read, asked.path)

    def take_done(self) -> list[AdapterRead]:
        """The answers that are due; what was read is kept."""
        answers = []
        for number in [number for number, made in self._made.items() if made.done()]:
            problem = ""
            try:
                self.adapters.keep(number, self._made.pop(number).result())
            except (AdapterError, OSError, MemoryError) as error:
                problem = str(error) or type(error).__name__
            answers.append(AdapterRead(number=number, problem=problem))
        return answers
