"""One token of gated DeltaNet, in float32, as all kernels of this room take it; see naive.py.

Layouts, tiles and sums are those of Mamba2's recurrence (recurrence/gluon_step.py). What a token
feeds in is in shared memory, prepared once for all of a program's warps: *tokens* are a tuple of

    v [rows, TILE]   k [rows, N]   q [rows, N]   decays, reads, writes, lengths [rows, 1]

in float32, k and q by ``store_numbers``. A row of a journal needs no more than k, its decay and u,
and is a token of Mamba2's with u for dt · x and k for B.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.delta_rule.rows import value_tile
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    PLAIN,
    numbers,
    row_of,
    stepped,
    store_numbers,
    sum_of_products,
)
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.tree_verify.layout import Sizes

MAX_KEY = 128  # numbers


def choose_tiles(sizes: Sizes) -> Tiles:
    """32 of a head's values: then a single prompt of 32 heads has a program for each of an H100's
    multiprocessors. A walk takes a token's time, however few numbers a program has."""
    return Tiles(value_tile(sizes.head_dim), 0, 4)


@gluon.jit
def room_for_tokens(ROWS: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr):
    room = (
        gl.allocate_shared_memory(gl.float32, [ROWS, TILE], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, N], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, N], PLAIN),
    )
    for _ in gl.static_range(4):
        room += (gl.allocate_shared_memory(gl.float32, [ROWS, 1], PLAIN),)
    return room


@gluon.jit
def _inverse_length(x, EPS: gl.constexpr):
    """[rows, 1] of x [rows, N]."""
    return gl.rsqrt(sum_of_products(x, x) + EPS)[:, None]


@gluon.jit
def prepare(tokens, q, k, g, beta, EPS: gl.constexpr):
    """All but v. q, k: [rows, N] by ``read_layout``; g, beta: [rows, 1]."""
    q, k = q.to(gl.float32), k.to(gl.float32)
    store_numbers(tokens[1], k)
    store_numbers(tokens[2], q)
    of_k, decay = _inverse_length(k, EPS), gl.exp2(g * LOG2_E)
    write = beta * of_k
    tokens[3].store(decay)
    tokens[4].store(write * (decay * of_k))
    tokens[5].store(write)
    tokens[6].store(_inverse_length(q, EPS) * (q.shape[1] ** -0.5))


@gluon.jit
def advance(S, tokens, row):
    """The state after the token in ``row``, and its u [TILE]. S: [TILE, N]."""
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    k, v = numbers(tokens[1], row, layout), row_of(tokens[0], row, by_channel)
    seen = sum_of_products(S, k)
    read, _ = gl.broadcast(row_of(tokens[4], row, by_channel), seen)
    u = gl.fma(-read, seen, row_of(tokens[5], row, by_channel) * v)
    return stepped(S, row_of(tokens[3], row, by_channel)[:, None], u, k), u


@gluon.jit
def write_output(S, tokens, row, y):
    """Of the token in ``row``, after it. y: at the tile's first value."""
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    o = sum_of_products(S, numbers(tokens[2], row, layout))
    o = o * row_of(tokens[6], row, by_channel)
    gl.store(y + gl.arange(0, S.shape[0], by_channel), o.to(y.dtype.element_ty))
