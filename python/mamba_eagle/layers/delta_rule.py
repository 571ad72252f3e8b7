"""Delta rules as recurrences of layers, and the gated DeltaNet mixer (arXiv 2412.06464).

Shapes as in recurrent.py; H heads of P values, G heads of queries and keys of size N.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.delta_rule.torch import (
    Rows,
    Tokens,
    chunked,
    fold,
    snapshot_verify,
    tree_verify,
)
from mamba_eagle.kernels.float8.torch import Operand, Rounding, unrounded
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.gated_norm import HeadNormThenGate
from mamba_eagle.layers.linear import JoinedLayer, Linear
from mamba_eagle.layers.recurrent import (
    Conv1dWeight,
    Inputs,
    JoinedConv,
    Journal,
    Recurrent,
    Scanned,
    Snapshots,
    TreeMask,
    Verified,
)
from mamba_eagle.model_config import DeltaConfig, Span
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Heads, Shard, recurrent_heads

L2_EPS = 1e-6  # of the norms of queries and keys
CHANNEL_CHUNK = 16  # tokens at once where each channel decays: every pair then has N exponentials


class DeltaRule(Recurrent):
    """The recurrence of kernels/delta_rule, with l = beta·k and r = beta·v. Queries and keys come
    out of the convolution and are divided by their norms; queries also by sqrt(N)."""

    config: DeltaConfig

    def scan(self, inputs: Inputs, state: Tensor | None, chunk: int) -> Scanned:
        tokens, c = self._tokens(inputs), self.config
        if state is None:
            state = tokens.r.new_zeros(len(tokens.r), *c.state_shape)
        found = chunked(tokens, state, min(chunk, CHANNEL_CHUNK) if c.channel_decay else chunk)
        return Scanned(_side_by_side(found.o).to(inputs.convolved.dtype), found.state)

    def verify(self, nodes: Inputs, journal: Journal, mask: TreeMask, state: Tensor) -> Verified:
        found = tree_verify(self._rows(journal), self._tokens(nodes), mask.ancestors, state)
        keys = nodes.convolved[..., self.config.key_size : 2 * self.config.key_size]
        return Verified(_side_by_side(found.o), (keys, _side_by_side(found.u)))

    def fold(self, journal: Journal, state: Tensor) -> Tensor:
        return fold(self._rows(journal), state)

    def snapshots(self, nodes: Inputs, state: Tensor, parents: Tensor) -> Snapshots:
        o, states = snapshot_verify(self._tokens(nodes), state, parents)
        return Snapshots(_side_by_side(o), states)

    @staticmethod
    def advance(mixers: Sequence[DeltaRule], inputs: Inputs, state: Tensor) -> Tensor:  # type: ignore[override]
        return mixers[0].scan(inputs, state, mixers[0].config.chunk_size).state

    def _tokens(self, inputs: Inputs) -> Tokens:
        c = self.config
        g, beta = self._gates(inputs.gates)
        q, k, v = inputs.convolved.split([c.key_size, c.key_size, c.inner_size], dim=-1)
        q, k = self._keys(q) * c.state_size**-0.5, self._keys(k)
        v = _heads(v, c.num_heads).float()
        return Tokens(q, k, beta * k, beta * v, g)

    def _rows(self, journal: Journal) -> Rows:
        """Rows past the journal's end neither decay the state nor add to it."""
        keys, u = journal.parts
        valid = journal.valid[:, None, :, None]
        g, _ = self._gates(journal.gates)
        return Rows(self._keys(keys) * valid, _heads(u, self.config.num_heads), g * valid)

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """[b, l, gate_size] -> g [b, H, l, N or 1], beta [b, H, l, 1]"""
        c = self.config
        g, beta = gates.split([c.decay_size, c.num_heads], dim=-1)
        return _heads(g, c.num_heads), _heads(beta, c.num_heads)

    def _keys(self, convolved: Tensor) -> Tensor:
        """Queries or keys [b, l, G·N] -> [b, H, l, N] float32, of length 1."""
        c = self.config
        each = _heads(convolved, c.num_groups).float()
        each = each * torch.rsqrt(each.square().sum(-1, keepdim=True) + L2_EPS)
        return each.repeat_interleave(c.num_heads // c.num_groups, dim=1)


def _heads(flat: Tensor, count: int) -> Tensor:
    """[b, l, count·size] -> [b, count, l, size]"""
    return flat.unflatten(-1, (count, -1)).transpose(1, 2)


def _side_by_side(heads: Tensor) -> Tensor:
    """[b, H, l, size] -> [b, l, H·size]"""
    return heads.transpose(1, 2).flatten(2)


class Projected(NamedTuple):
    """What a mixer makes of its input, [n, ·] each."""

    channels: Tensor  # conv_dim: queries, keys and values before the convolution
    gate: Tensor  # inner_size
    gates: Tensor  # 2 H: of decays and of betas, as the context takes them


class Parts(NamedTuple):
    """A mixer that has no more than these beside its recurrence."""

    channels: Linear  # makes the channels, then the gate
    gates: Linear  # decays, then betas
    norm: HeadNormThenGate
    out: Linear
    # which outputs of the two are these, if they stand in another order
    orders: tuple[Tensor, Tensor] | None = None


class GatedDeltaNet(JoinedLayer, DeltaRule):
    """hidden [n, hidden_size] -> [n, hidden_size], of a rank's heads a part of the sum. A family
    gives the projections, the norm and the last product, under its names: of its ``projections``
    "channels" makes the channels and then the gate, "gates" the decays and then the betas; or
    ``project`` and ``parts`` are its own."""

    def __init__(self, config: DeltaConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.conv1d = self.make_conv()
        # a few numbers that affect every token: float32, whatever the model's dtype
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(config.num_heads, dtype=torch.float32))

    def make_conv(self) -> Conv1dWeight | JoinedConv:
        return Conv1dWeight(self.config.conv_dim, self.config.conv_kernel, bias=False)

    @property
    @abstractmethod
    def ends(self) -> tuple[HeadNormThenGate, Linear]:
        """What is made of the recurrence's output and the gate."""

    def project(self, hidden: Operand, ctx: ForwardContext) -> Projected:
        c = self.config
        # first the small product: a GPU fetches the large one's weight meanwhile
        gates = ctx.gates(self, self.product("gates", unrounded(hidden)))
        both = self.product("channels", hidden)
        channels, gate = both.split([c.conv_dim, c.inner_size], dim=-1)
        return Projected(channels, gate, gates)

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8 for the channels; gates are
        made of the numbers themselves."""
        rounding = self._joined["channels"].rounding if "channels" in self._joined else None
        return None if rounding is None else rounding._replace(kept=True)

    @property
    def parts(self) -> Parts | None:
        """Of a prepared mixer; None where its projections are not of one form."""
        made = self._joined
        both = "channels" in made and "gates" in made
        return Parts(made["channels"], made["gates"], *self.ends) if both else None

    def product(self, name: str, hidden: Operand) -> Tensor:
        """What some ``projections`` make of hidden [n, hidden_size], side by side."""
        if name in self._joined:
            return self._joined[name](hidden)
        return torch.cat([part(hidden) for part in self.projections()[name]], dim=-1)

    def gates(self, raw: Tensor) -> Tensor:
        decay, beta = raw.float().split(self.config.num_heads, dim=-1)
        g = -self.A_log.float().exp() * F.softplus(decay + self.dt_bias.float())
        return torch.cat([g, beta.sigmoid() * self.config.max_beta], dim=-1)

    def forward(self, hidden: Operand, ctx: ForwardContext) -> Tensor:
        channels, gate, gates = self.project(hidden, ctx)
        norm, out = self.ends
        made: Tensor = out(norm(ctx.recur(self, channels, gates), gate))
        return made

    def channel_spans(self, own: Heads) -> tuple[Span, ...]:
        """A rank's queries, keys and values among all channels."""
        return own.spans(self.config.channel_widths, self.config)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = recurrent_heads(shard, self.config)
        return {
            "conv1d.weight": rows(*self.channel_spans(own)),
            **dict.fromkeys(("dt_bias", "A_log"), rows(own.heads)),
        }
