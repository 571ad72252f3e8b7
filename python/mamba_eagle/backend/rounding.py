"""How a state is rounded to the dtype of the state slots, wherever one is written.

States are computed in float32. With 16-bit state slots each write rounds: at the end of a prompt
chunk and of what is saved inside one, at folds, when a snapshot is accepted, and when a request
leaves. Copies from slot to slot round nothing.
"""

import torch
from torch import Tensor

from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys


class StateRounding:
    """To the nearest number; of two, the even one. It is asked for the *keys* of a write once and
    then for each layer.

    Shapes: n states to write; [n] request slots, and positions: how many tokens each state has
    seen.
    """

    keyed = False  # whether writes have keys: finding the positions takes a launch on a GPU

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def keys(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """What the noise of these writes depends on, [n] int64; None without noise."""
        return None

    def cache_key(self, position: int, device: torch.device) -> Tensor | None:
        """As ``keys``, [1], for a state that belongs to no request but to the cache."""
        return None

    def round(self, states: Tensor, keys: Tensor | None, layer: int) -> Tensor:
        """states [n, H, P, N] float32 -> the same in the state slots' dtype."""
        return states.to(self.dtype)

    def round_layers(self, states: Tensor, key: Tensor | None, first: int) -> Tensor:
        """``round`` for one slot's states in layers ``first`` and after it, [layers, H, P, N]."""
        return states.to(self.dtype)


class Stochastic(StateRounding):
    """Up or down at random, so that the average is right; the noise is a function of the request's
    seed, the position, the layer and the place in the layer's state."""

    keyed = True

    def __init__(self, dtype: torch.dtype, seeds: Tensor) -> None:
        """seeds: [R] int64, of the request slots."""
        super().__init__(dtype)
        self.seeds = seeds

    def keys(self, slots: Tensor, positions: Tensor) -> Tensor:
        return token_keys(self.seeds[slots], positions)

    def cache_key(self, position: int, device: torch.device) -> Tensor:
        at = torch.full((1,), position, device=device)
        return token_keys(torch.zeros_like(at), at)

    def round(self, states: Tensor, keys: Tensor | None, layer: int) -> Tensor:
        assert keys is not None
        return round_states(states, keys, layer, self.dtype)

    def round_layers(self, states: Tensor, key: Tensor | None, first: int) -> Tensor:
        rounded = [self.round(each[None], key, first + i) for i, each in enumerate(states)]
        return torch.cat(rounded)
