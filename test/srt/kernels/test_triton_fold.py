"""The Triton fold_journals, all layers at once, against naive.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from tensor_checks import Draw, relative_error
from torch import Tensor
from triton_rig import NANO, assert_mostly_equal, to_device

from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify import naive
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes
from mamba_eagle.kernels.tree_verify.triton_fold import fold_journals

GARBAGE = 1e15  # in rows that must not be read


test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    layers: int
    most: int  # rows of a journal
    lengths: tuple[int, ...]  # rows that are folded, one number per request
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    largest_step: float = 0.3
    state_slots: int = 5  # in the pool


SMALL = Sizes(8, 20, 2, 16)
CASES = [
    pytest.param(Case(SMALL, 3, 12, (12, 0, 7)), id="tiles-in-two-heads"),
    pytest.param(Case(Sizes(2, 64, 1, 32), 2, 3, (2, 3)), id="a-tile-is-a-head"),
    pytest.param(Case(SMALL, 2, 7, (7, 1), largest_step=60.0), id="underflow"),
    pytest.param(Case(SMALL, 2, 20, (20, 3), torch.bfloat16), id="bfloat16-rows"),
    pytest.param(
        Case(SMALL, 2, 9, (9, 0), torch.bfloat16, torch.bfloat16), id="bfloat16-rows-and-state"
    ),
]
GPU_CASES = [
    pytest.param(Case(NANO, 27, 16, (16, 0, 5), torch.bfloat16), id="nano"),
    pytest.param(Case(NANO, 4, 16, (16, 0, 5)), id="nano-float32-rows"),
    pytest.param(Case(NANO, 4, 64, (64, 33), torch.bfloat16), id="nano-64-rows"),
    pytest.param(Case(NANO, 4, 16, (16,), torch.bfloat16, torch.bfloat16), id="nano-bf16-state"),
    pytest.param(Case(NANO, 4, 16, (16, 9), torch.bfloat16, largest_step=60.0), id="underflow"),
    pytest.param(Case(Sizes(8, 128, 2, 256), 3, 64, (64, 3), torch.bfloat16), id="p128-n256"),
    pytest.param(Case(Sizes(8, 128, 2, 256), 3, 64, (64, 3)), id="p128-n256-float32-rows"),
    pytest.param(Case(Sizes(8, 64, 4, 16), 3, 33, (33, 3), torch.bfloat16), id="p64-n16-g4"),
    pytest.param(
        Case(NANO, 27, 16, (16, 3), torch.bfloat16, state_slots=70), id="two-billion-elements"
    ),
]


class Journals(NamedTuple):
    buffers: RowBuffers
    A: Tensor  # [layers, H]
    state: Tensor
    slots: Tensor
    state_slots: Tensor
    journal: Tensor
    length: Tensor

    def fold(self, sizes: Sizes, round_keys: Tensor | None = None) -> None:
        at = (self.slots, self.state_slots, self.journal, self.length)
        folds = Folds(*at, round_keys=round_keys)
        fold_journals(self.buffers, self.state, folds, sizes)


def make_journals(case: Case) -> Journals:
    """Each journal has ``most`` rows, of which the first are folded."""
    draw = Draw(0)
    generator = draw.generator
    (H, P, G, N), M, b = case.sizes, case.most, len(case.lengths)
    layers, R, W = case.layers, b + 1, case.most + 2

    slots = torch.randperm(R, generator=generator)[:b]
    state_slots = case.state_slots - 1 - torch.arange(b)  # the last of the pool among them
    journal = torch.stack([torch.randperm(W, generator=generator)[:M] for _ in range(b)])
    A = torch.stack([draw.decay_rates(H) for _ in range(layers)])
    xB = torch.full((layers, R, W, H * P + G * N), GARBAGE)
    dt = torch.full((layers, R, W, H), GARBAGE)
    log_decay = torch.full((layers, R, W, H), -GARBAGE)
    for slot, rows, length in zip(slots, journal, case.lengths):
        used = rows[:length]
        xB[:, slot, used] = torch.randn(layers, length, H * P + G * N, generator=generator)
        dt[:, slot, used] = torch.rand(layers, length, H, generator=generator) * case.largest_step
        decay = dt[:, slot, used].double() * A[:, None]
        log_decay[:, slot, used] = decay.cumsum(1).float()
    shape = (layers, case.state_slots, H, P, N)
    state = torch.zeros(shape, dtype=case.state_dtype, device=DEVICE)
    drawn = torch.randn(layers, b, H, P, N, generator=generator)
    state[:, state_slots.to(DEVICE)] = drawn.to(case.state_dtype).to(DEVICE)
    indices = (slots, state_slots, journal, torch.tensor(case.lengths))
    return Journals(
        to_device(RowBuffers(xB.to(case.dtype), dt, log_decay)),
        A.to(DEVICE),
        state,
        *(part.to(DEVICE) for part in indices),
    )


def folded(journals: Journals, sizes: Sizes, layer: int, i: int, length: int) -> Tensor:
    """The state after the journal of request i, in float64."""
    H, P, G, N = sizes
    at = (layer, journals.slots[i], journals.journal[i, :length])
    x, B = journals.buffers.xB[at].split([H * P, G * N], dim=1)
    rows = naive.Rows(x.unflatten(1, (H, P)), journals.buffers.dt[at], B.unflatten(1, (G, N)))
    return naive.fold(rows, journals.A[layer], journals.state[layer, journals.state_slots[i]])


def check(case: Case) -> None:
    journals, worst = make_journals(case), 0.0
    wanted = {
        (layer, i): folded(journals, case.sizes, layer, i, length)
        for i, length in enumerate(case.lengths)
        for layer in range(case.layers if length else 0)
    }
    changed = journals.state_slots[journals.length > 0]
    kept = [c for c in range(case.state_slots) if c not in changed.tolist()]
    before = journals.state[:, kept].clone()
    journals.fold(case.sizes)
    for (layer, i), exact in wanted.items():
        found = journals.state[layer, journals.state_slots[i]]
        worst = max(worst, relative_error(found, exact))
    print(f"relative error {worst:.1e}")
    within = 3e-6 if case.dtype == torch.float32 else 1e-5
    assert worst < (within if case.state_dtype == torch.float32 else 4e-3)
    assert torch.equal(journals.state[:, kept], before), "a state that was not folded has changed"


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_all_layers_equal_the_recurrence(case: Case) -> None:
    check(case)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_fold_rounds_each_layers_state_with_its_own_noise(dtype: torch.dtype) -> None:
    journals = make_journals(Case(SMALL, 3, 12, (12, 0, 7), torch.bfloat16, dtype))
    exact = journals._replace(state=journals.state.float())
    keys = token_keys(torch.arange(3), torch.arange(3) + 70).to(DEVICE)
    journals.fold(SMALL, keys)
    exact.fold(SMALL)
    for layer in range(3):
        states = exact.state[layer, journals.state_slots]
        wanted = round_states(states, keys, layer, dtype)
        wanted[1] = journals.state[layer, journals.state_slots[1]]  # nothing was folded
        assert_mostly_equal(journals.state[layer, journals.state_slots], wanted)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", GPU_CASES)
def test_real_sizes_equal_the_recurrence(case: Case) -> None:
    if case.state_slots > 5:
        H, P, _, N = case.sizes
        assert case.layers * case.state_slots * H * P * N > 2**31
    check(case)


@pytest.mark.gpu
@runs_kernels
def test_a_graph_replays_with_other_lengths_and_waits_for_nothing() -> None:
    case = Case(NANO, 4, 16, (16, 5, 9), torch.bfloat16)
    journals = make_journals(case)
    first = journals.state.clone()
    journals.fold(case.sizes)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        journals.fold(case.sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        journals.fold(case.sizes)
    for lengths in ((16, 5, 9), (0, 1, 3), (2, 0, 0)):
        journals.length.copy_(torch.tensor(lengths))
        journals.state.copy_(first)
        journals.fold(case.sizes)
        wanted = journals.state.clone()
        journals.state.copy_(first)
        graph.replay()
        assert torch.equal(journals.state, wanted), lengths
