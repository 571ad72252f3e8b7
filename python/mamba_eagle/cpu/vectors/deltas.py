"""A delta rule token by token, in vector instructions: states after rows and after tree nodes.

    u = r − β·decay·(S k)      S ← decay·S + u kᵀ      o = S q

The rows of a journal have u, so they are Mamba2's (states.py); a node's is found from its parent's
state. As there, in this order and with these operations alone. A node reads whole rows of the
state before it writes any, so what lies at hand is a block of 16 rows, in the core's cache: its
sums are then those of 16 channels side by side.
"""

from typing import Any

from mamba_eagle.cpu.vectors.code import F32, FLOATS, I64, LANES, Code, vector_code
from mamba_eagle.cpu.vectors.states import AFTER, AHEAD, BEFORE, TILE, StateCode
from mamba_eagle.cpu.vectors.sums import sums_across
from mamba_eagle.machine_code import strictly


@strictly
def block_room_for(nodes, N):  # noqa: ANN001, ANN201
    """Numbers of the block at hand, and of those that are kept for nodes."""
    return (1 + nodes) * LANES * N


class _Block(StateCode):
    """Blocks of 16 rows of a state."""

    def __init__(self, code: Code, arguments: Any) -> None:
        super().__init__(code, arguments)
        self.sums = code.variables(LANES)
        self.vectors = self.builder.udiv(self.given.N, I64(LANES))
        self.size = self.builder.mul(self.given.N, I64(LANES))
        self.block = self.given.sums

    def write(self, first: Any, last: Any) -> None:
        """Blocks [first, last)."""
        code, b = self.code, self.builder
        with code.loop(b.sub(last, first)) as index:
            p = b.mul(b.add(first, index), I64(LANES))
            at = b.mul(p, self.given.N)
            for row in range(0, LANES, TILE):
                with code.loop(self.vectors) as v:
                    self._journal(p, at, range(row, row + TILE), b.mul(v, I64(LANES)))
            with code.loop(self.given.T) as visit:
                self._visit(p, visit)
            with b.if_then(self.writes(AFTER)):
                self._copy(self.block, I64(0), self.given.state, at)

    def _in_block(self, row: int, n: Any) -> Any:
        return self.builder.add(self.builder.mul(I64(row), self.given.N), n)

    def _journal(self, p: Any, at: Any, rows: range, n: Any) -> None:
        """A vector of some rows of the state, after the journal, to the block at hand."""
        code, b, state = self.code, self.builder, self.given.state
        places = [self._in_block(row, n) for row in rows]
        for place, own in zip(places, self.state, strict=True):
            code.prefetch(code.at(state, b.add(at, place), F32), AHEAD, 1)
            b.store(code.vector(state, b.add(at, place), F32), own)
        with code.loop(self.given.J) as token:
            decay = self._decay(token)
            key = code.vector(self.given.rows, b.add(self._key(token), n), F32)
            for row, own in zip(rows, self.state, strict=True):
                b.store(self._grown(b.load(own), decay, self._added(token, p, row), key), own)
        with b.if_then(self.writes(BEFORE)):
            for place, own in zip(places, self.state, strict=True):
                code.store(b.load(own), state, b.add(at, place))
        for place, own in zip(places, self.state, strict=True):
            code.store(b.load(own), self.block, place)

    def _grown(self, before: Any, decay: Any, added: Any, key: Any) -> Any:
        return self.code.multiply_add(added, key, self.builder.fmul(before, decay))

    def _decay(self, token: Any) -> Any:
        return self.code.splat(self.code.load(self.given.decay, token, F32))

    def _key(self, token: Any) -> Any:
        """Where a token's key begins among the rows."""
        b, row = self.builder, self.code.load(self.given.ids, token, I64)
        return b.add(b.mul(row, self.given.row), self.given.of_B)

    def _of_added(self, token: Any, p: Any) -> Any:
        return self.builder.add(self.builder.mul(token, self.given.P), p)

    def _added(self, token: Any, p: Any, row: int) -> Any:
        """u of a row, in all lanes."""
        at = self.builder.add(self._of_added(token, p), I64(row))
        return self.code.splat(self.code.load(self.given.added, at, F32))

    def _visit(self, p: Any, visit: Any) -> None:
        """A node: u and the output of 16 channels, and the block after it."""
        code, b = self.code, self.builder
        node = code.load(self.given.order, visit, I64)
        token = b.add(self.given.J, node)
        self.from_parent(node, visit)
        self._sum(lambda rows, n: self._read(token, rows, n))
        at, added = self._of_added(token, p), self.given.added
        share = code.splat(code.load(self.given.read, token, F32))
        u = code.multiply_add(share, self._total(), code.vector(added, at, F32))
        code.store(u, added, at)
        self._sum(lambda rows, n: self._step(node, token, p, rows, n))
        out = b.add(b.mul(node, self.given.out_row), p)
        code.store(self._total(), self.given.out, out)
        with b.if_then(self.is_kept(node)):
            self._copy(self.block, I64(0), self.given.tiles, b.mul(node, self.size))

    def _sum(self, add: Any) -> None:
        """``add(rows, n)`` for all of the block, with sums that begin at 0."""
        code, b = self.code, self.builder
        for own in self.sums:
            b.store(FLOATS([0.0] * LANES), own)
        for row in range(0, LANES, TILE):
            with code.loop(self.vectors) as v:
                add(range(row, row + TILE), b.mul(v, I64(LANES)))

    def _total(self) -> Any:
        return sums_across(self.builder, [self.builder.load(own) for own in self.sums])

    def _read(self, token: Any, rows: range, n: Any) -> None:
        key = self.code.vector(self.given.rows, self.builder.add(self._key(token), n), F32)
        for row in rows:
            self._add_product(row, self.code.vector(self.block, self._in_block(row, n), F32), key)

    def _step(self, node: Any, token: Any, p: Any, rows: range, n: Any) -> None:
        code, b = self.code, self.builder
        decay = self._decay(token)
        key = code.vector(self.given.rows, b.add(self._key(token), n), F32)
        of_query = b.add(b.mul(node, self.given.C_row), n)
        query = code.vector(self.given.C, of_query, F32)
        for row in rows:
            at = self._in_block(row, n)
            before = code.vector(self.block, at, F32)
            after = self._grown(before, decay, self._added(token, p, row), key)
            code.store(after, self.block, at)
            self._add_product(row, after, query)

    def _add_product(self, row: int, x: Any, y: Any) -> None:
        own = self.sums[row]
        self.builder.store(self.code.multiply_add(x, y, self.builder.load(own)), own)

    def take(self, node: Any) -> None:
        at = self.builder.mul(node, self.size)
        self._copy(self.given.tiles, at, self.block, I64(0))

    def _copy(self, source: Any, source_at: Any, target: Any, at: Any) -> None:
        code, b = self.code, self.builder
        with code.loop(self.given.N) as v:  # vectors of a block
            place = b.mul(v, I64(LANES))
            value = code.vector(source, b.add(source_at, place), F32)
            code.store(value, target, b.add(at, place))


@vector_code
def step_blocks(code: Code, arguments: Any, first: Any, last: Any) -> None:
    _Block(code, arguments).write(first, last)


@strictly
def step_deltas(given, P):  # noqa: ANN001, ANN201
    """A call for states whose sizes are multiples of 16. given: the address of ``abi.States``;
    ``added`` of the nodes: r, and afterwards u."""
    step_blocks(given, 0, P // LANES)
