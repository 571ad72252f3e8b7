"""Counting the tokens of a request's output: torch.py in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2

# views of larger tensors may start at any offset: kernels do not specialize on alignment
ANY_PLACE = ["slots", "tokens", "number"]


@triton.jit(do_not_specialize=["D"], do_not_specialize_on_alignment=ANY_PLACE)
def _count_kernel(
    counts,  # [R, V] int32
    slots,  # [b]
    tokens,  # [b, D]
    number,  # [b]
    V,
    D,
    WIDTH: tl.constexpr,  # D, padded
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    valid = (place < D) & (place < tl.load(number + request))
    token = tl.load(tokens + request * D + place, mask=valid, other=0)
    cell = counts + tl.load(slots + request) * V + token
    tl.atomic_add(cell, tl.full([WIDTH], 1, tl.int32), mask=valid)


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
    """As ``TokenOps.count_tokens``."""
    b, width = tokens.shape
    _count_kernel[(b,)](
        *(counts, slots.contiguous(), tokens.contiguous(), number.contiguous()),
        counts.shape[1],
        width,
        WIDTH=next_power_of_2(width),
        num_warps=1,
    )
