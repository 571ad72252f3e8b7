"""The Triton verify and fold of delta rules against the recurrence, token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from forms import DEVICE, GPU, in_the_interpreter, runs_kernels
from gluon_rig import interpreted
from tensor_checks import Draw, relative_error
from torch import Tensor
from triton_rig import BFLOAT16_ERROR, assert_mostly_equal, to_device, tree_layout
from verify_rig import chain_tree, random_tree

from mamba_eagle.kernels.delta_rule import gluon, naive, triton
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.delta_rule.triton import tree_verify
from mamba_eagle.kernels.delta_rule.triton_fold import fold_journals
from mamba_eagle.kernels.delta_rule.triton_gates import delta_gates
from mamba_eagle.kernels.gpu import capability
from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes, TreeLayout

GARBAGE = 1e15  # in rows that must not be read
EPS = 1e-6

test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    max_journal: int
    journal_lens: tuple[int, ...]  # one per request
    channels: bool = False
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    max_beta: float = 1.0
    decay: float = 1.0  # of a token, on average
    alike: float = 0.0  # how much of a key all keys have in common
    chain: bool = False


SMALL = Sizes(2, 16, 1, 16)
WIDE = Sizes(1, 64, 1, 64)  # a head has two tiles, a key two parts
CASES = {
    "shared-keys": Case(Sizes(4, 16, 2, 16), 4, 12, (12, 7)),
    "tree": Case(SMALL, 5, 12, (12, 0, 7)),
    "two-tiles": Case(WIDE, 6, 5, (5, 2)),
    "decode": Case(SMALL, 1, 9, (9, 0, 4)),
    "64-nodes": Case(Sizes(1, 16, 1, 16), 64, 2, (2, 1)),
    "beta-2": Case(SMALL, 7, 6, (6, 3), max_beta=2.0),
    "keys-alike": Case(SMALL, 16, 16, (16,), max_beta=2.0, decay=1e-3, alike=0.99, chain=True),
    "forgets-all": Case(SMALL, 9, 16, (16, 5), decay=200.0),  # e**-3000 in a journal
    "bfloat16": Case(SMALL, 5, 12, (12, 0), dtype=torch.bfloat16),
    "bfloat16-state": Case(SMALL, 5, 12, (12, 7), dtype=torch.bfloat16, state_dtype=torch.bfloat16),
    "channels": Case(WIDE, 3, 12, (7, 12), channels=True),
    "channels-decode": Case(SMALL, 1, 9, (9, 0), channels=True),
    "channels-forget-all": Case(SMALL, 9, 16, (16, 5), channels=True, decay=200.0),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
QWEN_27B, QWEN_35B = Sizes(48, 128, 16, 128), Sizes(32, 128, 16, 128)
GPU_CASES = {
    f"{name}-{nodes}{'-channels' if channels else ''}": Case(
        sizes, nodes, 32, (32, 0, 17), channels=channels, dtype=torch.bfloat16
    )
    for name, sizes in (("27b", QWEN_27B), ("35b", QWEN_35B))
    for nodes in (1, 4, 8, 16, 64)
    for channels in (False, True)
}

IN_REGISTERS = Case(Sizes(4, 64, 2, 64), 4, 16, (16, 0, 3), dtype=torch.bfloat16)
FEW_NODES = {
    **{f"{n}-nodes": IN_REGISTERS._replace(nodes=n) for n in (1, 2, 3, 4, 5, 8)},
    "no-journal": IN_REGISTERS._replace(max_journal=0, journal_lens=(0, 0)),
    "longest-journal": IN_REGISTERS._replace(max_journal=32, journal_lens=(32, 17)),
    "wide": IN_REGISTERS._replace(sizes=Sizes(1, 128, 1, 128)),
    "float16": IN_REGISTERS._replace(dtype=torch.float16),
    "16-bit-state": IN_REGISTERS._replace(state_dtype=torch.bfloat16),
    "keys-alike": IN_REGISTERS._replace(nodes=8, max_beta=2.0, decay=1e-3, alike=0.99, chain=True),
    "forgets-all": IN_REGISTERS._replace(decay=200.0),
}


@dataclass
class Batch:
    case: Case
    rows: DeltaRows  # with a journal as the recurrence leaves it
    gates: Tensor
    convolved: Tensor
    state: Tensor
    step: TreeLayout
    outputs: list[list[naive.Node]]  # of each request's nodes
    folded: list[Tensor]  # each request's state after its journal

    def verify(self) -> Tensor:
        inputs = (self.rows, self.gates, self.convolved, self.state, self.step)
        return tree_verify(*inputs, self.case.sizes, EPS)


class Random:
    def __init__(self, case: Case) -> None:
        self.case, self.draw = case, Draw(0)

    def tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """Gates [n, GATES] and convolved channels [n, 2*G*N + H*P]."""
        case, draw, (H, P, G, N) = self.case, self.draw, self.case.sizes
        width = H * N if case.channels else H
        g = -F.softplus(draw.normal(n, width)) * case.decay
        beta = draw.normal(n, H).sigmoid() * case.max_beta
        convolved = draw.normal(n, 2 * G * N + H * P)
        convolved[:, G * N : 2 * G * N] *= 1 - case.alike
        convolved[:, G * N : 2 * G * N] += case.alike
        return torch.cat([g, beta], dim=1), convolved.to(case.dtype)

    def rule(self, gates: Tensor, convolved: Tensor) -> naive.Tokens:
        H, P, G, N = self.case.sizes
        q, k, v = convolved.double().split([G * N, G * N, H * P], dim=1)

        def unit(flat: Tensor) -> Tensor:
            each = flat.unflatten(1, (G, N)).repeat_interleave(H // G, dim=1)
            return each / (each.square().sum(-1, keepdim=True) + EPS).sqrt()

        g, beta = gates.split([gates.shape[1] - H, H], dim=1)
        q, k, v = unit(q) * N**-0.5, unit(k), v.unflatten(1, (H, P))
        return naive.gated_delta(q, k, v, g.unflatten(1, (H, -1)), beta)


def make_batch(case: Case) -> Batch:
    random, (H, P, G, N) = Random(case), case.sizes
    draw, generator = random.draw, random.draw.generator
    b, T, M = len(case.journal_lens), case.nodes, case.max_journal
    R, W, S = b + 1, M + T, b + 2
    slots = torch.randperm(R, generator=generator)[:b]
    state_slots = torch.randperm(S, generator=generator)[:b]
    gate_size = (H * N if case.channels else H) + H
    rows = DeltaRows(
        torch.full((R, W, gate_size), GARBAGE),
        torch.full((R, W, G * N), min(GARBAGE, torch.finfo(case.dtype).max), dtype=case.dtype),
        torch.full((R, W, H * P), GARBAGE),
    )
    state = draw.normal(S, H, P, N).to(case.state_dtype)
    tree = chain_tree(b, T) if case.chain else random_tree(b, T, T, generator)
    journal, nodes = torch.full((b, M), -7), torch.zeros(b, T, dtype=torch.int64)
    gates, convolved = zip(*(random.tokens(T) for _ in range(b)))
    outputs, folded = [], []
    for i, (slot, length) in enumerate(zip(slots, case.journal_lens)):
        order = torch.randperm(W, generator=generator)
        journal[i, :length], nodes[i] = order[:length], order[length : length + T]
        of_rows, channels = random.tokens(length)
        path = naive.chain(random.rule(of_rows, channels), state[state_slots[i]])
        for row, own, one, node in zip(order, of_rows, channels, path):
            rows.gates[slot, row], rows.keys[slot, row] = own, one[G * N : 2 * G * N]
            rows.u[slot, row] = node.u.flatten().float()
        folded.append(path[-1].state if path else state[state_slots[i]].double())
        tokens = random.rule(gates[i], convolved[i])
        outputs.append(naive.tree(tokens, tree.parents[i].tolist(), folded[-1]))
    layout = tree_layout(tree, slots, state_slots, nodes, journal, case.journal_lens)
    inputs = (torch.cat(gates), torch.stack(convolved), state)
    return Batch(
        case, to_device(rows), *(part.to(DEVICE) for part in inputs), layout, outputs, folded
    )


def check(case: Case) -> None:
    batch = make_batch(case)
    before = batch.state.clone()
    y = batch.verify().view(len(batch.outputs), case.nodes, -1)
    assert torch.equal(batch.state, before)
    G, N = case.sizes.groups, case.sizes.state_size
    for i, nodes in enumerate(batch.outputs):
        at = (batch.step.slots[i], batch.step.rows[i])
        u = torch.stack([node.u.flatten() for node in nodes])
        o = torch.stack([node.o.flatten() for node in nodes])
        errors = relative_error(y[i].cpu(), o), relative_error(batch.rows.u[at].cpu(), u)
        print(f"relative error: outputs {errors[0]:.1e}, rows {errors[1]:.1e}")
        assert errors[0] < (3e-6 if case.dtype == torch.float32 else BFLOAT16_ERROR)
        assert errors[1] < 3e-6
        own = batch.gates.view(len(y), case.nodes, -1)[i]
        assert torch.equal(batch.rows.gates[at], own)
        assert torch.equal(batch.rows.keys[at], batch.convolved[i, :, G * N : 2 * G * N])


@runs_kernels
@every_case
def test_outputs_and_rows_are_the_recurrence(case: Case) -> None:
    check(case)


@pytest.fixture
def in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """gluon.py's kernel; without a GPU by gluon_rig.py."""
    if not GPU:
        form = interpreted("delta_rule.gluon")[0]
        monkeypatch.setattr(form, "capability", lambda device: form.HOPPER)
        monkeypatch.setattr(triton, "gluon", form)
    elif capability(DEVICE) < gluon.HOPPER:
        pytest.skip("for Hopper and later")
    monkeypatch.setattr(triton, "_verify_kernel", None)


@runs_kernels
@pytest.mark.parametrize("case", FEW_NODES.values(), ids=FEW_NODES)
def test_few_nodes_in_registers(case: Case, in_registers: None) -> None:
    check(case)


@runs_kernels
def test_registers_leave_what_does_not_fit(in_registers: None) -> None:
    for case in (CASES["tree"], CASES["channels"], IN_REGISTERS._replace(nodes=9)):
        with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
            make_batch(case).verify()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_published_sizes(case: Case) -> None:
    check(case)


@runs_kernels
@pytest.mark.parametrize("name", ["shared-keys", "two-tiles", "forgets-all", "channels"])
def test_verified_paths_fold_to_the_recurrences_state(name: str) -> None:
    """The journal, then the path to a node by the rows that the verify kernel has written."""
    case = CASES[name]
    batch = make_batch(case)
    batch.verify()
    step, end = batch.step, case.nodes - 1
    paths = [above.nonzero()[:, 0] for above in ancestors(step, end)]
    longest = case.max_journal + max(map(len, paths))
    journal = torch.zeros(len(paths), longest, dtype=torch.int64, device=DEVICE)
    lengths = [length + len(path) for length, path in zip(case.journal_lens, paths)]
    for i, (length, path) in enumerate(zip(case.journal_lens, paths)):
        journal[i, :length] = step.journal[i, :length]
        journal[i, length : lengths[i]] = step.rows[i, path]
    wanted = torch.arange(len(paths), device=DEVICE) > 0
    before = batch.state.clone()
    one_layer = DeltaRows(*(part[None] for part in batch.rows))
    at = (step.slots, step.state_slots, journal, torch.tensor(lengths, device=DEVICE))
    fold_journals(one_layer, batch.state[None], Folds(*at, wanted=wanted), case.sizes, EPS)
    for i, nodes in enumerate(batch.outputs):
        found = batch.state[step.state_slots[i]].cpu()
        if i == 0:
            assert torch.equal(found, before[step.state_slots[0]].cpu()), "not wanted"
        else:
            error = relative_error(found, nodes[end].state)
            assert error < 3e-6


def ancestors(step: TreeLayout, node: int) -> Tensor:
    """[b, T]: which nodes are above a node, or are it."""
    return (step.ancestors[:, node, None] >> torch.arange(step.rows.shape[1], device=DEVICE)) & 1


@runs_kernels
@pytest.mark.parametrize("case", [CASES["tree"], FEW_NODES["float16"]], ids=["tree", "few-nodes"])
def test_where_a_step_folds_the_journal_is_in_the_state(case: Case) -> None:
    """Then its rows are not looked at."""
    batch = make_batch(case)
    step = batch.step
    fold = torch.tensor([True, True, False], device=DEVICE)
    one_layer = DeltaRows(*(part[None] for part in batch.rows))
    at = (step.slots, step.state_slots, step.journal, step.journal_len)
    before = batch.verify()
    fold_journals(one_layer, batch.state[None], Folds(*at, wanted=fold), batch.case.sizes, EPS)
    for i in (0, 1):
        assert relative_error(batch.state[step.state_slots[i]].cpu(), batch.folded[i]) < 3e-6
    batch.step = step._replace(fold=fold)
    after = batch.verify()
    assert relative_error(after, before) < 3e-6
    assert torch.equal(after.view(3, -1)[2], before.view(3, -1)[2])


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_folded_state_is_rounded_with_its_requests_noise(dtype: torch.dtype) -> None:
    batch = make_batch(CASES["bfloat16"]._replace(state_dtype=dtype))
    step, exact = batch.step, batch.state.float()
    keys = token_keys(torch.arange(2), torch.arange(2) + 70).to(DEVICE)
    one_layer = DeltaRows(*(part[None] for part in batch.rows))
    at = (step.slots, step.state_slots, step.journal, step.journal_len)
    sizes, folds = batch.case.sizes, Folds(*at, round_keys=keys)
    fold_journals(one_layer, batch.state[None], folds, sizes, EPS)
    fold_journals(one_layer, exact[None], Folds(*at), sizes, EPS)
    slots = step.state_slots[:1]
    wanted = round_states(exact[slots], keys[:1], 0, dtype)
    assert_mostly_equal(batch.state[slots], wanted)


@runs_kernels
@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_gates_are_those_of_the_recurrence(max_beta: float) -> None:
    """Of rows that lie apart; decays whose softplus is tiny, and large, among them."""
    draw = Draw(0)
    raw, rate, bias = 8 * draw.normal(5, 16), -draw.normal(6).exp(), draw.normal(6)
    decay, beta = raw.double()[:, 2:8], raw.double()[:, 8:14]
    g = rate.double() * torch.log1p((decay + bias).exp())
    exact = torch.cat([g, max_beta / (1 + (-beta).exp())], dim=1)
    found = delta_gates(raw.to(DEVICE)[:, 2:14], rate.to(DEVICE), bias.to(DEVICE), max_beta)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=3e-6, atol=0.0)


@runs_kernels
def test_too_many_nodes_are_refused() -> None:
    batch = make_batch(CASES["decode"])
    batch.step = batch.step._replace(rows=torch.zeros(3, 65, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="a tree of 65 nodes: at most 64"):
        batch.verify()
