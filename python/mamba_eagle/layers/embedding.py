"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.products import PackedProduct
from mamba_eagle.layers.weights import META, without_memory


class Embedding(Layer):
    """[n] int64 -> [n, size]; weight [vocab_size, size], whose dtype may be shorter than that of
    what it returns."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size))
        self.dtype: torch.dtype | None = None  # of what it returns; None: the weight's
        self.holder: PackedProduct | None = None  # what has its rows, if it has not

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.holder is not None:
            return self.holder.rows(input_ids)
        embedded = F.embedding(input_ids, self.weight)
        return embedded if self.dtype is None else embedded.to(self.dtype)

    def prepare(self, ops: LayerOps) -> None:
        weight = self.weight.detach()
        if weight.device == META:  # another layer will hold it
            return
        packed = ops.pack_embedding(weight)
        if packed is not weight:
            self.store(packed)

    def store(self, weight: Tensor) -> None:
        """Use this weight, of whatever dtype, and return what it did before."""
        self.dtype = self.dtype or self.weight.dtype
        self.weight = nn.Parameter(weight, requires_grad=False)

    def read_from(self, holder: PackedProduct) -> None:
        """Read rows of the weight that another layer's product holds, and give up the own one."""
        self.holder = holder
        shell = without_memory(self.weight.shape, self.weight.dtype)
        self.weight = nn.Parameter(shell, requires_grad=False)
