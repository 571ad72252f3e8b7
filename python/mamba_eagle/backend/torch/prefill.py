"""Prompt chunks in torch: the chunked scan, one request after the other."""

import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.kernels.causal_conv.torch import causal_conv
from mamba_eagle.kernels.ssd.torch import even_chunk
from mamba_eagle.layers.recurrent import Inputs, Recurrent


class TorchPrefillContext(PrefillContext):
    copies_states = True

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
    ) -> None:
        super().__init__(parts, pool, paged, place)
        self.keys = {part.item.slot: self._keys(part) for part in parts}

    def _keys(self, part: PrefillPart) -> list[Tensor | None]:
        """Those of the states to save, [1] each, and of the state after the chunk."""
        item = part.item
        positions = [*(save.position for save in item.saves), item.start + part.length]
        if not self.pool.rounding.keyed:
            return [None] * len(positions)
        slots = [item.slot] * len(positions)
        keys = self.pool.rounding.keys(*self.place.to_device([slots, positions]))
        assert keys is not None
        return list(keys.split(1))

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        gates = layer.gates(raw)
        outputs = []
        for part in self.parts:
            span = slice(part.first, part.first + part.length)
            outputs.append(self._recur_one(part, layer, channels[span], gates[span]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _recur_one(
        self, part: PrefillPart, layer: Recurrent, channels: Tensor, gates: Tensor
    ) -> Tensor:
        item, ssm, conv = part.item, self.pool.ssm[layer.index], self.pool.conv[layer.index]
        before = conv[item.state_slot]
        width = before.shape[0]
        convolved = causal_conv(
            channels[None],
            layer.conv1d.weight[:, 0],
            layer.conv1d.bias,
            before[None],
            layer.config.conv_silu,
        )
        raw = torch.cat([before.to(channels.dtype), channels])  # history first
        state = ssm[item.state_slot][None]
        outputs = []
        rounding, keys = self.pool.rounding, iter(self.keys[item.slot])
        ends = [(save.position - item.start, save.state_slot) for save in item.saves]
        begin = 0
        for end, state_slot in (*ends, (part.length, item.state_slot)):
            if begin < end:
                span = slice(begin, end)
                inputs = Inputs(convolved[:, span], gates[None, span])
                y, state = layer.scan(inputs, state, even_chunk(end - begin))
                outputs.append(y)
                begin = end
            ssm[state_slot] = rounding.round(state, next(keys), layer.index)[0]
            conv[state_slot] = raw[end : end + width]
        return torch.cat(outputs, dim=1)[0]
