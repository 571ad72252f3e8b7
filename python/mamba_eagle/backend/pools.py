"""The tensors that outlive a step: KV slots, state slots, and tables of running requests.

The scheduler assigns all slots; the pools do not know which of them are in use.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.place import zeros
from mamba_eagle.backend.rounding import StateRounding
from mamba_eagle.kernels.float8.torch import E4M3, to_e4m3
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import AttentionConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """How keys and values are stored, by --kv-cache-dtype. dtype: the model's."""
    return E4M3 if name == "fp8_e4m3" else dtype


class KVPool:
    """Keys and values of all attention layers, with one KV slot per token (page size 1).

    k, v: [layers, KV slots, kv_heads, D], one and the same tensor for latent attention. After the
    scheduler's KV slots follow ``num_spare`` slots that the scheduler never assigns. The first of
    them is ``padding_slot``, where padding is written and never read.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        config: AttentionConfig | None,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 1,
        stored_as: torch.dtype | None = None,
    ) -> None:
        """dtype: of the keys and values that are written and read. stored_as: the same, or E4M3,
        to which they are then rounded without a scale."""
        self.padding_slot, self.dtype = num_slots, dtype
        shape = (0, num_slots + num_spare, 1, 1)
        if config is not None and num_layers:
            shape = (num_layers, num_slots + num_spare, config.num_kv_heads, config.head_dim)
        self.k = zeros(*shape, dtype=stored_as or dtype, device=device)
        shared = config is not None and config.latent is not None
        self.v = self.k if shared else zeros(*shape, dtype=self.k.dtype, device=device)
        # the same bytes, in a dtype that can be indexed on every device
        bits = torch.uint8 if self.k.dtype == E4M3 else self.k.dtype
        self.bits = [part.view(bits) for part in ([self.k] if shared else [self.k, self.v])]

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values. slots [n] int64, KV slots; k, v [n, kv_heads, D]."""
        for pool, new in zip(self.bits, (k, v)):
            pool[layer].index_copy_(0, slots, self._stored(new))

    def write_layers(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write those of all layers: k, v [layers, n, kv_heads, D]."""
        for pool, new in zip(self.bits, (k, v)):
            pool.index_copy_(1, slots, self._stored(new))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy those of all layers from KV slots to others: [n] int64 each."""
        for pool in self.bits:
            pool.index_copy_(1, targets, pool.index_select(1, sources))

    def _stored(self, new: Tensor) -> Tensor:
        """In the dtype of ``_bits``."""
        if self.k.dtype != E4M3:
            return new.to(self.k.dtype)
        return to_e4m3(new).view(torch.uint8)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values: slots [...] int64, KV slots -> k, v [..., kv_heads, D], ``dtype``."""
        flat, shape = slots.reshape(-1), (*slots.shape, *self.k.shape[2:])
        bits = (pool[layer].index_select(0, flat).view(shape) for pool in self.bits)
        parts = [part.view(self.k.dtype).to(self.dtype) for part in bits]
        return parts[0], parts[-1]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.bits)


class StatePool:
    """State slots: recurrent states of all recurrent layers, each after some token of a sequence.

    ssm: [layers, state slots, *state_shape]. conv: [layers, state slots, K-1, conv_dim], the raw
    convolution inputs of the last K-1 tokens, oldest first. feature: [state slots, feature_size],
    the feature of the last token, from which a draft head continues. Without recurrent layers
    (config None) only the feature is stored. rounding: how states become the dtype of ``ssm``.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        config: RecurrenceConfig | None,
        feature_size: int,
        rounding: StateRounding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        state, history = (0, 0, 0), (0, 0)
        if config is not None:
            state = config.state_shape
            history = (config.conv_kernel - 1, config.conv_dim)
        self.rounding = rounding
        self.ssm = zeros(num_layers, num_slots, *state, dtype=rounding.dtype, device=device)
        self.conv = zeros(num_layers, num_slots, *history, dtype=dtype, device=device)
        self.feature = zeros(num_slots, feature_size, dtype=dtype, device=device)

    def begin(self, item: PrefillItem) -> None:
        """The request's own state slot gets the feature that its prompt starts from."""
        if item.source < 0:
            self.feature[item.state_slot].zero_()
        else:
            self.feature[item.state_slot].copy_(self.feature[item.source])

    def copy(self, source: int, target: int) -> None:
        """Copy the state in state slot ``source`` to state slot ``target``."""
        for part in (self.ssm, self.conv):
            part[:, target].copy_(part[:, source])
        self.feature[target].copy_(self.feature[source])

    def keep_features(self, state_slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """Of the nodes' features [b, T, F] that of the last accepted one goes to each of the state
        slots [b]; a request that had ended accepts no node and keeps its own."""
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])  # [b, 1]
        new = features.gather(1, last[..., None].expand(-1, -1, features.shape[2]))[:, 0]
        old, alive = self.feature[state_slots], (accepted.count > 0)[:, None]
        self.feature[state_slots] = torch.where(alive, new.to(old.dtype), old)

    @property
    def num_bytes(self) -> int:
        return self.ssm.nbytes + self.conv.nbytes + self.feature.nbytes


class RequestTable:
    """Data of running requests, by request slot (R of them): tensors on the device, lists on the
    host."""

    def __init__(
        self, max_running: int, context_length: int, device: torch.device, max_stops: int = 8
    ) -> None:
        """max_stops: stop tokens of a request that there is room for; the table grows with more,
        which captured graphs would not see."""
        R = max_running

        def column(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return zeros(*shape, dtype=dtype, device=device)

        # room for a tree past the end, since its nodes' KV slots are looked up by position as well
        self.kv_slots = column(R, context_length + 64)  # KV slot of each position
        self.processed = column(R)  # tokens the target has processed
        self.state_slot = column(R)  # state slot of S0
        self.seed = column(R)  # of the request's noise
        self.last_token = column(R)  # the root of the next tree: sampled, not yet processed
        self.remaining = column(R)  # output tokens still allowed; 0: the request has ended
        # padded with -1
        self.stop_tokens = torch.full((R, max_stops), -1, dtype=torch.int64, device=device)
        self.wants_logprobs = [False] * R
        self.top_logprobs = [0] * R
        self.token_ids_logprob: list[list[int]] = [[]] * R
        self.logprob_temperature = [1.0] * R
        self.wants_trace = [False] * R
        self.wants_hidden = [0] * R  # how many columns of features, from the first on, are returned

    def set_stop_tokens(
        self, slot: int, tokens: frozenset[int], to_device: Callable[[Sequence], Tensor]
    ) -> None:
        """Set the stop tokens of request slot ``slot``; widens the table if they do not fit.
        to_device: a Place's."""
        missing = len(tokens) - self.stop_tokens.shape[1]
        if missing > 0:
            filler = self.stop_tokens.new_full((self.stop_tokens.shape[0], missing), -1)
            self.stop_tokens = torch.cat([self.stop_tokens, filler], dim=1)
        self.stop_tokens[slot].fill_(-1)
        if tokens:
            self.stop_tokens[slot, : len(tokens)] = to_device(sorted(tokens))
