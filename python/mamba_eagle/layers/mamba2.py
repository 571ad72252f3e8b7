"""The Mamba2 mixer: projections and norm. The context computes convolution and recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.kernels.ssd.torch import ssd_chunked
from mamba_eagle.kernels.tree_verify.torch import Rows, fold, snapshot_verify, tree_verify
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.gated_norm import make_gated_norm
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import GatedGroupRMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.recurrent import (
    Conv1dWeight,
    Inputs,
    Journal,
    Recurrent,
    Scanned,
    Snapshots,
    TreeMask,
    Verified,
)
from mamba_eagle.model_config import Mamba2Config, Span
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads


class Mamba2Mixer(Recurrent):
    """Dao and Gu 2024 (arXiv 2405.21060): hidden [n, hidden_size] -> [n, hidden_size], of a rank's
    heads a part of the sum.

    H heads of P channels, G groups, state size N. The recurrence is that of kernels/ssd and
    kernels/tree_verify; it has one gate per head, dt.
    """

    config: Mamba2Config

    def __init__(self, config: Mamba2Config, hidden_size: int, index: int, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        self.index = index
        inner, heads = config.inner_size, config.num_heads
        self.in_proj = Linear(hidden_size, inner + config.conv_dim + heads, config.in_bias)
        self.conv1d = Conv1dWeight(config.conv_dim, config.conv_kernel, config.conv_bias)
        # a few numbers that affect every token: float32, whatever the model's dtype
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm = make_gated_norm(config, norm_eps)
        self.out_proj = Linear(inner, hidden_size, config.out_bias)
        self._decay_rate: Tensor | None = None
        self._dt_bias: Tensor | None = None

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        c, own = self.config, recurrent_heads(shard, self.config)
        x, heads, xbc = own.channels(c.head_dim), own.heads, own.spans(c.channel_widths, c)
        inner, dt = c.inner_size, c.inner_size + c.conv_dim
        projected = rows(
            x,
            *(Span(inner + begin, inner + end) for begin, end in xbc),
            Span(dt + heads.begin, dt + heads.end),
        )
        each = dict.fromkeys(("dt_bias", "A_log", "D"), rows(heads))
        conv = dict.fromkeys(("conv1d.weight", "conv1d.bias"), rows(*xbc))
        return {
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), projected),
            **conv,
            **each,
            "norm.weight": rows(x),
            "out_proj.weight": columns(x),
            "out_proj.bias": once(self.out_proj.weight.shape[0], shard),
        }

    def prepare(self, ops: LayerOps) -> None:
        self._decay_rate = -torch.exp(self.A_log.detach().float())
        self._dt_bias = self.dt_bias.detach().float()

    def connect(self) -> None:
        if isinstance(self.norm, GatedGroupRMSNorm):
            self.norm.rounding = self.out_proj.rounding

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8."""
        return self.in_proj.rounding

    def decay_rate(self) -> Tensor:
        """A: [H] float32, negative."""
        return -torch.exp(self.A_log.float()) if self._decay_rate is None else self._decay_rate

    def step_size(self, dt: Tensor) -> Tensor:
        """``clamp(softplus(dt + dt_bias))``: raw dt [..., H] -> [..., H] float32."""
        bias = self.dt_bias.float() if self._dt_bias is None else self._dt_bias
        dt = F.softplus(dt.float() + bias)
        low, high = self.config.time_step_limit
        return dt if low <= 0.0 and high == float("inf") else dt.clamp(low, high)

    def split_xbc(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., conv_dim] -> x [..., H, P], B [..., G, N], C [..., G, N]."""
        c = self.config
        x, B, C = xbc.split(
            [c.inner_size, c.num_groups * c.state_size, c.num_groups * c.state_size], dim=-1
        )
        return (
            x.unflatten(-1, (c.num_heads, c.head_dim)),
            B.unflatten(-1, (c.num_groups, c.state_size)),
            C.unflatten(-1, (c.num_groups, c.state_size)),
        )

    # ── the recurrence ──

    def gates(self, raw: Tensor) -> Tensor:
        return self.step_size(raw)

    def scan(self, inputs: Inputs, state: Tensor | None, chunk: int) -> Scanned:
        x, B, C = self.split_xbc(inputs.convolved)
        found = ssd_chunked(x, inputs.gates, self.decay_rate(), B, C, self.D, chunk, state)
        return Scanned(found.y.flatten(2), found.final_state)

    def verify(self, nodes: Inputs, journal: Journal, mask: TreeMask, state: Tensor) -> Verified:
        c, dt = self.config, nodes.gates
        x, B, C = self.split_xbc(nodes.convolved)
        decays = dt * self.decay_rate()
        L = _last(journal)[:, None]
        L = L + decays if dt.shape[1] == 1 else torch.baddbmm(L, mask.ancestors, decays)
        xB = nodes.convolved[..., : c.inner_size + c.num_groups * c.state_size]
        new = (dt, xB, L)
        old = (journal.gates, *journal.parts)
        rows = self._rows(*(torch.cat(both, dim=1) for both in zip(old, new)))
        y = tree_verify(rows, C, L, state, mask.bias)
        y = torch.addcmul(y, self.D.detach().float()[:, None], x)
        return Verified(y.flatten(2), (xB, L))

    def fold(self, journal: Journal, state: Tensor) -> Tensor:
        rows = self._rows(journal.gates, *journal.parts)
        return fold(rows, journal.valid, _last(journal), state)

    def snapshots(self, nodes: Inputs, state: Tensor, parents: Tensor) -> Snapshots:
        x, B, C = self.split_xbc(nodes.convolved)
        y, states = snapshot_verify(x, nodes.gates, self.decay_rate(), B, C, state, parents)
        y = torch.addcmul(y, self.D.detach().float()[:, None], x)
        return Snapshots(y.flatten(2), states)

    @staticmethod
    def advance(mixers: Sequence[Mamba2Mixer], inputs: Inputs, state: Tensor) -> Tensor:  # type: ignore[override]
        x, B, _ = mixers[0].split_xbc(inputs.convolved)
        dt = inputs.gates
        decay_rate = torch.stack([mixer.decay_rate().detach() for mixer in mixers])
        log_decay = (dt * decay_rate[:, None]).cumsum(1)
        in_journal = torch.ones(dt.shape[:2], dtype=torch.bool, device=dt.device)
        return fold(Rows(x, B, dt, log_decay), in_journal, log_decay[:, -1], state)

    def _rows(self, dt: Tensor, xB: Tensor, log_decay: Tensor) -> Rows:
        c = self.config
        x, B = xB[..., : c.inner_size], xB[..., c.inner_size :]
        x = x.unflatten(-1, (c.num_heads, c.head_dim))
        return Rows(x, B.unflatten(-1, (c.num_groups, c.state_size)), dt, log_decay)

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext) -> Tensor:
        c = self.config
        gate, xbc, dt = self.in_proj(hidden).split([c.inner_size, c.conv_dim, c.num_heads], dim=-1)
        y = ctx.recur(self, xbc, dt)
        return self.out_proj(self.norm(y, gate))


def _last(journal: Journal) -> Tensor:
    """L of each journal's last row, 0 for an empty journal. [b, H] float32"""
    log_decay, length = journal.parts[1], journal.length
    if not log_decay.shape[1]:
        return log_decay.new_zeros(len(length), log_decay.shape[2])
    rows = torch.arange(len(length), device=length.device)
    return (length > 0).float()[:, None] * log_decay[rows, (length - 1).clamp(min=0)]
