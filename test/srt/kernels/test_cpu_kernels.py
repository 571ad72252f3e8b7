"""The fused CPU kernels against the readable ones and, for functions, against float64.

Those of the verify schemes are in test_verify_schemes.py and test_fused_schemes.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensor_checks import host_backend, torch_backend
from torch import Tensor
from verify_rig import random_tree

from mamba_eagle.backend.cpu.layer_ops import CpuOps, FewRowsLinear
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.gated_norm.torch import gated_group_rms_norm
from mamba_eagle.kernels.rms_norm.torch import rms_norm
from mamba_eagle.kernels.tree_attention.torch import masked_attention
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import GatedGroupRMSNorm, RMSNorm

torch.set_num_threads(1)
pytest.importorskip("numba")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ── functions ──


def each(function, values: np.ndarray) -> np.ndarray:
    return np.array([function(value) for value in values], np.float64)


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_exp_silu_and_softplus() -> None:
    """To a few units in the last place, over all that neither overflows nor underflows."""
    values = np.linspace(-86.9, 87.9, 4001, dtype=np.float32)
    assert ulps(each(numba_math.exp, values), np.exp(values.astype(np.float64))) <= 2
    assert numba_math.exp(np.float32(0.0)) == 1.0
    values = np.linspace(-30, 30, 2001, dtype=np.float32)
    wide = values.astype(np.float64)
    assert ulps(each(numba_math.silu, values), wide / (1 + np.exp(-wide))) <= 4
    assert ulps(each(numba_math.softplus, values), np.log1p(np.exp(wide))) <= 4
    huge = np.array([-1e4, 1e4], np.float32)
    for function in (numba_math.silu, numba_math.softplus):
        assert each(function, huge).tolist() == [pytest.approx(0.0, abs=1e-30), 1e4]


def test_exp_of_what_underflows_adds_nothing() -> None:
    """Decays of a token that forgets everything."""
    for value in (-88.0, -1e4, -1e30, -np.inf):
        assert 0.0 <= numba_math.exp(np.float32(value)) < 1e-37


# ── products and norms ──


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("outputs, inputs", [(7, 33), (40, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_few_rows(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """A layer whose weights are bfloat16 numbers, before and after it is prepared."""
    layer = Linear(inputs, outputs, bias).requires_grad_(False)
    layer.weight.copy_(normal(outputs, inputs, seed=1).bfloat16())
    if layer.bias is not None:
        layer.bias.copy_(normal(outputs, seed=2))
    x = normal(rows, inputs, seed=3)
    exact = F.linear(x.double(), layer.weight.double())
    if layer.bias is not None:
        exact += layer.bias
    for prepare in (False, True):
        if prepare:
            layer.prepare(host_backend().layer_ops)
            assert isinstance(layer._packed, FewRowsLinear)
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_weights_that_bfloat16_would_round_stay_float32() -> None:
    layer = Linear(32, 20).requires_grad_(False)
    layer.weight.copy_(normal(20, 32))
    layer.prepare(host_backend().layer_ops)
    x = normal(3, 32, seed=1)
    exact = x.double() @ layer.weight.double().t()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size, group", [(256, 128), (36, 36), (30, 15), (7, 1)])
def test_norms(rows: int, size: int, group: int) -> None:
    """Layers, before and after they are prepared; rows of zeros stay zeros."""
    x, gate = 3 * normal(rows, size), normal(rows, 2 * size, seed=1)[:, size:]
    x[0] = 0.0
    plain, gated = RMSNorm(size, 1e-5), GatedGroupRMSNorm(size, size // group, 1e-5)
    for layer in (plain, gated):
        layer.requires_grad_(False).weight.copy_(normal(size, seed=2))
    expected = rms_norm(x, plain.weight, 1e-5)
    expected_gated = gated_group_rms_norm(x, gate, gated.weight, group, 1e-5)
    for prepare in (False, True):
        if prepare:
            plain.prepare(host_backend().layer_ops)
            gated.prepare(host_backend().layer_ops)
            assert isinstance(plain._ops, CpuOps) and isinstance(gated._ops, CpuOps)
        torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gated(x, gate), expected_gated, rtol=1e-5, atol=1e-6)
        assert not plain(x)[0].any()


# ── attention of trees in the pool ──


@pytest.mark.parametrize("heads, kv_heads, D", [(4, 2, 64), (3, 1, 20), (3, 3, 7)])
@pytest.mark.parametrize("b, T", [(1, 1), (1, 12), (2, 5), (3, 1), (4, 16)])
@pytest.mark.parametrize("old", [0, 3], ids=["all-new", "some-in-the-pool"])
def test_paged_tree_attention_is_masked_attention(
    b: int, T: int, heads: int, kv_heads: int, D: int, old: int
) -> None:
    """Nodes see prefix and ancestors; other slots hold huge values. ``old`` nodes of the forest
    were written by a call before."""
    from mamba_eagle.kernels.tree_attention.cpu import paged_tree_attention

    generator = torch.Generator().manual_seed(heads)
    E, slots = T + old, 300
    tree = random_tree(b, E, 5, generator)
    order = torch.randperm(slots, generator=generator)
    prefix = torch.tensor([17, 0, 1, 20])[:b].contiguous()
    used = torch.tensor([4, 0, 2, 1])[:b].contiguous()
    table = torch.zeros(5, 20, dtype=torch.int64)
    own = order[: b * E].view(b, E).contiguous()
    table[used] = order[b * E : b * E + 20 * b].view(b, 20)
    pools = torch.full((2, slots, kv_heads, D), 1e4)
    for row in range(b):
        seen = table[used[row], : prefix[row]]
        pools[:, seen] = torch.randn(2, len(seen), kv_heads, D, generator=generator)
    q = torch.randn(b, E, heads, D, generator=generator)
    kv = torch.randn(2, b, E, kv_heads, D, generator=generator)
    pools[:, own[:, :old].flatten()] = kv[:, :, :old].flatten(1, 2)

    out = torch.empty(b * T, heads, D)
    new = (q[:, old:], kv[0, :, old:], kv[1, :, old:])
    paged_tree_attention(
        *(part.flatten(0, 1).contiguous().numpy() for part in new),
        *pools.numpy(),
        *(part.numpy() for part in (table, used, prefix, own, tree.parents)),
        0.3,
        out.numpy(),
    )
    assert torch.equal(pools[:, own.flatten()], kv.flatten(1, 2)), "new nodes are in the pool"
    for row in range(b):
        read = torch.cat([table[used[row], : prefix[row]], own[row]])
        before = torch.ones(E, int(prefix[row]), dtype=torch.bool)
        seen = torch.cat([before, tree.ancestors[row]], dim=1)
        keys, values = pools[:, read]
        expected = masked_attention(q[row, None], keys[None], values[None], seen[None], 0.3)
        found = out.view(b, T, heads, D)[row]
        torch.testing.assert_close(found, expected[0, old:], rtol=1e-4, atol=1e-5)


# ── accepting ──


@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_accept_and_commit_are_those_of_torch(nodes: int) -> None:
    """Walks, stop tokens, requests near or past their end, nodes without a token (-1)."""
    generator = torch.Generator().manual_seed(nodes)
    ends = set()
    for trial in range(90):
        b, depth, vocab = 4, min(nodes, 5), 4
        tree = random_tree(b, nodes, depth - 1, generator)
        tree = tree._replace(tokens=torch.randint(0, vocab, (b, nodes), generator=generator))
        target = torch.randint(0 if trial < 60 else -1, vocab, (b, nodes), generator=generator)
        slots = torch.randperm(6, generator=generator)[:b]
        kv_slots = torch.randperm(b * nodes, generator=generator).view(b, nodes)
        made = []
        for backend in (host_backend(), torch_backend()):
            table = RequestTable(6, 30, torch.device("cpu"))
            table.processed[:] = torch.arange(6) * 3
            table.remaining[:] = torch.tensor([0, 1, 2, 3, 9, 9])
            table.last_token[:] = 77
            table.set_stop_tokens(2, frozenset())
            table.set_stop_tokens(4, frozenset({0, 3}))
            table.set_stop_tokens(5, frozenset({2}))
            accepted = backend.accept_tokens(table, slots, tree, target, depth)
            backend.commit_tokens(table, slots, kv_slots, accepted)
            where = [table.kv_slots[slot, : table.processed[slot]].tolist() for slot in slots]
            assert accepted.tokens.min() >= 0
            parts = (part.tolist() for part in accepted)
            walks = [(n[:c], t[:c], c, end) for n, t, c, end in zip(*parts)]
            made.append((walks, where, table.processed, table.last_token, table.remaining))
        fused, plain = made
        assert fused[:2] == plain[:2]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused[2:], plain[2:]))
        ends |= {(count, end) for _, _, count, end in fused[0]}
    wanted = {(0, True), (0, False), (1, True), (1, False)}
    assert ends >= (wanted if nodes == 1 else wanted | {(2, True), (2, False)})
