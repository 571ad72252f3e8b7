"""RMS norms: plain, and gated over groups of channels as in Mamba2."""

import torch
from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.parallel.sum_table import Normed


class Norm(Layer):
    """A norm with a weight [size]. With ``rounding``, its output is float8 for the products that
    read it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.dtype = self.weight.dtype  # of hidden states
        self.eps = eps
        self.rounding: Rounding | None = None
        self.rounded_from = 0  # tokens; the output of fewer stays as it is


class RMSNorm(Norm):
    """``weight * x / rms(x)`` over the last dimension; sums in float32. x [n, size]."""

    def after(self, stream: Tensor, added: Tensor) -> Normed:
        """The norm of ``stream + added``, and that sum, where ``added`` is a rank's part of what is
        added. Neither input may be used afterwards, since results may overwrite them. stream, added
        [n, size]."""
        rounding = self._rounding(len(stream))
        return self._ops.total_add_rms_norm(stream, added, self.weight, self.eps, rounding)

    def forward(self, x: Tensor) -> Tensor | Rounded:
        return self._ops.rms_norm(x, self.weight, self.eps, self._rounding(len(x)))

    def _rounding(self, n: int) -> Rounding | None:
        return self.rounding if n >= self.rounded_from else None

    def rehearse(self, device: torch.device) -> None:
        if self.rounded_from and self.rounding is not None:
            x = torch.zeros(self.rounded_from, len(self.weight), dtype=self.dtype, device=device)
            self._ops.add_rms_norm(x, x.clone(), self.weight, self.eps, self.rounding)


def keep_exact(model: nn.Module) -> None:
    """Hold the weights of all plain norms in float32, whatever the model's dtype: for families that
    store their difference from 1, in which they have more digits."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight = nn.Parameter(module.weight.detach().float())


class GatedGroupRMSNorm(Norm):
    """``weight * rmsnorm_group(y * silu(gate))``: gate first, then a norm over each group.

    y, gate [n, size]; a group is ``size // num_groups`` adjacent channels (Mamba2's
    ``norm_before_gate=False``, which Nemotron-H uses).
    """

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__(size, eps)
        self.group_size = size // num_groups

    def forward(self, y: Tensor, gate: Tensor) -> Tensor | Rounded:
        given = (y, gate, self.weight, self.group_size, self.eps, self.rounding)
        return self._ops.gated_group_rms_norm(*given)
