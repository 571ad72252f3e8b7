"""Attention of prompts on Hopper: keys and values are gathered from the pool, layer by layer."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mamba_eagle.backend.attention import PromptSpan
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels.exact_attention.triton import prompt_tiles
from mamba_eagle.kernels.gpu import next_power_of_2
from mamba_eagle.kernels.prompt_attention.gluon import LARGEST_TILE, TILE, prompt_attention
from mamba_eagle.layers.context import AttentionView

MOST_KEYS = 2**17  # that are gathered at once, if they are not of a single request


class GatheredPrompts:
    """Attention of prompt chunks to themselves and to earlier tokens of their requests."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan], place: Place
    ) -> None:
        """slot_table: [R, positions], with the KV slots of the spans' tokens."""
        self.pool, self.slot_table, self.spans, self.place = pool, slot_table, spans, place
        self.together = list(_together(spans))
        self.lengths = [sum(span.length for span in part) for part in self.together]

    # made when the first layer needs them: by then the device has enough to do

    @cached_property
    def write_slots(self) -> Tensor:
        spans, table = self.spans, self.slot_table
        return torch.cat([table[slot, start : start + length] for slot, start, length in spans])

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return [self._part(spans) for spans in self.together]

    def _part(self, spans: Sequence[PromptSpan]) -> tuple[Tensor, Tensor]:
        """The slots of the spans' keys, and the tiles of their queries.

        After a request's last key comes that key again up to the end of its tile: with another
        request's keys there, a NaN of theirs would reach it. After all come further ones up to a
        power of two, since a long prompt in chunks would else ask for a larger block of memory with
        each of them.
        """
        slots, chunks, first = [], [], 0
        for slot, start, length in spans:
            table = self.slot_table[slot, : start + length]
            slots += [table, table[-1:].expand(-len(table) % LARGEST_TILE)]
            chunks.append((first, start, length))
            first += len(table) + len(slots[-1])
        slots.append(slots[0][:1].expand(next_power_of_2(first) - first))
        tiles = self.place.to_device(prompt_tiles(chunks, TILE), torch.int32)
        return torch.cat(slots), tiles

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""
        self.pool.write(layer.index, self.write_slots, k, v)
        outputs = [
            prompt_attention(queries, *self.pool.read(layer.index, slots), tiles, layer.scale)
            for queries, (slots, tiles) in zip(q.split(self.lengths), self.parts)
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _together(spans: Sequence[PromptSpan]) -> Iterator[Sequence[PromptSpan]]:
    """Neighbours whose keys are gathered at once."""
    part: list[PromptSpan] = []
    keys = 0
    for span in spans:
        keys += span.start + span.length
        if part and keys > MOST_KEYS:
            yield part
            part, keys = [], span.start + span.length
        part.append(span)
    yield part
