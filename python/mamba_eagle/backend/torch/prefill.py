"""Prompt chunks in torch: the chunked scan, one request after the other."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mamba_eagle.backend.prefill import PrefillContext, PrefillPart, prompt_of
from mamba_eagle.kernels.causal_conv.torch import causal_conv
from mamba_eagle.kernels.ssd.torch import even_chunk
from mamba_eagle.layers.recurrent import Inputs, Recurrent


class TorchPrefillContext(PrefillContext):
    @cached_property
    def keys(self) -> list[Sequence[Tensor | None]]:
        """Of each chunk's saves, [1] each."""
        return [self._keys(number) for number in range(len(self.parts))]

    def _keys(self, number: int) -> Sequence[Tensor | None]:
        saves = prompt_of(self.parts[number]).saves
        keys = self.round_keys([(number, tokens) for tokens, _ in saves])
        return [None] * len(saves) if keys is None else keys.split(1)

    def _recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        gates = layer.gates(raw)
        outputs = []
        for part, keys in zip(self.parts, self.keys):
            own = (channels[part.flat], gates[part.flat])
            outputs.append(self._recur_one(part, keys, layer, *own))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _recur_one(
        self,
        part: PrefillPart,
        keys: Sequence[Tensor | None],
        layer: Recurrent,
        channels: Tensor,
        gates: Tensor,
    ) -> Tensor:
        item, ssm, conv = part.item, self.pool.ssm[layer.index], self.pool.conv[layer.index]
        before, state = conv[item.source], ssm[item.source][None]
        if item.source < 0:
            before, state = torch.zeros_like(before), torch.zeros_like(state)
        width = before.shape[0]
        own, silu = layer.conv1d, layer.config.conv_silu
        convolved = causal_conv(channels[None], own.weight[:, 0], own.bias, before[None], silu)
        raw = torch.cat([before.to(channels.dtype), channels])  # history first
        outputs = []
        begin = 0
        for (end, state_slot), key in zip(prompt_of(part).saves, keys):
            if begin < end:
                span = slice(begin, end)
                inputs = Inputs(convolved[:, span], gates[None, span])
                y, state = layer.scan(inputs, state, even_chunk(end - begin))
                outputs.append(y)
                begin = end
            ssm[state_slot] = self.pool.rounding.round(state, key, layer.index)[0]
            conv[state_slot] = raw[end : end + width]
        return torch.cat(outputs, dim=1)[0]
