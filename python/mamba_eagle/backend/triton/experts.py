"""Mixtures of experts on a GPU: what chooses between the kernels, by the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.triton.products import SIXTEEN_BITS
from mamba_eagle.kernels.experts import gluon as hopper
from mamba_eagle.kernels.experts import triton as kernels
from mamba_eagle.kernels.experts.torch import Choice, Routes
from mamba_eagle.kernels.experts.triton import SILU_GATE, Config, Marked, Pairs, Stack
from mamba_eagle.kernels.experts.triton_routes import SIZES as ROUTER_SIZES
from mamba_eagle.kernels.experts.triton_routes import route, sort_pairs
from mamba_eagle.kernels.float8.torch import LARGEST, Operand, unrounded
from mamba_eagle.kernels.float8.triton import rounded
from mamba_eagle.kernels.gpu import TENSOR_CORES, capability
from mamba_eagle.kernels.relu_squared.triton import relu_squared_
from mamba_eagle.kernels.silu_gate.triton import silu_and_mul
from mamba_eagle.layers.adapters import slots_of_rows
from mamba_eagle.layers.ops import FusedRouter
from mamba_eagle.layers.products import ExpertLayer, GroupedLinear
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix, same_rounding

MAX_TILES = 1024  # tokens; for more, libraries multiply 16 bits faster
# Up to this many tokens shared experts are two more of the routed ones' launches; beyond, reading
# their weights again for each tile of tokens takes longer than three launches.
MAX_SHARED = 64
# Of up to this many tokens groups are rounded as they are read, of more by a launch.
MAX_ROUNDED_AS_READ = 256


class Sizes(NamedTuple):
    """A number of tokens, and how the two products of up to that many are divided."""

    tokens: int
    up: Config
    down: Config


# What is fastest was measured (benchmark/kernels.md).
FEW = Sizes(1, Config(8, 0, 512, 4, 4), Config(8, 0, 256, 2, 5))
FEW_FLOAT8 = Sizes(1, Config(32, 0, 256, 4, 4), Config(16, 0, 512, 2, 3))
TILES = [
    Sizes(32, *[Config(64, 16, 128, 4, 4)] * 2),
    Sizes(256, *[Config(64, 32, 128, 4, 4)] * 2),
    Sizes(MAX_TILES, *[Config(64, 64, 64, 4, 4)] * 2),
    Sizes(2**31, *[Config(128, 128, 64, 8, 4)] * 2),
]
TILES_FLOAT8 = [
    Sizes(32, Config(64, 16, 128, 4, 4), Config(64, 16, 256, 4, 2)),
    Sizes(256, Config(64, 32, 128, 4, 4), Config(64, 32, 256, 4, 2)),
    Sizes(MAX_TILES, *[Config(64, 64, 128, 4, 4)] * 2),
    Sizes(2**31, *[Config(128, 128, 128, 8, 4)] * 2),
]
# Scales of blocks: a sum of 128 columns is short, and what follows it takes registers.
TILES_BLOCKS = [
    Sizes(MAX_ROUNDED_AS_READ, Config(64, 16, 128, 4, 4), Config(128, 16, 128, 4, 2)),
    Sizes(512, *[Config(64, 32, 128, 4, 3)] * 2),
    Sizes(2**31, *[Config(64, 64, 128, 4, 3)] * 2),
]


def pack_router(weight: Tensor, choice: Choice, beside: Tensor | None = None) -> FusedRouter | None:
    """None if the kernel does not choose so; as in LayerOps."""
    if weight.dtype not in SIXTEEN_BITS or choice.num_groups > 1:
        return None
    if capability(weight.device) < TENSOR_CORES:
        return None
    return lambda hidden, ids: route(hidden, weight, choice, ids, beside)


def stack_of(matrix: Tensor | Matrix) -> Stack | None:
    """None if the kernels do not multiply it."""
    if isinstance(matrix, Tensor):
        return Stack(matrix, None, 0, None) if matrix.dtype in SIXTEEN_BITS else None
    if not isinstance(matrix, Float8Matrix) or matrix.rounding is None:
        return None
    if matrix.block is None:
        return Stack(matrix.values, matrix.scale[..., 0].contiguous(), 0, matrix.rounding)
    if matrix.block[1] != kernels.BLOCK:
        return None
    return Stack(matrix.values, matrix.scale.contiguous(), matrix.block[0], matrix.rounding)


def sharing(stack: Stack, shared: Tensor | Matrix | None, by_rows: bool) -> tuple[Stack, int]:
    """The stack with the shared experts' matrix beside it, and how many of its size they are; 0 if
    they cannot be multiplied together."""
    own = stack_of(shared) if isinstance(shared, (Tensor, Matrix)) else None
    if own is None or own.block != stack.block or own.weight.dtype != stack.weight.dtype:
        return stack, 0
    if stack.rounding is not None and not same_rounding(stack.rounding, own.rounding):
        return stack, 0
    axis, other = (0, 1) if by_rows else (1, 0)
    width, rest = own.weight.shape[axis], own.weight.shape[other]
    if width % stack.weight.shape[1 + axis] or rest != stack.weight.shape[1 + other]:
        return stack, 0
    count = width // stack.weight.shape[1 + axis]
    if stack.block and count > 1:  # kernels find the blocks of one matrix
        return stack, 0
    return stack._replace(shared=own.weight.contiguous(), shared_scale=own.scale), count


def fuse_experts(
    up: Tensor | Matrix,
    down: Tensor | Matrix,
    act: str,
    dtype: torch.dtype,
    grouped: GroupedLinear,
    exact: bool = False,
) -> FusedExperts | None:
    """None if there is no kernel for such weights on their device. exact: all numbers of tokens
    take tiles, whose sums have one order."""
    stacks = stack_of(up), stack_of(down)
    if stacks[0] is None or stacks[1] is None or dtype not in SIXTEEN_BITS:
        return None
    if capability(stacks[0].weight.device) < TENSOR_CORES:
        return None
    return FusedExperts(stacks[0], stacks[1], act, dtype, grouped, exact)


class FusedExperts(ExpertLayer):
    """One token: no sorting. More: tiles of its tokens by expert. Prompts in 16 bits: a library's
    grouped products; on Hopper with scales of blocks: kernels of their own."""

    def __init__(
        self,
        up: Stack,
        down: Stack,
        act: str,
        dtype: torch.dtype,
        grouped: GroupedLinear,
        exact: bool,
    ) -> None:
        self.up, self.down, self.act, self.dtype, self.grouped = up, down, act, dtype, grouped
        self.count = len(up.weight)
        self.shared = 0
        self.float8 = up.rounding is not None or down.rounding is not None
        self.library = dtype == torch.bfloat16 and not self.float8 and not exact
        few, tiles = (FEW_FLOAT8, TILES_FLOAT8) if self.float8 else (FEW, TILES)
        if up.block:
            tiles = TILES_BLOCKS
        # whether many tokens have kernels of their own
        self.prompts = act == SILU_GATE and dtype == torch.bfloat16 and hopper.supports(up, down)
        if self.prompts and not exact:
            # fewer tokens are rounded as they are read
            self.input_rounding, self.rounded_from = up.rounding, MAX_SHARED + 1
        self.forms = tiles if exact else [few, *tiles]
        self.max_shared = 0 if exact else MAX_SHARED
        self.max_rounded_as_read = 0 if exact else MAX_ROUNDED_AS_READ  # by other bits

    def share(self, up: Tensor | Matrix, down: Tensor | Matrix) -> None:
        stacks = sharing(self.up, up, by_rows=True), sharing(self.down, down, by_rows=False)
        if stacks[0][1] == stacks[1][1] > 0:
            (self.up, self.shared), (self.down, _) = stacks

    @property
    def sizes(self) -> tuple[int, ...]:
        many = (hopper.FROM,) if self.prompts else ()
        tiles = (sizes.tokens + 1 for sizes in self.forms[:-1])
        return (*ROUTER_SIZES, *tiles, *many, MAX_SHARED + 1)

    def __call__(
        self,
        x: Operand,
        routes: Routes,
        beside: Callable[[], Tensor] | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        n = len(routes.experts)
        if routes.experts.dtype != torch.int32:
            routes = routes._replace(experts=routes.experts.int())
        # where rows have adapters, which these kernels would leave out, shared experts run apart
        apart = beside is None or n > self.max_shared or slots_of_rows() is not None
        inside = 0 if apart else self.shared
        added = beside() if beside is not None and not inside else None
        pairs = Pairs(routes, None, inside)
        if n > MAX_TILES and self.library:
            return self._many(unrounded(x), pairs, added, share)
        each = self._each(x, pairs)
        return kernels.weighted_sum(each, pairs, added, share=share)

    def _config(self, n: int) -> tuple[Config, Config]:
        sizes = next(each for each in self.forms if n <= each.tokens)
        up, down = sizes.up, sizes.down
        if self.act == SILU_GATE and up.tokens and not self.up.block:  # two matrices at once
            if not self.float8:
                up = up._replace(columns=up.columns // 2, stages=up.stages + 1)
            else:  # fewer than 128 bytes of a row take longer
                up = up._replace(stages=up.stages - 1)
        return up, down

    def _each(self, x: Operand, pairs: Pairs) -> Tensor:
        """[pairs, size], in the order of triton.py."""
        n = len(pairs.routes.experts)
        if self.prompts and n >= hopper.FROM:
            place = sort_pairs(pairs.routes.experts, self.count)
            return hopper.gated_experts(x, self.up, self.down, place)
        above, below = self._config(n)
        exact, rounding = unrounded(x), self.up.rounding
        given = Marked(exact, pairs.routes.weights)
        once = n > self.max_rounded_as_read  # whether groups are rounded by launches
        if above.tokens:
            in_groups = rounding is not None and rounding.group > 0
            to_round = None if rounding is None or in_groups else exact
            place = sort_pairs(pairs.routes.experts, self.count, to_round, rounding)
            pairs = pairs._replace(place=place)
            if to_round is not None:
                given = Marked(place.rounded, place.largest)
            elif rounding is not None and once:
                given = Marked(*rounded(x, rounding)[:2])
        late = self.down.rounding if above.tokens else None
        if late is not None and (late.scale is not None or (late.group and not once)):
            late = None  # rounded as they are read, or as they are written
        following = self.down.rounding if late is None else None
        made = kernels.product(given, self.up, pairs, above, self.act, self.dtype, following)
        if late is not None:
            eight = rounded(made.values, late)
            made = Marked(eight.values, eight.scale if late.group else eight.scale * LARGEST)
        last = kernels.product(made, self.down, pairs, below, None, self.dtype)
        return last.values

    def _many(self, x: Tensor, pairs: Pairs, added: Tensor | None, share: Tensor | None) -> Tensor:
        ids = pairs.routes.experts
        place = sort_pairs(ids, self.count)
        above = self.grouped(x[place.order // ids.shape[1]], self.up.weight, place.ends)
        made = silu_and_mul(above) if self.act == SILU_GATE else relu_squared_(above.contiguous())
        each = self.grouped(made, self.down.weight, place.ends)
        pairs = pairs._replace(place=place)
        return kernels.weighted_sum(each, pairs, added, by_expert=True, share=share)
