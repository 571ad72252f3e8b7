"""Adapters of random numbers, for measurements of what adapters cost."""

import torch

from mamba_eagle.lora.peft import Pair
from mamba_eagle.lora.slots import AdapterSlots, HostAdapter
from mamba_eagle.message import AdapterRead, LoadAdapter, ReadAdapter
from mamba_eagle.scheduler.adapters import Adapters

SMALL = 1e-3  # so that states stay finite


class DummyAdapters:
    """The same numbers under several names, of the highest rank, for every matrix."""

    def __init__(self, count: int, slots: AdapterSlots) -> None:
        self.names, self.slots = [f"dummy-{i}" for i in range(count)], slots
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).mul_(SMALL).to(slots.dtype)

        pairs = {}
        for name, matrix in slots.additions.items():
            down = random(slots.max_rank, matrix.size.inputs)
            pairs[name] = Pair(down, random(matrix.size.outputs, slots.max_rank))
        self.adapter = HostAdapter(pairs)

    def load(self, adapters: Adapters) -> list[str]:
        """Into a scheduler that has none; returns their names."""
        for name in self.names:
            adapters.load(LoadAdapter(call_id=0, name=name, path=name))
        for asked in adapters.take_unsent():
            assert isinstance(asked, ReadAdapter)
            self.slots.keep(asked.number, self.adapter)
            adapters.read(AdapterRead(number=asked.number))
        return self.names
