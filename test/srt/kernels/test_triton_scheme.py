"""A GPU's schemes, rows and folds and snapshots, against the float64 recurrence.

In Triton's interpreter alone, in a process of its own (see forms.py): the rig's pools are on
the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import INTERPRETED
from interpreter import check
from verify_rig import Rig, assert_same_state, mamba_config

pytest.importorskip("triton")

runs_kernels = pytest.mark.skipif(
    not INTERPRETED, reason="test_in_the_interpreter runs it, in a process of its own"
)


@pytest.mark.skipif(INTERPRETED, reason="the other tests run here")
def test_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    check(request.node)


def triton_rig(
    rows: int, nodes: int, conv_kernel: int = 4, scheme: str = "deferred", **others: Any
) -> Rig:
    sizes = mamba_config(conv_kernel, num_heads=4, head_dim=16, state_size=16)
    name = f"{scheme}-triton"
    return Rig(name, rows, 4, sizes, num_layers=1, requests=4, max_nodes=nodes, **others)


@runs_kernels
@pytest.mark.parametrize(
    "scheme, nodes, rows, conv_kernel",
    [
        ("deferred", 1, 8, 2),
        ("deferred", 5, 12, 2),
        ("deferred", 5, 12, 4),
        ("deferred", 5, 24, 4),
        ("snapshot", 5, 5, 2),
    ],
)
def test_any_accepts_and_folds_leave_the_plain_state(
    scheme: str, nodes: int, rows: int, conv_kernel: int
) -> None:
    """With the fewest rows possible, and more. After each step the state slot holds the state after
    the position that the scheme names."""
    rig = triton_rig(rows, nodes, conv_kernel, scheme)
    slots = {3: 7, 0: 1, 2: 5}
    for slot, state_slot in slots.items():
        rig.admit(slot, state_slot, position=5 * slot)
    for _ in range(14 if rows == 24 else 9):
        order = [list(slots)[i] for i in torch.randperm(3, generator=rig.generator)]
        together = order[: 1 + int(torch.randint(0, 3, (), generator=rig.generator))]
        assert rig.random_step(together, nodes) < 1e-5
        for slot in slots:
            held = rig.stored(slots[slot]).layers
            expected = rig.plain[slot][rig.folded(slot)].layers
            assert_close = zip(held, expected)
            assert all(relative(ours.state, plain.state) < 2e-6 for ours, plain in assert_close)
    assert any(rig.folded(slot) > min(rig.plain[slot]) for slot in slots), "something was folded"
    for slot in slots:
        assert_same_state(rig.finish(slot), rig.plain[slot][int(rig.table.processed[slot])])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@runs_kernels
@pytest.mark.parametrize("scheme", ["deferred", "snapshot"])
def test_ended_requests_and_changing_shapes(scheme: str) -> None:
    rig = triton_rig(rows=16, nodes=8, scheme=scheme)
    for slot, state_slot in ((0, 3), (1, 8)):
        rig.admit(slot, state_slot)
    for nodes in (8, 1, 1, 5, 8):
        assert rig.random_step([0, 1], nodes) < 1e-5
    for nodes in (8, 3, 8, 1, 8):
        assert rig.random_step([1, 0], nodes, ended=(0,)) < 1e-5
    for slot in (0, 1):
        assert_same_state(rig.finish(slot), rig.plain[slot][int(rig.table.processed[slot])])


@runs_kernels
@pytest.mark.parametrize("keep", [0, 1, 4])
def test_finishing_inside_a_journal_gives_the_state_there(keep: int) -> None:
    rig = triton_rig(rows=17, nodes=6)
    rig.admit(slot=1, state_slot=8)
    while rig.folded(1) == 17 or int(rig.scheme.journal_len(torch.tensor([1]))[0]) < keep:
        rig.random_step([1], nodes=6)
    end = rig.folded(1) + keep
    assert_same_state(rig.finish(1, end), rig.plain[1][end])
    # the slot's next request is not disturbed
    rig.admit(slot=1, state_slot=2)
    for _ in range(4):
        assert rig.random_step([1], nodes=6) < 1e-5


@runs_kernels
def test_rows_that_cannot_hold_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="9 rows per request: this tree needs 12 on a GPU"):
        triton_rig(rows=9, nodes=5)


@runs_kernels
@pytest.mark.parametrize("scheme", ["deferred", "snapshot"])
def test_states_of_16_bits_depend_on_the_requests_seed_alone(scheme: str) -> None:
    """Not on its slots: the same steps, once in other slots and once with another seed."""

    def state(slot: int, state_slot: int, seed: int) -> torch.Tensor:
        rig = triton_rig(11, 3, scheme=scheme, ssm_dtype=torch.bfloat16, rounding="stochastic")
        rig.table.seed[slot] = seed
        rig.admit(slot, state_slot, position=17)
        for _ in range(3):
            rig.random_step([slot], 3)
        found = rig.finish(slot)
        plain = rig.plain[slot][int(rig.table.processed[slot])]
        assert relative(found.layers[0].state, plain.layers[0].state) < 0.02
        return found.layers[0].state

    first = state(0, 3, seed=9)
    assert torch.equal(state(2, 7, seed=9), first)
    assert not torch.equal(state(0, 3, seed=10), first)
