"""Without custom kernels: products by oneDNN on a CPU, grouped products on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.layers.ops import LayerOps

HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()


def padded_rows(rows: int) -> int:
    """The number of rows to which oneDNN's inputs are padded.

    oneDNN and its integration in torch each cache compiled kernels for 1,024 shapes, and prompts
    have arbitrary lengths: without padding, the process would grow by a gigabyte in minutes.
    """
    for limit, multiple in ((64, 8), (128, 16), (256, 32)):
        if rows <= limit:
            return -(-rows // multiple) * multiple
    return -(-rows // 64) * 64


def onednn_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], packed by ``_reorder_linear_weight``, bias [out] or None -> [n, out]."""
    rows = x.shape[0]
    missing = padded_rows(rows) - rows
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y[:rows] if missing else y


class CudaOps(LayerOps):
    """Operations for any dtype on a GPU."""

    name = "torch"

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """One kernel without a round trip to the host in bfloat16; else the loop over experts.

        The kernel requires rows that begin at multiples of 16 bytes, as in all published models;
        others are padded.
        """
        if x.dtype != torch.bfloat16:
            return super().grouped_linear(x, weight, ends)
        inner, width = (-size % 8 for size in weight.shape[1:])
        padded = F.pad(weight, (0, width, 0, inner)) if inner or width else weight
        x = F.pad(x, (0, width)) if width else x
        out = F.grouped_mm(x, padded.transpose(1, 2), offs=ends.int())
        return out[:, : weight.shape[1]]
