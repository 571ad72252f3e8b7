"""How gluon_batches.py divides a product among programs, and sums of shares added up.

A tile of the product is 128 rows of the weight and some tokens. Every program has the same number
of whole tiles; those left over are divided into shares of their columns, as long for each program.
So a program has at most the end of one tile and the beginning of the next, whose sums another
launch adds up in the order of columns.
"""

from functools import cache
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.gpu import PROCESSORS, cdiv, overlapping
from mamba_eagle.kernels.triton_math import previous_done

ROWS = 128  # of a tile: 64 for each of two warp groups
STEP = 64  # columns
STEP_TIMES = {128: 0.57, 256: 0.85}  # of a tile's tokens: microseconds on an H200
JOIN, JOINED = 2.0, 1.4e-6  # microseconds to add up shares, and for each number


class Cut(NamedTuple):
    """How a product is divided; the result depends on ``share`` by rounding only."""

    tokens: int  # of a tile
    # the rest is what kernels take
    tiles: int  # of tokens, side by side
    waves: int  # whole tiles of each program
    steps: int  # of a tile
    left: int  # steps of all tiles that are left after the waves
    share: int  # of these, for each program; all of a tile's: none is shared

    @property
    def places(self) -> int:
        """For sums of shares: a program and a tile that is left have theirs at the sum of both."""
        return PROCESSORS + self.left // self.steps if self.share < self.steps else 0

    @property
    def microseconds(self) -> float:
        """About how long it takes."""
        steps = self.waves * self.steps + (self.share if self.left else 0)
        joined = JOIN + self.places * ROWS * self.tokens * JOINED if self.places else 0.0
        return steps * STEP_TIMES[self.tokens] + joined


def cut_into(tokens: int, shared: bool, n: int, rows: int, columns: int) -> Cut:
    """shared: every program has a share of the tiles that are left; else some have one each."""
    tiles, steps = cdiv(n, tokens), cdiv(columns, STEP)
    waves, rest = divmod(cdiv(rows, ROWS) * tiles, PROCESSORS)
    share = cdiv(rest * steps, PROCESSORS) if shared else steps
    return Cut(tokens, tiles, waves, steps, rest * steps, share)


@cache
def choose_cut(n: int, rows: int, columns: int) -> Cut:
    """For n tokens and a weight [rows, columns]."""
    ways = [(tokens, shared) for tokens in STEP_TIMES for shared in (False, True)]
    return min((cut_into(*way, n, rows, columns) for way in ways), key=lambda cut: cut.microseconds)


@cache
def sizes(numbers: range, rows: int, columns: int) -> tuple[int, ...]:
    """Those numbers of tokens that between them need every kernel of a weight [rows, columns]."""
    cuts = ((choose_cut(n, rows, columns), n) for n in numbers)
    return tuple({(cut.tokens, cut.places > 0): n for cut, n in cuts}.values())


@gluon.jit
def count_items(cut):
    """A program's tiles and shares of tiles."""
    _, waves, steps, left, share = cut
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, left)
    return waves + gl.maximum((end + steps - 1) // steps - begin // steps, 0)


@gluon.jit
def item(i, ROWS: gl.constexpr, TOKENS: gl.constexpr, cut):
    """The program's i-th one: its first row and token, its steps, and the place of its sums. Tiles
    of tokens are side by side, so that they find codes in the L2 cache."""
    tiles, waves, steps, left, share = cut
    program = gl.program_id(0)
    tile, begin, end, place = i * gl.num_programs(0) + program, 0, steps, 0
    if i >= waves:
        rest = program * share // steps + i - waves
        tile = waves * gl.num_programs(0) + rest
        begin = gl.maximum(program * share - rest * steps, 0)
        end = gl.minimum((program + 1) * share - rest * steps, steps)
        place = program + rest
    return tile // tiles * ROWS, tile % tiles * TOKENS, begin, end, place


@gluon.jit(do_not_specialize=["n", "factor_stride", "tiles", "before", "steps", "share"])
def _join_kernel(
    parts,  # [places, 2, TOKENS, ROWS / 2]
    factor,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    factor_stride,  # 0: one factor for all rows
    tiles,
    before,  # tiles before those that are divided
    steps,
    share,
    SOME: gl.constexpr,  # tokens
    OVERLAP: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Adds up shares of a tile that is left: one warp group's rows, SOME tokens."""
    previous_done(OVERLAP)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    HALF: gl.constexpr = ROWS // 2
    rest, group = gl.program_id(0) // 2, gl.program_id(0) % 2
    first, last = rest * steps // share, ((rest + 1) * steps - 1) // share  # programs, at least two
    t = gl.program_id(1) * SOME + gl.arange(0, SOME, gl.SliceLayout(1, layout))
    r = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    parts += (2 * (first + rest) + group) * TOKENS * HALF
    at = parts + (t[:, None] * HALF + r[None, :])
    t += (before + rest) % tiles * TOKENS
    r += (before + rest) // tiles * ROWS + group * HALF
    total = gl.zeros([SOME, HALF], gl.float32, layout)
    for program in range(first, last + 1, 4):  # four loads under way
        for i in gl.static_range(4):
            mask = (t < n)[:, None] & (program + i <= last)
            to = at + (program - first + i) * (TOKENS * ROWS)
            total += gl.load(to, mask=mask, other=0.0)
    total *= gl.load(factor + r * factor_stride, mask=r < out, other=0.0)[None, :]
    if bias is not None:
        total += gl.load(bias + r, mask=r < out, other=0.0).to(gl.float32)[None, :]
    keep = (t < n)[:, None] & (r < out)[None, :]
    gl.store(y + (t[:, None] * out + r[None, :]), total.to(y.dtype.element_ty), mask=keep)


def join(parts: Tensor, factor: Tensor, bias: Tensor | None, y: Tensor, cut: Cut) -> None:
    """To y [n, out]: sums of shares, times factors ([out, 1] or [1, 1]), plus the bias [out]."""
    tokens, some = parts.shape[2], 16
    _join_kernel[(2 * (cut.left // cut.steps), cdiv(tokens, some))](
        *(parts, factor, bias, y, *y.shape, int(factor.shape[0] > 1)),
        *(cut.tiles, cut.waves * PROCESSORS, cut.steps, cut.share),
        SOME=some,
        TOKENS=tokens,
        ROWS=ROWS,
        num_warps=4,
        **overlapping(y.device),
    )
