"""Rows and folds, and snapshots, against plain runs: invariants 1, 2 and 3.

docs/design/invariants.md has them. Nearly every test runs on both schemes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_checks import relative_error
from torch import Tensor
from verify_rig import (
    Inputs,
    Rig,
    assert_same_state,
    chain_tree,
    delta_config,
    mamba_config,
    path_to,
    random_tree,
    truncated,
)

from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.tree.tree import single_node_tree

torch.set_num_threads(1)

FORMS = ["", "-torch"]  # fused CPU kernels where numba is installed, and torch
SCHEMES = [scheme + form for scheme in ("deferred", "snapshot") for form in FORMS]
CONFIGS: dict[str, Any] = {
    **{f"conv{width}": mamba_config(width) for width in (2, 3, 4)},
    "delta": delta_config(),
    "delta-vectors": delta_config(head_dim=16, state_size=32, max_beta=2.0),
}
SIZES = [(1, 3), (1, 30), (5, 5), (5, 7), (8, 24)]
FOLDED = [(*size, "conv4") for size in SIZES]
FOLDED += [(*size, f"conv{width}") for size in ((1, 3), (5, 7)) for width in (2, 3)]
FOLDED += [(1, 3, "delta-vectors"), (5, 7, "delta"), (8, 24, "delta-vectors")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def test_the_rigs_plain_run_is_a_full_forward_pass() -> None:
    """What everything below is compared with equals the code that trains models."""
    rig = Rig("snapshot", rows=1)
    layer, length = rig.layers[0], 40
    xbc, dt = rig.normal(length, rig.config.conv_dim), rig.normal(length, rig.config.num_heads)
    expected = FullSequenceContext(1, length).recur(layer, xbc, dt)
    rig.pool.ssm.zero_()
    sequence = rig.stored(0).layers[0]
    for t in range(length):
        sequence, y = sequence.after(layer, xbc[t], dt[t])
        assert relative_error(expected[t].view_as(y), y) < 1e-5


@every_scheme
def test_one_node_tree_is_decode(scheme: str) -> None:
    rig = Rig(scheme, rows=5, max_depth=1)
    rig.admit(slot=3, state_slot=6)
    for _ in range(40):
        tree = single_node_tree(torch.tensor([0]))
        assert rig.step([3], tree, ends=[0], counts=[1]) < 1e-5
    assert_same_state(rig.finish(3), rig.plain[3][17 + 40])


@every_scheme
def test_chain_tree_equals_chain(scheme: str) -> None:
    """Four tokens as one chain-shaped tree, and as four steps of one node."""
    whole, single = Rig(scheme, rows=9), Rig(scheme, rows=9)
    for rig in (whole, single):
        rig.admit(slot=2, state_slot=4)
    for _ in range(15):
        inputs = whole.random_inputs(1, 4)
        together = whole.verify([2], chain_tree(1, 4), inputs)
        whole.accept([2], truncated([[0, 1, 2, 3]], [4]), inputs.hidden)
        for node in range(4):
            own = slice(node, node + 1)
            one = Inputs(
                [part[:, own] for part in inputs.xbc],
                [part[:, own] for part in inputs.dt],
                inputs.hidden[:, own],
            )
            alone = single.verify([2], single_node_tree(torch.tensor([0])), one)
            single.accept([2], truncated([[0]], [1]), one.hidden)
            for found, expected in zip(together, alone):
                assert relative_error(found[:, node], expected[:, 0].double()) < 1e-5
    assert_same_state(whole.finish(2), single.finish(2))


@every_scheme
@pytest.mark.parametrize("rows", [12, 13, 20, 60], ids="rows{}".format)
def test_each_node_equals_a_plain_run_over_its_path(scheme: str, rows: int) -> None:
    rig = Rig(scheme, rows)
    slots = [4, 0, 2]
    for slot, state_slot in zip(slots, (7, 1, 5)):
        rig.admit(slot, state_slot)
    for _ in range(6):
        assert rig.random_step(slots, nodes=12) < 1e-5


@every_scheme
@pytest.mark.parametrize("nodes, rows, config", FOLDED)
def test_any_accepts_and_folds_leave_the_plain_state(
    scheme: str, nodes: int, rows: int, config: str
) -> None:
    """After each step the state slot holds the state after the position that the scheme names."""
    rig = Rig(scheme, rows, config=CONFIGS[config], seed=nodes + rows)
    slots = {4: 7, 0: 1, 2: 5}
    for slot, state_slot in slots.items():
        rig.admit(slot, state_slot, position=5 * slot)
    for _ in range(45 if nodes == 1 else 15):
        order = [list(slots)[i] for i in torch.randperm(3, generator=rig.generator)]
        together = order[: 1 + int(torch.randint(0, 3, (), generator=rig.generator))]
        assert rig.random_step(together, nodes) < 1e-5
        for slot in slots:
            held = rig.stored(slots[slot]).layers
            expected = rig.plain[slot][rig.folded(slot)].layers
            for ours, plain in zip(held, expected):
                assert relative_error(ours.state, plain.state) < 2e-6
    assert sum(map(len, rig.plain.values())) > 30
    assert (rig.folds > 0) == scheme.startswith("deferred")
    for slot in slots:
        assert_same_state(rig.finish(slot), rig.plain[slot][int(rig.table.processed[slot])])


@every_scheme
def test_an_ended_request_keeps_its_state_while_others_go_on(scheme: str) -> None:
    """It accepts nothing, step after step, and still folds when its rows run out."""
    rig = Rig(scheme, rows=11)
    for slot, state_slot in ((0, 3), (1, 8)):
        rig.admit(slot, state_slot)
    for _ in range(3):
        rig.random_step([0, 1], nodes=6)
    run = int(rig.table.processed[0])
    for _ in range(12):
        assert rig.random_step([1, 0], nodes=6, ended=(0,)) < 1e-5
        assert int(rig.table.processed[0]) == run
    assert int(rig.table.processed[1]) > run
    for slot in (0, 1):
        assert_same_state(rig.finish(slot), rig.plain[slot][int(rig.table.processed[slot])])


@every_scheme
def test_a_request_that_ran_nothing_keeps_its_prompts_state(scheme: str) -> None:
    rig = Rig(scheme, rows=6)
    rig.admit(slot=1, state_slot=2)
    assert_same_state(rig.finish(1), rig.plain[1][17], tolerance=1e-12)
    rig.admit(slot=1, state_slot=2)
    rig.random_step([1], nodes=6, ended=(1,))  # its first token ended it
    assert_same_state(rig.finish(1), rig.plain[1][17], tolerance=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_finishing_anywhere_in_a_chain_gives_the_state_there(form: str) -> None:
    """Folding only the journal's head, as when a stop string cuts an output."""
    journal = 0
    for past in (0, 1, 4):  # folds before the journal: its history may be rows or folded rows
        keep = 0
        while True:
            rig = Rig("deferred" + form, rows=14, seed=past)
            for slot, state_slot in ((0, 3), (1, 8)):
                rig.admit(slot, state_slot)
            while rig.folds < 2 * past or int(rig.scheme.journal_len(torch.tensor([1]))[0]) < 6:
                rig.random_step([0, 1], nodes=6)
            start, run = rig.folded(1), int(rig.table.processed[1])
            journal = run - start
            assert_same_state(rig.finish(1, start + keep), rig.plain[1][start + keep])
            # the neighbour's is not touched
            assert_same_state(rig.finish(0), rig.plain[0][int(rig.table.processed[0])])
            keep += 1
            if keep > journal:
                break
        assert journal >= 6


@every_scheme
def test_a_slot_remembers_nothing_of_its_last_request(scheme: str) -> None:
    """The first one leaves in the middle of a journal, and its state is not kept."""
    rig, fresh = Rig(scheme, rows=14), Rig(scheme, rows=14)
    rig.admit(slot=1, state_slot=2)
    for _ in range(3):
        rig.random_step([1], nodes=8)
    assert scheme.startswith("snapshot") or int(rig.scheme.journal_len(torch.tensor([1]))[0]) > 0
    for each in (rig, fresh):
        each.generator.manual_seed(7)
        each.admit(slot=1, state_slot=2)
        for _ in range(6):
            assert each.random_step([1], nodes=8) < 1e-5
    assert_same_state(rig.finish(1), fresh.finish(1))


@every_scheme
def test_the_shape_of_trees_may_change_from_step_to_step(scheme: str) -> None:
    rig = Rig(scheme, rows=16)
    for slot, state_slot in ((0, 3), (1, 8)):
        rig.admit(slot, state_slot)
    for nodes in (12, 1, 1, 5, 12, 3, 1, 12, 2, 12, 12, 1):
        assert rig.random_step([0, 1], nodes) < 1e-5
    for slot in (0, 1):
        assert_same_state(rig.finish(slot), rig.plain[slot][int(rig.table.processed[slot])])


# ── thousands of tokens ──


class Stream:
    """A sequence whose tokens come out the same however they are cut into trees."""

    def __init__(self, layer: Mamba2Mixer, tokens: int, dtype: torch.dtype) -> None:
        c, generator = layer.config, torch.Generator().manual_seed(11)
        self.xbc = torch.randn(tokens, c.conv_dim, generator=generator).to(dtype)
        self.dt = torch.randn(tokens, c.num_heads, generator=generator).to(dtype)

    def states(self, layer: Mamba2Mixer) -> Tensor:
        """After each token, from zero, by the float64 oracle: [tokens, H, P, N]."""
        weight = layer.conv1d.weight.double()[:, 0]  # [channels, K]
        width, tokens = weight.shape[1], self.xbc.shape[0]
        padded = F.pad(self.xbc.double(), (0, 0, width - 1, 0))
        mixed = layer.conv1d.bias.double() + sum(
            padded[k : k + tokens] * weight[:, k] for k in range(width)
        )
        x, B, C = layer.split_xbc(F.silu(mixed))
        dt = F.softplus(self.dt.double() + layer.dt_bias.double())
        A = -torch.exp(layer.A_log.double())
        return recurrence_oracle(x, dt, A, B, C, layer.D)[1]


def error_after_many_tokens(
    scheme: str,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    ssm_dtype: torch.dtype = torch.float32,
    rounding: str = "nearest",
) -> float:
    """The largest relative error of the saved state on the way, with random trees and accepts."""
    nodes, max_depth = 8, 8
    sizes = mamba_config(num_heads=6, head_dim=4, state_size=8)
    snapshots = scheme.startswith("snapshot")
    rows = nodes if snapshots else 24
    rig = Rig(
        scheme,
        rows,
        max_depth,
        config=sizes,
        num_layers=1,
        requests=2,
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        rounding=rounding,
    )
    layer = rig.layers[0]
    # heads that forget in about 1, 10, … 100,000 tokens: the last keeps every rounding error
    step = torch.tensor(0.1)
    layer.dt_bias.fill_(float(step.expm1().log()))
    layer.A_log.copy_(torch.log(10.0 ** torch.arange(1, -5, -1)))
    stream = Stream(layer, tokens, dtype)
    exact = stream.states(layer)

    slot, state_slot = 1, 3
    for part in (rig.pool.ssm, rig.pool.conv):
        part[:, state_slot].zero_()
    rig.table.state_slot[slot] = state_slot
    rig.scheme.start(torch.tensor([slot]), torch.tensor([state_slot]))
    trees = [random_tree(1, nodes, max_depth - 1, rig.generator) for _ in range(40)]
    walks = []
    for tree in trees:
        deepest = sorted(range(nodes), key=lambda node: int(tree.depths[0, node]))
        walks += [(tree, path_to(tree, 0, node)) for node in deepest[-5:]]
    spare = rig.random_inputs(1, nodes)  # what nodes off the path hold: anything
    done, worst, checked = 0, 0.0, -1
    for number in torch.randint(0, len(walks), (tokens,), generator=rig.generator).tolist():
        tree, path = walks[number]
        path = path[: tokens - done]
        xbc, dt = spare.xbc[0].clone(), spare.dt[0].clone()
        xbc[0, path] = stream.xbc[done : done + len(path)]
        dt[0, path] = stream.dt[done : done + len(path)]
        rig.verify([slot], tree, Inputs([xbc], [dt], spare.hidden))
        rig.accept([slot], truncated([path], [len(path)]), spare.hidden)
        done += len(path)
        folded = rig.folded(slot)
        if folded > checked + 50:
            worst = max(worst, relative_error(rig.pool.ssm[0, state_slot], exact[folded - 1]))
            checked = folded
        if done == tokens:
            break
    state = rig.finish(slot).layers[0].state
    assert done == tokens and (snapshots or rig.folds > tokens / rows)
    return max(worst, relative_error(state, exact[-1]))


def errors_after_many_tokens(form: str = "", **settings: Any) -> dict[str, float]:
    schemes = ("deferred", "snapshot")
    errors = {name: error_after_many_tokens(name + form, **settings) for name in schemes}
    print({scheme: f"{value:.2e}" for scheme, value in errors.items()})  # shown by pytest -s
    return errors


@pytest.mark.parametrize("form, tokens", [("", 10_000), ("-torch", 2000)])
def test_thousands_of_tokens_leave_the_state_within_1e_5(form: str, tokens: int) -> None:
    errors = errors_after_many_tokens(form, tokens=tokens)
    assert errors["deferred"] < 1e-5
    assert errors["deferred"] < 2 * errors["snapshot"]


def test_bfloat16_rows_leave_the_state_within_2e_3() -> None:
    errors = errors_after_many_tokens(tokens=2000, dtype=torch.bfloat16)
    assert errors["deferred"] < 2e-3
    assert errors["deferred"] < 2 * errors["snapshot"]


def test_bfloat16_states_lose_less_by_folds_than_by_copies() -> None:
    """A fold rounds once for many tokens, an accepted snapshot once per step."""
    errors = errors_after_many_tokens(tokens=2000, ssm_dtype=torch.bfloat16)
    assert errors["deferred"] < errors["snapshot"]
