"""One token of the recurrence, in float32, as all kernels of this room take it.

    decay = exp2(dt · (A · log2 e))
    S[p, n] ← fma(decay, S[p, n], (dt · x[p]) · B[n])
    y[p] = fma(D, x[p], Σ_n S[p, n] · C[n])

Every operation rounds once and none can be contracted with another, so a state has the same bits
whichever kernel made it, in whatever pieces. The sum: chains of 8 consecutive n, each a product and
then fused multiply-adds; the chains of a thread in rising order; then the 8 threads across n, in
halves. It depends on N alone, not on how channels are divided among threads, warps and programs.

A tile is some channels of one head with all N numbers of each, in registers. What tokens feed in is
in shared memory, prepared once for all of a program's warps: a *feed*, which is a tuple of

    dtx [rows, TILE]   x [rows, TILE]   decays [rows, 1]   B [rows, N]   C [rows, N]

in float32, B and C by ``store_numbers``. A token is a row, but x and C may be those of other rows.
The two tiles of a program share B and C.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_shared = gl.shared_memory_descriptor
# renamed after Triton 3.6
_reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

LOG2_E = gl.constexpr(1.4426950408889634)
REGISTERS = 168  # of a thread, so that three programs of four warps share a multiprocessor
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def tile_layout(tile, warps):
    """Of [tile, N]: a thread has tile / (4 · warps) channels."""
    return gl.BlockedLayout([tile // (4 * warps), 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def read_layout(elements, warps):
    """Of [rows, elements] that are read from memory: 8 consecutive ones a thread."""
    across = min(32, max(1, elements // 8))
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def read_rows(buffer, at, row, valid, stride, num_warps: gl.constexpr):
    """What a buffer [rows, elements] is to hold, by ``read_layout``: rows that begin at ``at + row
    * stride``, and zeros for those that are not valid."""
    layout: gl.constexpr = read_layout(buffer.shape[1], num_warps)
    element = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    pointers = at + (row * stride)[:, None] + element[None, :]
    return gl.load(pointers, mask=valid[:, None], other=0.0)


@gluon.jit
def in_state(TILE: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Where a tile's numbers lie behind the first: [TILE, N]."""
    channel = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    return channel[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def tile_feed(ROWS: gl.constexpr, NODES: gl.constexpr, TILE: gl.constexpr, B, C):
    """Room for what a tile is fed: x of NODES rows, the rest of ROWS."""
    return (
        gl.allocate_shared_memory(gl.float32, [ROWS, TILE], PLAIN),
        gl.allocate_shared_memory(gl.float32, [NODES, TILE], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, 1], PLAIN),
        B,
        C,
    )


@gluon.jit
def prepare(feed, x, dt, rate):
    """x: [rows, TILE]; dt: [rows, 1]; rate: A · log2 e."""
    feed[0].store(x.to(gl.float32) * dt)
    feed[2].store(gl.exp2(dt * rate))


@gluon.jit
def stepped(S, decay, dtx, B):
    """The state after a token. S: [TILE, N]; decay, B: broadcast to it; dtx: [TILE]."""
    decay, _ = gl.broadcast(decay, S)
    return gl.fma(decay, S, dtx[:, None] * B)


@gluon.jit
def row_of(buffer, index, layout: gl.constexpr):
    """Row ``index`` of a buffer [rows, elements]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return _reinterpret(buffer, gl.float32, buffer.shape, flat).index(index).load(layout)


@gluon.jit
def store_numbers(buffer, v):
    """B or C of rows, [rows, N], to be read by ``numbers``.

    A thread reads 8 consecutive numbers as two times 16 bytes. So that eight threads read 128 bytes
    in a row, which takes no bank of shared memory twice, first halves lie before second ones.
    """
    ROWS: gl.constexpr = v.shape[0]
    N: gl.constexpr = v.shape[1]
    v = v.to(gl.float32)
    if N >= 64:
        v = v.reshape([ROWS, N // 64, 8, 2, 4]).permute([0, 1, 3, 2, 4]).reshape([ROWS, N])
    buffer.store(v)


@gluon.jit
def numbers(buffer, row, layout: gl.constexpr):
    """[1, N] for tiles of this layout."""
    N: gl.constexpr = buffer.shape[1]
    by_number: gl.constexpr = gl.SliceLayout(0, layout)
    if N < 64:
        return row_of(buffer, row, by_number)[None, :]
    else:
        halves: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], layout.warps_per_cta, [1, 0])
        v = row_of(buffer, row, gl.SliceLayout(0, halves)).reshape([N // 64, 2, 8, 4])
        v = v.permute([0, 2, 1, 3]).reshape([N])
        return gl.convert_layout(v, by_number, assert_trivial=True)[None, :]


@gluon.jit
def advance(S, feed, row):
    """The state after the token in ``row``."""
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    decay, dtx = row_of(feed[2], row, by_channel), row_of(feed[0], row, by_channel)
    return stepped(S, decay[:, None], dtx, numbers(feed[3], row, layout))


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def sum_of_products(S, C):
    """Σ_n S[p, n] · C[p, n] -> [rows]. S: [rows, N], of whose numbers a thread has 8 in a row; C:
    broadcast to it."""
    ROWS: gl.constexpr = S.shape[0]
    N: gl.constexpr = S.shape[1]
    by_row: gl.constexpr = gl.SliceLayout(1, S.type.layout)
    S, C = gl.broadcast(S, C)
    # Of a chain's eight results only the first is written, and only it is read.
    chains = gl.inline_asm_elementwise(
        """{
        .reg .f32 s;
        mul.rn.f32 s, $8, $16;
        fma.rn.f32 s, $9, $17, s;
        fma.rn.f32 s, $10, $18, s;
        fma.rn.f32 s, $11, $19, s;
        fma.rn.f32 s, $12, $20, s;
        fma.rn.f32 s, $13, $21, s;
        fma.rn.f32 s, $14, $22, s;
        fma.rn.f32 $0, $15, $23, s;
        }""",
        "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [S, C],
        dtype=gl.float32,
        is_pure=True,
        pack=8,
    )
    sums = gl.reduce(chains.reshape([ROWS, N // 8, 8]), 2, _first)
    return gl.convert_layout(gl.sum(sums, 1), by_row)


@gluon.jit
def write_output(S, feed, row, skip, y):
    """y of the token whose x and C are in ``row``. skip: D; y: at the tile's first channel."""
    TILE: gl.constexpr = S.shape[0]
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    x = row_of(feed[1], row, by_channel)
    total = sum_of_products(S, numbers(feed[4], row, layout))
    out = gl.fma(gl.full([TILE], skip, gl.float32, by_channel), x, total)
    gl.store(y + gl.arange(0, TILE, by_channel), out.to(y.dtype.element_ty))
