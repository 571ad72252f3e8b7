"""The recurrence token by token, in vector instructions: states after rows and after tree nodes.

    S ← decay·S + (dt·x) Bᵀ,    y = S C + D x

For each row of a journal, then for each node from its parent's state, in this order and with these
operations alone, each rounded as IEEE 754 says: no compiler may change one. So the state after a
token, and the token's output, have the same bits however many rows and nodes a call has, and
whether the state was written in between.

A tile of a state stays in registers while all rows and nodes go over it. Sums over the state size
are made as vectors, 16 rows of the state side by side, and added up across these together.
"""

from abc import abstractmethod
from math import exp
from typing import Any

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.vector_math import ZERO
from mamba_eagle.cpu.vectors.code import F32, FLOATS, I64, LANES, Code, has, vector_code
from mamba_eagle.cpu.vectors.sums import sums_across
from mamba_eagle.machine_code import strictly

# Vectors of a state in a tile: with rows of inputs, sums and factors they fill the registers.
TILE = 16 if has("avx512f") else 4
# When the state is written: after the journal, or after the last node, which is to be a chain's
BEFORE, AFTER = 1, 2
AHEAD = 8192  # bytes, between what is asked for and what is read: about 200 ns


@strictly
def room_for(nodes):  # noqa: ANN001, ANN201
    """Numbers of SUMS and TILES."""
    return nodes * (LANES + TILE) * LANES


@strictly
def depth_first(parents, order, kept):  # noqa: ANN001, ANN201
    """The order in which nodes are visited: each right after its parent, or after the subtree of a
    sibling. kept: whether a node has more than one child, which then begin at a copy of its state.

    parents, order, kept [T].
    """
    T = len(parents)
    size, taken = np.ones(T, np.int64), np.ones(T, np.int64)  # of subtrees; visits handed out
    place = np.zeros(T, np.int64)
    for i in range(T - 1, 0, -1):
        size[parents[i]] += size[i]
    for i in range(T):
        kept[i], above = 0, parents[i]
        if i > 0:
            place[i] = place[above] + taken[above]
            kept[above] = taken[above] > 1 or kept[above]
            taken[above] += size[i]
        order[place[i]] = i


class StateCode:
    """Code for a part of a state, which is stepped from node to node."""

    def __init__(self, code: Code, arguments: Any) -> None:
        self.code, self.builder = code, code.builder
        self.given = code.fields(arguments, abi.States)
        self.state = code.variables(TILE)

    def writes(self, when: int) -> Any:
        """Whether the state is written then."""
        return self.builder.icmp_unsigned("==", self.given.writes, I64(when))

    def is_kept(self, node: Any) -> Any:
        kept = self.code.load(self.given.kept, node, I64)
        return self.builder.icmp_signed("!=", kept, I64(0))

    def from_parent(self, node: Any, visit: Any) -> None:
        """The state after the parent, which is at hand where that was visited just before."""
        code, b = self.code, self.builder
        with b.if_then(b.icmp_signed(">", visit, I64(0))):
            before = code.load(self.given.order, b.sub(visit, I64(1)), I64)
            parent = code.load(self.given.parents, node, I64)
            with b.if_then(b.icmp_signed("!=", parent, before)):
                self.take(parent)

    @abstractmethod
    def take(self, node: Any) -> None:
        """The state that was kept after a node."""


class _Tile(StateCode):
    """Tiles of ``rows`` rows of a state by ``vectors`` vectors."""

    def __init__(self, code: Code, arguments: Any, vectors: int) -> None:
        super().__init__(code, arguments)
        self.rows, self.vectors = TILE // vectors, vectors

    def places(self) -> list[tuple[int, int]]:
        """Row and vector of each of the tile's vectors."""
        return [divmod(i, self.vectors) for i in range(TILE)]

    def write(self, first: Any, last: Any) -> None:
        """Blocks [first, last) of 16 rows of the state."""
        code, b = self.code, self.builder
        chunks = b.udiv(self.given.N, I64(self.vectors * LANES))
        with code.loop(b.sub(last, first)) as index:
            p = b.mul(b.add(first, index), I64(LANES))
            with code.loop(I64(LANES // self.rows)) as part:
                own = b.mul(part, I64(self.rows))
                self._tile(b.add(p, own), own, I64(0), first=True)
                with code.loop(b.sub(chunks, I64(1))) as chunk:
                    self._tile(b.add(p, own), own, b.add(chunk, I64(1)), first=False)
            with code.loop(self.given.T) as node:
                self._output(p, node)

    def _tile(self, p: Any, own: Any, chunk: Any, first: bool) -> None:
        """p: first row of the state; own: the same within its block; first: of the chunks."""
        code, b = self.code, self.builder
        n = b.mul(chunk, I64(self.vectors * LANES))
        state, size, journal = self.given.state, self.given.N, self.given.J
        ats = [code.sum(b.mul(b.add(p, I64(r)), size), n, I64(v * LANES)) for r, v in self.places()]
        for at, place in zip(ats, self.state, strict=True):
            code.prefetch(code.at(state, at, F32), AHEAD, 1)
            b.store(code.vector(state, at, F32), place)
        with code.loop(journal) as row:
            self._advance(row, p, n)
        self._write_state(BEFORE, ats)
        with code.loop(self.given.T) as visit:
            node = code.load(self.given.order, visit, I64)
            self.from_parent(node, visit)
            self._advance(b.add(journal, node), p, n)
            self._add_products(node, own, n, first)
            with b.if_then(self.is_kept(node)):
                for i, place in enumerate(self.state):
                    code.store(b.load(place), self.given.tiles, self._kept(node, i))
        self._write_state(AFTER, ats)

    def _write_state(self, when: int, ats: list[Any]) -> None:
        code, b = self.code, self.builder
        with b.if_then(self.writes(when)):
            for at, place in zip(ats, self.state, strict=True):
                code.store(b.load(place), self.given.state, at)

    def _advance(self, row: Any, p: Any, n: Any) -> None:
        """The tile's state after one more row."""
        code, b = self.code, self.builder
        decay = code.splat(code.load(self.given.decay, row, F32))
        given = b.mul(code.load(self.given.ids, row, I64), self.given.row)
        given = code.sum(given, self.given.of_B, n)
        B = [
            code.vector(self.given.rows, b.add(given, I64(v * LANES)), F32)
            for v in range(self.vectors)
        ]
        at = b.add(b.mul(row, self.given.P), p)
        for r in range(self.rows):
            added = code.splat(code.load(self.given.added, b.add(at, I64(r)), F32))
            for v, own in enumerate(B):
                place = self.state[r * self.vectors + v]
                kept = b.fmul(b.load(place), decay)
                b.store(code.multiply_add(added, own, kept), place)

    def take(self, node: Any) -> None:
        for i, place in enumerate(self.state):
            found = self.code.vector(self.given.tiles, self._kept(node, i), F32)
            self.builder.store(found, place)

    def _kept(self, node: Any, i: int) -> Any:
        return self.builder.add(self.builder.mul(node, I64(TILE * LANES)), I64(i * LANES))

    def _add_products(self, node: Any, own: Any, n: Any, first: bool) -> None:
        code, b = self.code, self.builder
        of_C = b.add(b.mul(node, self.given.C_row), n)
        C = [
            code.vector(self.given.C, b.add(of_C, I64(v * LANES)), F32) for v in range(self.vectors)
        ]
        for r in range(self.rows):
            at = b.mul(b.add(b.mul(node, I64(LANES)), b.add(own, I64(r))), I64(LANES))
            sums = self.given.sums
            total = FLOATS([0.0] * LANES) if first else code.vector(sums, at, F32)
            for v, factor in enumerate(C):
                total = code.multiply_add(b.load(self.state[r * self.vectors + v]), factor, total)
            code.store(total, sums, at)

    def _output(self, p: Any, node: Any) -> None:
        """y of 16 channels: what the products of 16 rows of the state add up to, and D x."""
        code, b = self.code, self.builder
        at = b.mul(node, I64(LANES * LANES))
        sums = [code.vector(self.given.sums, b.add(at, I64(i * LANES)), F32) for i in range(LANES)]
        row = code.load(self.given.ids, b.add(self.given.J, node), I64)
        of_x = code.sum(b.mul(row, self.given.row), self.given.of_x, p)
        x = code.vector(self.given.rows, of_x, F32)
        skip = code.splat(code.load(self.given.skip, I64(0), F32))
        y = code.multiply_add(skip, x, sums_across(b, sums))
        code.store(y, self.given.out, b.add(b.mul(node, self.given.out_row), p))


def _over_vectors(vectors: int) -> Any:
    def write(code: Code, arguments: Any, first: Any, last: Any) -> None:
        _Tile(code, arguments, vectors).write(first, last)

    return vector_code(write)


step_by_four, step_by_two, step_by_one = (_over_vectors(vectors) for vectors in (4, 2, 1))


@strictly
def step_states(given, P, N):  # noqa: ANN001, ANN201
    """A call for states whose sizes are multiples of 16. given: the address of ``abi.States``."""
    if N % (4 * LANES) == 0:
        step_by_four(given, 0, P // LANES)
    elif N % (2 * LANES) == 0:
        step_by_two(given, 0, P // LANES)
    else:
        step_by_one(given, 0, P // LANES)


@strictly
def step_odd_states(  # noqa: ANN201, PLR0913
    S, decay, added, read, rows, of_x, of_B, ids, J, writes, parents, C, skip, out
):  # noqa: ANN001
    """The same for any size, and that of deltas.py where ``read`` is not empty. S [P, N]; decay and
    read [J + T], added [(J + T) * P]; rows [W, …], x and B from columns of_x and of_B on; ids
    [J + T]; parents [T]; C [T, N]; out [T, P]."""
    (P, N), T, is_delta = S.shape, C.shape[0], len(read) > 0
    last, states = np.empty(N, np.float32), np.empty((T, N), np.float32)
    for p in range(P):
        for n in range(N):
            last[n] = S[p, n]
        for k in range(J):
            row, more = rows[ids[k]], added[k * P + p]
            for n in range(N):
                last[n] = decay[k] * last[n] + more * row[of_B + n]
        if writes == BEFORE:
            for n in range(N):
                S[p, n] = last[n]
        for i in range(T):
            row, own, found, total = rows[ids[J + i]], states[i], ZERO, ZERO
            before = states[parents[i]] if i > 0 else last
            if is_delta:
                for n in range(N):
                    found += before[n] * row[of_B + n]
                added[(J + i) * P + p] += read[J + i] * found
            more = added[(J + i) * P + p]
            for n in range(N):
                own[n] = decay[J + i] * before[n] + more * row[of_B + n]
                total += own[n] * C[i, n]
            out[i, p] = total if is_delta else total + skip * row[of_x + p]
        if writes == AFTER:
            for n in range(N):
                S[p, n] = states[T - 1, n]


@strictly
def decay_of(step, rate):  # noqa: ANN001, ANN201
    """exp(dt A) of a row."""
    return np.float32(exp(step * rate))
