"""The experts that a mixture's routers have chosen, for requests that ask for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.place import Place
from mamba_eagle.layers.moe import Router
from mamba_eagle.models.base import CausalLM

MOST_TOKENS = 16_384  # of a pass, at least: rehearsals of kernels take that many


class Routing:
    """Routers leave the experts of a pass's tokens in tables of their own; captured steps, too.

    kept: whether any request may ask. tokens: the most of a pass.
    """

    def __init__(self, model: CausalLM, kept: bool, tokens: int, place: Place) -> None:
        self.kept, self.place = kept, place
        self._asking: set[int] = set()  # request slots
        self._seen: list[Tensor | None] = []  # by layer: [tokens, k] int32
        for layer in model.parts.layers if kept else ():
            router = next((part for part in layer.modules() if isinstance(part, Router)), None)
            if router is not None:
                router.watch("model", max(tokens, MOST_TOKENS), seed=0)
            self._seen.append(None if router is None else router.seen)

    def admit(self, slot: int, asks: bool) -> None:
        if asks:
            self._asking.add(slot)

    def release(self, slots: Sequence[int]) -> None:
        self._asking.difference_update(slots)

    def of(self, rows: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """rows: the slots and numbers of tokens of the target's latest pass. Experts of those who
        ask, by index in ``rows``: [tokens, layers, k] int32, on their way to the host; zeros for
        layers without experts."""
        if all(slot not in self._asking for slot, _ in rows):
            return {}
        total = sum(count for _, count in rows)
        none = torch.zeros_like(next(seen for seen in self._seen if seen is not None)[:total])
        each = [none if seen is None else seen[:total] for seen in self._seen]
        parts = self.place.to_host(torch.stack(each, dim=1)).split([count for _, count in rows])
        return {i: part for i, part in enumerate(parts) if rows[i][0] in self._asking}
