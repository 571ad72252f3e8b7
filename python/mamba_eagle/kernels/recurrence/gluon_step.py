"""One token of the recurrence, in float32, as all kernels of this room take it.

    decay = exp2(dt · (A · log2 e))
    S[p, n] ← fma(decay, S[p, n], (dt · x[p]) · B[n])
    y[p] = fma(D, x[p], Σ_n S[p, n] · C[n])

Every operation rounds once and none can be contracted with another, so a state has the same bits
whichever kernel made it, in whatever pieces. The sum: chains of CHAIN consecutive n, each a product
and then fused multiply-adds; a thread's chains in rising order; then the THREADS threads across n,
in halves. It depends on N alone, not on how channels are divided among threads, warps and programs.

A tile is some channels of one head with all N numbers of each, in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_shared = gl.shared_memory_descriptor
# renamed after Triton 3.6
_reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

CHAIN = gl.constexpr(8)
THREADS = gl.constexpr(8)  # of a warp across the N numbers of a channel
ROWS = gl.constexpr(4)  # of a warp across channels
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def tile_layout(tile, warps):
    """Of [tile, N]: a thread has tile / (4 · warps) channels."""
    return gl.BlockedLayout([tile // (4 * warps), 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def numbers_per_load(dtype):
    """Numbers of B and C in bfloat16 stay in pairs until they are used."""
    return 2 if dtype == gl.bfloat16 else 1


@gluon.constexpr_function
def loads_layout(tile, per_load):
    """Of the N / per_load elements in which a token's B or C is loaded, for tiles like ``tile``."""
    share = gl.BlockedLayout([1, 8 // per_load], [4, 8], tile.warps_per_cta, [1, 0])
    return gl.SliceLayout(0, share)


@gluon.jit
def as_loaded(row, PER_LOAD: gl.constexpr):
    """A pointer to a token's B or C, to such elements."""
    if PER_LOAD == 2:
        row = row.to(gl.pointer_type(gl.int32), bitcast=True)
    return row


@gluon.jit
def _numbers(loaded, layout: gl.constexpr):
    """B or C in float32, [1, N], from what was loaded. An instruction for each number."""
    if loaded.dtype == gl.int32:
        low = (loaded << 16).to(gl.float32, bitcast=True)
        high = (loaded & -65536).to(gl.float32, bitcast=True)
        numbers = gl.join(low, high).reshape([2 * loaded.shape[0]])
    else:
        numbers = loaded.to(gl.float32)
    return gl.convert_layout(numbers, gl.SliceLayout(0, layout), assert_trivial=True)[None, :]


@gluon.jit
def decay_of(dt, rate):
    """rate: A · log2 e."""
    return gl.exp2(dt * rate)


@gluon.jit
def fed(x, dt):
    """What a channel adds to its numbers, but for B."""
    return x.to(gl.float32) * dt


@gluon.jit
def stepped(S, decay, dtx, B):
    """The state after a token. S: [TILE, N]; decay: a scalar or [1]; dtx: [TILE]; B: [1, N]."""
    layout: gl.constexpr = S.type.layout
    if decay.type.is_block():
        decay, _ = gl.broadcast(decay[:, None], S)
    else:
        decay = gl.full(S.shape, decay, gl.float32, layout)
    return gl.fma(decay, S, dtx[:, None] * B)


@gluon.jit
def advance(S, x, B, dt, rate):
    """The state after a token.

    S: [TILE, N]; x: [TILE]; B: as loaded; dt, rate: scalars.
    """
    layout: gl.constexpr = S.type.layout
    return stepped(S, decay_of(dt, rate), fed(x, dt), _numbers(B, layout))


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def output(S, C, x, skip):
    """y: [TILE], laid out as x. S: [TILE, N]; C: as loaded; x: [TILE]; skip: D."""
    layout: gl.constexpr = S.type.layout
    return output_of(S, _numbers(C, layout), x.to(gl.float32), skip)


@gluon.jit
def output_of(S, C, x, skip):
    """The same with C [1, N] and x in float32."""
    TILE: gl.constexpr = S.shape[0]
    N: gl.constexpr = S.shape[1]
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
    sums = gl.reduce(chains.reshape([TILE, N // 8, 8]), 2, _first)
    total = gl.convert_layout(gl.sum(sums, 1), x.type.layout)
    return gl.fma(gl.full(x.shape, skip, gl.float32, x.type.layout), x, total)


@gluon.jit
def shared_row(buffer, index, layout: gl.constexpr):
    """Row ``index`` of a buffer of shared memory, [..., elements]."""
    elements: gl.constexpr = buffer.shape[len(buffer.shape) - 1]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = _reinterpret(buffer, buffer.dtype, [buffer.numel // elements, elements], flat)
    return rows.index(index).load(layout)
