"""The fused CPU schemes against the torch schemes, step by step, with many shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from verify_rig import Inputs, Rig, delta_config, mamba_config, path_to, random_tree, truncated

from mamba_eagle.cpu import threads
from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.cpu.state import CpuDeferred
from mamba_eagle.cpu.weights import layer_weights
from mamba_eagle.tree.tree import Tree

torch.set_num_threads(1)

CONFIGS = {
    "even": mamba_config(num_heads=4, head_dim=16, state_size=16, num_groups=2),
    "P12_N16_G1": mamba_config(num_heads=3, head_dim=12, state_size=16, num_groups=1),
    "P5_N7_K3": mamba_config(num_heads=4, head_dim=5, state_size=7, conv_kernel=3),
    "K2": mamba_config(num_heads=2, head_dim=8, state_size=9, num_groups=1, conv_kernel=2),
    "clamped_steps": dataclasses.replace(mamba_config(), time_step_limit=(0.1, 0.4)),
    "delta": delta_config(head_dim=32, state_size=80, max_beta=2.0),
    "delta_P5_N6_K3": delta_config(conv_kernel=3),
}


def rig_of(fused: bool, scheme: str, rows: int, config: str) -> Rig:
    """Three requests in shuffled slots; the same ones, fused or not."""
    form = "" if fused else "-torch"
    rig = Rig(scheme + form, rows=rows, max_depth=7, config=CONFIGS[config])
    assert isinstance(rig.scheme, CpuDeferred) == fused
    for slot, state_slot in ((4, 2), (0, 7), (3, 5)):
        rig.admit(slot, state_slot)
    return rig


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 16])
@pytest.mark.parametrize("scheme", ["deferred", "snapshot"])
def test_fused_scheme_is_the_torch_scheme(scheme: str, nodes: int, config: str) -> None:
    """Outputs, state slots and features over steps that fill the rows and fold them."""
    fused, plain = (rig_of(which, scheme, nodes + 2, config) for which in (True, False))
    rng = torch.Generator().manual_seed(nodes)
    for step in range(9):
        slots = [[4, 0, 3], [3, 4], [0]][step % 3]
        tree = random_tree(len(slots), nodes, 6, rng)
        inputs = fused.random_inputs(len(slots), nodes)
        ends = torch.randint(0, nodes, (len(slots),), generator=rng).tolist()
        paths = [path_to(tree, row, end) for row, end in enumerate(ends)]
        counts = [len(path) if (step + row) % 4 else 0 for row, path in enumerate(paths)]
        outputs = []
        for rig in (fused, plain):
            outputs.append(rig.verify(slots, tree, inputs))
            rig.accept(slots, truncated(paths, counts), inputs.hidden)
        for ours, theirs in zip(*outputs):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert [fused.folded(slot) for slot in slots] == [plain.folded(slot) for slot in slots]
    assert scheme == "snapshot" or fused.folds > 0
    for slot in (4, 0, 3):
        fused.finish(slot)
        plain.finish(slot)
    for part in ("ssm", "conv", "feature"):
        ours, theirs = getattr(fused.pool, part), getattr(plain.pool, part)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["deferred", "snapshot"])
def test_a_request_is_the_same_alone_and_in_a_batch(scheme: str) -> None:
    together, alone = (rig_of(True, scheme, 16, "even") for _ in range(2))
    slots = [3, 4, 0]
    tree = random_tree(3, 12, 6, torch.Generator().manual_seed(1))
    inputs = together.random_inputs(3, 12)
    outputs = together.verify(slots, tree, inputs)
    for row, slot in enumerate(slots):
        own = slice(row, row + 1)
        part = Inputs([x[own] for x in inputs.xbc], [x[own] for x in inputs.dt], inputs.hidden[own])
        single = alone.verify([slot], Tree(*(x[own].contiguous() for x in tree)), part)
        for whole, one in zip(outputs, single):
            assert torch.equal(whole[own], one)


@pytest.mark.parametrize(
    "config, count", [("even", 2), ("P5_N7_K3", 1), ("delta", 2), ("delta_P5_N6_K3", 1)]
)
def test_a_replay_gives_the_bits_of_decode_steps(
    config: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rows that were kept of accepted tokens: states and histories, on so many threads."""
    monkeypatch.setattr(threads, "_threads", count)
    monkeypatch.setattr(threads, "MIN_PARALLEL", 0)
    rig, rng = rig_of(True, "deferred", 16, config), torch.Generator().manual_seed(1)
    slot, state_slot, start = 4, 2, 17
    states, histories = (part[:, state_slot].clone() for part in (rig.pool.ssm, rig.pool.conv))
    for nodes, most in ((1, 1), (5, 3), (7, 4), (4, 2)):
        tree, inputs = random_tree(1, nodes, 6, rng), rig.random_inputs(1, nodes)
        rig.verify([slot], tree, inputs)
        paths = [max((path_to(tree, 0, end) for end in range(nodes)), key=len)]
        accepted = truncated(paths, [min(most, len(paths[0]))])
        rig.accept([slot], accepted, inputs.hidden)
        rig.scheme.keep_rows(torch.tensor([slot]), accepted, inputs.hidden, rig.kept)
    rows = int(rig.table.processed[slot]) - start
    assert 5 < rows <= rig.kept.feature.shape[1]
    rig.finish(slot)
    for i, layer in enumerate(rig.layers):
        journal = (rig.kept.conv_in[i, slot], rig.kept.gates[i, slot], histories[i], states[i])
        first = start % rig.kept.feature.shape[1]
        cpu.replay(0, first, rows, layer_weights(layer), *(part.numpy() for part in journal))
    assert torch.equal(states, rig.pool.ssm[:, state_slot])
    assert torch.equal(histories, rig.pool.conv[:, state_slot])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and folded states, in the parallel form of the kernels."""
    found: list[list[torch.Tensor]] = []
    for count in (1, 2):
        monkeypatch.setattr(threads, "_threads", count)
        monkeypatch.setattr(threads, "MIN_PARALLEL", 0)
        rig, rng = rig_of(True, "deferred", 7, "even"), torch.Generator().manual_seed(1)
        outputs = []
        for step in range(7):
            slots = [[4, 0, 3], [3, 4], [0]][step % 3]
            tree, inputs = random_tree(len(slots), 5, 6, rng), rig.random_inputs(len(slots), 5)
            paths = [path_to(tree, row, 4) for row in range(len(slots))]
            outputs += rig.verify(slots, tree, inputs)
            rig.accept(slots, truncated(paths, [len(path) for path in paths]), inputs.hidden)
        assert rig.folds > 0
        found.append([*outputs, rig.pool.ssm])
    assert all(torch.equal(one, two) for one, two in zip(*found))
