"""The Triton attention of tree nodes and of drafted blocks against naive.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.kernels.float8.torch import to_e4m3
from mamba_eagle.kernels.tree_attention import naive
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_attention.triton import (
    Config,
    choose_config,
    paged_tree_attention,
)
from mamba_eagle.kernels.tree_verify.naive import root_path
from mamba_eagle.layers.block_attention import block_mask

GARBAGE = 1e4  # in KV slots that must not be read
SCALE = 0.3

test_in_the_interpreter = in_the_interpreter


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class Case(NamedTuple):
    shape: Shape
    prefix: tuple[int, ...]  # one per request
    nodes: int  # new ones
    old: int = 0  # nodes in the pool already
    roots: int = 1
    chain: bool = False
    padding: int = 0  # requests that are none, after the others
    config: Config | None = None
    dtype: torch.dtype = torch.float32
    block: str = ""  # instead of a tree: full or causal
    window: int = 0
    sinks: bool = False


SMALL = Shape(6, 2, 20)
CUT = Config(rows=16, keys=16, splits=4, least=16, warps=4, stages=2)
CASES = {
    "one-node": Case(SMALL, (37, 0, 5), 1),
    "one-node-in-shares": Case(SMALL, (70, 1, 16, 33), 1, config=CUT),
    "tree": Case(SMALL, (21, 0), 7),
    "tree-in-shares": Case(SMALL, (50, 0, 17), 7, config=CUT),
    "tree-in-two-tiles-of-rows": Case(SMALL, (40, 3), 9, config=CUT),
    "chain": Case(SMALL, (9, 30), 6, chain=True),
    "new-lanes-below-old-ones": Case(SMALL, (20, 0), 3, old=6, roots=3),
    "lanes-in-shares": Case(SMALL, (50, 17), 3, old=3, roots=3, config=CUT),
    "first-lanes": Case(SMALL, (18,), 4, roots=4),
    "more-nodes-than-bits": Case(Shape(2, 2, 16), (19,), 3, old=70, roots=3),
    "64-nodes": Case(Shape(2, 1, 16), (19,), 64),
    "padded-batch": Case(SMALL, (20,), 5, old=2, padding=2, config=CUT),
    "head-of-80": Case(Shape(2, 1, 80), (33,), 3),
    "head-of-64": Case(Shape(2, 1, 64), (33,), 3),
    "head-of-256": Case(Shape(2, 1, 256), (33,), 3),
    "bfloat16": Case(SMALL, (37, 18), 5, old=2, config=CUT, dtype=torch.bfloat16),
    "float16": Case(SMALL, (37, 18), 5, old=2, config=CUT, dtype=torch.float16),
    "block": Case(SMALL, (40, 0), 7, block="full"),
    "block-with-sinks-in-shares": Case(SMALL, (50, 0), 7, block="full", sinks=True, config=CUT),
    "block-in-a-window": Case(SMALL, (45, 5), 7, block="causal", window=33, sinks=True, config=CUT),
    "block-longer-than-its-window": Case(SMALL, (45, 1), 7, block="full", window=3, config=CUT),
}


def gpu_cases() -> list[object]:
    nano, wide = Shape(40, 8, 128), Shape(32, 2, 128)
    cases = {
        "nano-decode": Case(nano, (1000, 0, 255, 4097), 1),
        "nano-8-nodes": Case(nano, (1000, 0, 255, 4097), 8),
        "nano-16-nodes": Case(nano, (8192,), 16),
        "nano-batch-of-40": Case(nano, tuple(range(0, 4000, 100)), 16),
        "nano-64-nodes": Case(nano, (1000, 77), 64),
        "nano-chain-of-24": Case(nano, (1000, 77), 24, chain=True),
        "nano-lanes": Case(nano, (1000, 0, 300), 8, old=48, roots=8),
        "nano-padded-batch": Case(nano, (1000, 300), 8, padding=6),
        "16-heads-a-key-head": Case(wide, (3000, 5), 16),
        "32-heads-of-80": Case(Shape(32, 32, 80), (700, 900), 9),
        "12-heads-of-256": Case(Shape(12, 2, 256), (700, 900), 16),
        "16-heads-of-64": Case(Shape(16, 8, 64), (700, 900), 3, old=9, roots=3),
        "more-nodes-than-bits": Case(nano, (500,), 10, old=90, roots=10),
        "block": Case(wide, (3000, 5), 8, block="full"),
        "block-in-a-window": Case(
            wide, (3000, 5, 1025), 8, block="causal", window=1024, sinks=True
        ),
    }
    found = []
    for name, case in cases.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found.append(pytest.param(case._replace(dtype=dtype), id=f"{name}-{dtype}"))
    for config in (
        Config(16, 64, 8, 128, 4, 3),
        Config(64, 32, 1, 64, 4, 4),
        Config(64, 128, 16, 128, 8, 2),
        Config(128, 64, 32, 256, 8, 2),
    ):
        case = cases["nano-16-nodes"]._replace(config=config, dtype=torch.bfloat16)
        found.append(pytest.param(case, id=f"nano-16-nodes-{config}"))
    return found


@dataclass
class Batch:
    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    pool_k: Tensor
    pool_v: Tensor
    slot_table: Tensor
    slots: Tensor
    prefix: Tensor
    own: Tensor
    visible: Tensor  # [b, T, E]
    sinks: Tensor | None

    def attend(self) -> Tensor:
        return paged_tree_attention(
            self.q,
            self.k,
            self.v,
            self.pool_k,
            self.pool_v,
            self.slot_table,
            self.slots,
            self.prefix,
            self.own,
            pack_paths(self.visible),
            SCALE,
            self.case.config,
            self.case.window,
            self.sinks,
        )


def random_parents(case: Case, generator: torch.Generator) -> list[int]:
    """Of a forest: a parent comes first, a root is its own."""
    if case.chain:
        return [max(i - 1, 0) for i in range(case.nodes)]
    below = range(case.roots, case.old + case.nodes)
    drawn = (int(torch.randint(i, (1,), generator=generator)) for i in below)
    return [*range(case.roots), *drawn]


def ancestor_matrix(parents: list[int]) -> Tensor:
    above = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above[node, root_path(parents, node)] = True
    return above


def make_batch(case: Case, seed: int = 0, spread: int = 1) -> Batch:
    """spread: how far apart in the pool the slots in use are."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, D = case.shape
    T, E = case.nodes, case.old + case.nodes
    b, real = len(case.prefix) + case.padding, len(case.prefix)
    positions, R = max(case.prefix) + E + 3, real + 2
    used = sum(case.prefix) + real * E
    order = torch.randperm(used + 20, generator=generator) * spread
    padding_slot = int(order.max()) + 1
    free = iter(order.tolist())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def filled(value: float) -> Tensor:
        shape = (padding_slot + 1, kv_heads, D)
        return torch.full(shape, value, dtype=case.dtype, device=DEVICE)

    pool_k, pool_v = filled(GARBAGE), filled(-GARBAGE)
    # what no prefix reaches names a slot of garbage
    garbage = order[-1]
    slot_table = torch.full((R, positions), int(garbage))
    slots = torch.full((b,), R - 1)
    slots[:real] = torch.randperm(R - 1, generator=generator)[:real]
    own = torch.full((b, E), padding_slot)
    visible = []
    for i in range(b):
        if case.block:
            visible.append(block_mask(T, case.window, case.block == "causal"))
        else:
            visible.append(ancestor_matrix(random_parents(case, generator))[case.old :])
        if i < real:
            own[i] = torch.tensor([next(free) for _ in range(E)])
            for position in range(case.prefix[i]):
                slot_table[slots[i], position] = next(free)
            written = torch.cat([slot_table[slots[i], : case.prefix[i]], own[i, : case.old]])
            at = written.to(DEVICE)
            for pool in (pool_k, pool_v):
                pool[at] = normal(len(written), kv_heads, D).to(pool)
    # as one product gives them, with a gate beside each query
    packed = normal(b * T, 2 * (heads + kv_heads), D).to(pool_k)
    queries, k, v = packed.split([2 * heads, kv_heads, kv_heads], dim=1)
    q = queries[:, ::2]
    prefix = torch.tensor([*case.prefix, *[0] * case.padding])
    indices = (slot_table, slots, prefix, own, torch.stack(visible))
    indices = (part.contiguous().to(DEVICE) for part in indices)
    sinks = normal(heads).to(q) if case.sinks else None
    return Batch(case, q, k, v, pool_k, pool_v, *indices, sinks)


def expected(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the real requests in float64, and both pools after the step."""
    case, outputs = batch.case, []
    T, old = case.nodes, case.old
    pools = [batch.pool_k.clone(), batch.pool_v.clone()]
    for i, length in enumerate(case.prefix):
        new = slice(i * T, i * T + T)
        for pool, made in zip(pools, (batch.k, batch.v)):
            pool[batch.own[i, old:]] = made[new]
        read = torch.cat([batch.slot_table[batch.slots[i], :length], batch.own[i]])
        keys, values = (pool[read] for pool in pools)
        before = torch.ones(T, length, dtype=torch.bool, device=DEVICE)
        if case.window:
            before = before.triu(length + 1 - case.window)
        visible = torch.cat([before, batch.visible[i]], dim=1)
        sinks = None if batch.sinks is None else batch.sinks.tolist()
        outputs.append(naive.masked_attention(batch.q[new], keys, values, visible, SCALE, sinks))
    return torch.cat(outputs), *pools


def check(batch: Batch) -> None:
    case = batch.case
    wanted, *pools = expected(batch)
    found = batch.attend()
    assert found.isfinite().all(), "padding rows among them"
    real = len(case.prefix) * case.nodes
    error = float((found[:real].double() - wanted).norm() / wanted.norm())
    print(f"relative error {error:.1e}")
    assert error < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[case.dtype]
    used = slice(0, len(batch.pool_k) - 1 if case.padding else None)  # the last one is the bin
    for pool, wanted_pool in zip((batch.pool_k, batch.pool_v), pools):
        assert torch.equal(pool[used], wanted_pool[used]), "new entries, and nothing else"


@runs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nodes_attend_to_their_prefix_and_path(case: Case) -> None:
    check(make_batch(case))


@runs_kernels
@pytest.mark.parametrize("name", ["one-node-in-shares", "tree", "lanes-in-shares", "bfloat16"])
def test_keys_and_values_are_kept_as_float8(name: str) -> None:
    """They are float8 numbers here, which rounding does not change: a small pool gives the same."""
    batch = make_batch(CASES[name])
    parts = ("k", "v", "pool_k", "pool_v")
    rounded = {part: to_e4m3(getattr(batch, part)) for part in parts}
    batch = replace(batch, **{part: value.to(batch.q.dtype) for part, value in rounded.items()})
    wanted, *pools = expected(batch)
    small = replace(batch, pool_k=rounded["pool_k"], pool_v=rounded["pool_v"])
    found = small.attend()
    real = len(batch.case.prefix) * batch.case.nodes
    error = (found[:real].double() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if batch.q.dtype == torch.float32 else 6e-3)
    for pool, wanted_pool in zip((small.pool_k, small.pool_v), pools):
        assert torch.equal(pool.to(wanted_pool.dtype), wanted_pool)


@runs_kernels
def test_keys_beyond_float8_become_its_largest_number() -> None:
    batch = make_batch(CASES["tree"])
    stored = to_e4m3(batch.pool_k), to_e4m3(batch.pool_v)
    small = replace(batch, k=1e4 * batch.k, pool_k=stored[0], pool_v=stored[1])
    assert small.attend().isfinite().all()
    assert small.pool_k.float().isfinite().all()


@runs_kernels
def test_shares_of_a_prefix_change_nothing() -> None:
    case = CASES["tree-in-shares"]
    whole = make_batch(case._replace(config=CUT._replace(splits=1))).attend()
    for splits, least in ((2, 16), (4, 32), (8, 16)):
        config = CUT._replace(splits=splits, least=least)
        cut = make_batch(case._replace(config=config)).attend()
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "shape", [Shape(40, 8, 128), Shape(32, 2, 128), Shape(32, 32, 80), Shape(4, 4, 256)]
)
def test_every_batch_has_a_config_that_the_kernel_takes(shape: Shape, itemsize: int) -> None:
    for batch in (1, 3, 8, 32, 256):
        for nodes in (1, 2, 8, 16, 33, 64):
            config = choose_config(batch, nodes, *shape, 4096, itemsize)
            for value in (config.rows, config.keys, config.splits):
                assert value & (value - 1) == 0, config
            assert config.rows >= 16 and config.keys >= 16, config
            assert config.least % config.keys == 0, config


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", gpu_cases())
def test_real_sizes(case: Case) -> None:
    check(make_batch(case))


@pytest.mark.gpu
@runs_kernels
def test_slots_beyond_two_billion_elements() -> None:
    case = Case(Shape(40, 8, 128), (1000, 300), 8, old=8, roots=8, dtype=torch.bfloat16)
    batch = make_batch(case, spread=1700)
    assert batch.pool_k.numel() > 2**31
    check(batch)


@pytest.mark.gpu
@runs_kernels
def test_a_graph_replays_with_other_lengths_and_waits_for_nothing() -> None:
    case = Case(Shape(40, 8, 128), (3000, 1, 700), 16, dtype=torch.bfloat16)
    batch = make_batch(case)
    batch.attend()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = batch.attend()
    for lengths in ((3000, 1, 700), (0, 3000, 64), (129, 128, 127)):
        other = make_batch(case._replace(prefix=lengths), seed=1)
        table, size = other.slot_table, len(other.pool_k) - 1
        batch.slot_table[:, : table.shape[1]] = table
        batch.pool_k[:size], batch.pool_v[:size] = other.pool_k[:size], other.pool_v[:size]
        for mine, new in zip(
            (batch.q, batch.k, batch.v, batch.slots, batch.prefix, batch.own, batch.visible),
            (other.q, other.k, other.v, other.slots, other.prefix, other.own, other.visible),
        ):
            mine.copy_(new)
        wanted = expected(other)[0]
        graph.replay()
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error < 6e-3, lengths
