"""The sampler's kernels: the same tokens as runner/sampler.py in torch, and as naive.py.

Every case has blocks, short lists and vocabularies small enough that lists overflow, rows end
within a block, and whole blocks are filtered away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from forms import (
    DEVICE,
    GPU,
    INTERPRETED,
    all_in_the_interpreter,
    backend_of,
    device_of,
    every_form,
    runs_kernels,
)
from tensor_checks import sample, torch_backend
from torch import Tensor

from mamba_eagle.core import SamplingParams
from mamba_eagle.devices import choose_backend
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.kernels.sampling import naive
from mamba_eagle.kernels.sampling.tables import NUMBERS, SampledNodes, SamplingTables
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.tree import Tree, ancestor_matrix

test_in_the_interpreter = all_in_the_interpreter(
    "test_sampling_noise.py", "test_top_log_probs.py", "test_top_noisy.py"
)
EOS, PROMPT = 0, [3, 3, 5, 1]
OTHERS = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(seed=2**63 - 1),
    "cold": SamplingParams(seed=1, temperature=1e-6),
    "hot": SamplingParams(seed=2, temperature=10_000.0, top_p=0.9),
    "top-k": SamplingParams(seed=3, top_k=5),
    "top-k-of-many": SamplingParams(seed=3, top_k=150, temperature=1.5),
    "top-k-of-all": SamplingParams(seed=3, top_k=10_000),
    "top-p": SamplingParams(seed=4, top_p=0.8),
    "top-p-tiny": SamplingParams(seed=5, top_p=1e-30),
    "top-p-nearly-all": SamplingParams(seed=5, top_p=0.999999, temperature=2.0),
    "top-k-and-top-p": SamplingParams(seed=6, top_k=50, top_p=0.95),
    "top-p-and-min-p": SamplingParams(seed=6, top_p=0.9, min_p=0.3),
    "min-p": SamplingParams(seed=7, min_p=0.2, temperature=1.3),
    "min-p-one": SamplingParams(seed=7, min_p=1.0),
    "all-filters": SamplingParams(seed=8, top_k=40, top_p=0.9, min_p=0.05, temperature=0.7),
    "penalties": SamplingParams(seed=9, top_p=0.9, **OTHERS),
    "greedy-penalties": SamplingParams(temperature=0.0, **{**OTHERS, "frequency_penalty": -1.7}),
    "bias": SamplingParams(seed=10, logit_bias={2: 10_000.0, 5: -10_000.0, 7: 0.5}, top_k=3),
    "ban": SamplingParams(seed=11, min_new_tokens=3, stop_token_ids=[2, 4], top_p=0.5),
    "greedy-ban": SamplingParams(temperature=0.0, min_new_tokens=2),
    "everything": SamplingParams(
        seed=12,
        top_k=30,
        top_p=0.97,
        min_p=0.01,
        min_new_tokens=9,
        stop_token_ids=[9, 8],
        logit_bias={1: 3.0, 11: -2.0},
        **OTHERS,
    ),
}


TORCH_ONLY = pytest.mark.skipif(
    GPU or INTERPRETED, reason="torch on a CPU is what naive.py is compared with"
)


class Case(NamedTuple):
    state: SamplingState
    tree: Tree
    positions: Tensor
    logits: Tensor


def state_of(params: list[SamplingParams], vocab: int, kernels: bool) -> SamplingState:
    """Slot i holds params[i]; some of its output is counted."""
    backend = torch_backend()
    if kernels:
        from triton_rig import triton_backend

        backend = triton_backend()
    elif GPU:
        backend = choose_backend(DEVICE, torch.float32)
    state = SamplingState(len(params), vocab, (EOS,), backend)
    if not kernels:
        state.tables = None
    for slot, one in enumerate(params):
        state.set(slot, one, len(PROMPT), PROMPT)
        out = torch.tensor([[2, 6, 2, slot % vocab]], device=state.device)
        slots, count = (torch.tensor([n], device=state.device) for n in (slot, 4))
        state.observe_accepted(slots, out, count)
    return state


def random_tree(b: int, nodes: int, vocab: int) -> Tree:
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.zeros(b, nodes, dtype=torch.int64)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(max(0, node - 3), node, (b,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(0, min(vocab, 12), (b, nodes), generator=generator)
    return Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), torch.zeros(b, nodes))


KINDS = ["random", "ties", "equal", "flat", "peaked", "impossible"]


def logits_of(kind: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    logits = 3 * torch.randn(shape, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros(shape)
        logits[..., ::3] = -0.0
    elif kind == "flat":
        logits = logits / 100
    elif kind == "peaked":
        logits = logits * 20
    elif kind == "impossible":
        logits[..., 10:-3] = -torch.inf
    return logits


def case(kinds: list[str], names: list[str], vocab: int, kernels: bool) -> Case:
    """A tree for each of ``names``, with a node for each of ``kinds``."""
    nodes = len(kinds)
    params = [PARAMS[name] for name in names]
    state, tree = state_of(params, vocab, kernels), random_tree(len(params), nodes, vocab)
    positions = tree.depths + len(PROMPT) + 1
    logits = torch.stack([logits_of(kind, (len(params), vocab)) for kind in kinds], dim=1)
    on_device = Tree(*(part.to(state.device) for part in tree))
    return Case(state, on_device, positions.to(state.device), logits.to(state.device))


def nodes_of(positions: Tensor) -> SampledNodes:
    """Nodes without a history that matters: positions [b, T], request i in slot i."""
    b, nodes = positions.shape
    ancestors = torch.eye(nodes, dtype=torch.bool, device=positions.device).repeat(b, 1, 1)
    slots = torch.arange(b, device=positions.device)
    return SampledNodes(slots, positions, torch.zeros_like(positions), ancestors)


def in_kernels(made: Case, **sizes: int) -> Tensor:
    from mamba_eagle.kernels.sampling.triton import Sizes, sample_nodes

    state, tree, positions, logits = made
    assert isinstance(state.tables, SamplingTables)
    slots = torch.arange(len(logits), device=state.device)
    nodes = SampledNodes(slots, positions, tree.tokens, tree.ancestors)
    return sample_nodes(logits, nodes, state.tables, Sizes(**sizes)).cpu()


def in_torch(made: Case) -> Tensor:
    state, tree, positions, logits = made
    return sample(state, list(range(len(logits))), logits, positions, tree).cpu()


SMALL = {"block": 32, "sub": 4, "short_list": 32, "few": 8, "tile": 128}


@runs_kernels
@pytest.mark.parametrize("first", range(3))
def test_tokens_are_those_of_the_torch_sampler(first: int) -> None:
    """Different parameters side by side, at nodes with different logits. A short list holds the
    whole vocabulary, so that a row is searched only where too few are on it. All lists count as
    short enough to compare all pairs, or some, or next to none."""
    names, kinds = list(PARAMS)[first::3], [KINDS[first], KINDS[first + 3]]
    made, clean = (case(kinds, names, 75, kernels=kernels) for kernels in (True, False))
    sizes = {**SMALL, "short_list": 128, "few": (128, 32, 4)[first]}
    found, expected = in_kernels(made, **sizes), in_torch(clean)
    wrong = [name for name, a, b in zip(names, found, expected) if not torch.equal(a, b)]
    assert not wrong
    assert expected.unique().numel() > 3


@runs_kernels
def test_rows_are_searched_where_a_short_list_overflows() -> None:
    """With a single nominee some rows find none that is kept, and are searched bit by bit."""
    names = ["top-k", "top-p", "everything"]
    made, clean = (case(["ties"], names, 75, kernels=kernels) for kernels in (True, False))
    sizes = {**SMALL, "short_list": 1, "few": 1, "each": 1, "nominees": 1}
    assert torch.equal(in_kernels(made, **sizes), in_torch(clean))


@runs_kernels
def test_a_flat_distribution_is_decided_by_its_nominees(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # else the kernel is compiled already
        from mamba_eagle.kernels.sampling import triton_search

        monkeypatch.setattr(triton_search, "_best_of_row", None)
    names = ["top-p", "top-p-and-min-p", "top-k-of-many", "penalties", "greedy"]
    made, clean = (case(["flat"], names, 200, kernels=kernels) for kernels in (True, False))
    sizes = {**SMALL, "block": 64, "short_list": 1, "few": 1, "each": 2, "nominees": 8}
    assert torch.equal(in_kernels(made, **sizes), in_torch(clean))


@runs_kernels
def test_where_no_token_can_be_sampled_there_is_none() -> None:
    names = ["greedy", "plain", "top-k", "all-filters"]
    for bad in (math.nan, math.inf):
        made, clean = (
            case(["random"] * 3, names, 60, kernels=kernels) for kernels in (True, False)
        )
        for each in (made, clean):
            each.logits[:, 1, 40] = bad
            each.logits[:, 2] = -math.inf
        found = in_kernels(made, **SMALL)
        assert (found[:, 1:] == NO_TOKEN).all() and (found[:, 0] >= 0).all()
        assert torch.equal(found, in_torch(clean))


@runs_kernels
def test_tokens_that_a_grammar_forbids_are_not_there() -> None:
    """Its mask lies over the raw logits, and no bias or penalty lifts it."""
    names = ["greedy", "plain", "top-k", "min-p", "greedy-ban", "bias", "greedy-penalties"]
    made, clean = (case(["ties"] * 2, names, 70, kernels=kernels) for kernels in (True, False))
    allowed = torch.rand(made.logits.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    allowed[..., 60] = True
    for each in (made, clean):
        each.logits.masked_fill_(~allowed.to(each.logits.device), -math.inf)
    found = in_kernels(made, **SMALL)
    assert torch.equal(found, in_torch(clean))
    assert allowed.gather(2, found[..., None]).all()


@every_form
def test_only_the_first_tokens_are_counted(form: str) -> None:
    """Each as often as it occurs; what stands behind them may be no token at all."""
    counts = torch.zeros(4, 30, dtype=torch.int32)
    tokens = torch.tensor([[5, 7, 5, 29, 5], [0, 10**9, 3, 3, -1], [1, 2, 3, 4, 5]])
    given = (counts, torch.tensor([2, 3, 0]), tokens, torch.tensor([4, 1, 0]))
    counts, *others = (part.to(device_of(form)) for part in given)
    for _ in range(2):
        backend_of(form).count_tokens(counts, *others)
    wanted = torch.zeros(4, 30, dtype=torch.int32)
    wanted[2, [5, 7, 29]] = torch.tensor([4, 2, 2], dtype=torch.int32)
    wanted[3, 0] = 2
    assert torch.equal(counts.cpu(), wanted)


def rule_of(params: SamplingParams, slot: int, position: int, vocab: int) -> naive.Rule:
    counts: dict[int, int] = {}
    for token in (2, 6, 2, slot % vocab):
        counts[token] = counts.get(token, 0) + 1
    early = position < len(PROMPT) + params.min_new_tokens
    numbers = {name: getattr(params, name) for name in NUMBERS}
    return naive.Rule(
        **(numbers | {"temperature": 0.0} if params.greedy else numbers),
        top_k=max(params.top_k, 0),
        prompt=set(PROMPT),
        counts=counts,
        logit_bias=params.logit_bias,
        banned=params.stop_tokens((EOS,)) if early else (),
    )


@TORCH_ONLY
def test_tokens_are_those_of_the_definition() -> None:
    kinds = ["random", "ties", "peaked", "impossible"]
    vocab, nodes, names = 90, len(kinds), list(PARAMS)
    names.remove("hot")  # noise of 10,000 leaves no digits of the logits
    made = case(kinds, names, vocab, kernels=False)
    found = in_torch(made)
    for slot, name in enumerate(names):
        params = PARAMS[name]
        for node in range(nodes):
            position = made.positions[slot, node]
            noise = gumbel(torch.tensor([params.seed]), position[None], vocab)[0].tolist()
            path = made.tree.tokens[slot, 1:][made.tree.ancestors[slot, node, 1:]].tolist()
            rule = rule_of(params, slot, int(position), vocab)
            logits = made.logits[slot, node].tolist()
            assert found[slot, node] == naive.sample(logits, rule, path, noise.__getitem__), name


def test_filters_worked_out_by_hand() -> None:
    """Masses 4 : 2 : 2 : 1; of the equal ones the lower id comes first."""
    logits = [0.0, math.log(2.0), math.log(4.0), math.log(2.0)]
    assert naive.kept(logits, naive.Rule()) == [2, 1, 3, 0]
    assert naive.kept(logits, naive.Rule(top_k=2)) == [2, 1]
    assert naive.kept(logits, naive.Rule(top_p=0.6)) == [2, 1]  # 4 of 9 are too few, 6 enough
    assert naive.kept(logits, naive.Rule(top_p=0.6, top_k=2)) == [2]  # 4 of 6 are enough
    assert naive.kept(logits, naive.Rule(min_p=0.4)) == [2, 1, 3]
    assert naive.adjusted([1.0, -1.0], naive.Rule(repetition_penalty=2.0, prompt=[0, 1]), []) == [
        0.5,
        -2.0,
    ]
    rule = naive.Rule(temperature=0.0, frequency_penalty=1.0, counts={2: 1})
    assert naive.sample([0.0, 0.5, 1.4], rule) == 1
    assert naive.sample([0.0, 0.5, 2.4], rule, path=[2]) == 1
    assert naive.sample([0.0, math.nan], naive.Rule()) == naive.NO_TOKEN


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_samples_a_real_vocabulary_as_torch_does(kind: str) -> None:
    names = list(PARAMS)
    made, clean = (case([kind] * 2, names, 131_072, kernels=kernels) for kernels in (True, False))
    in_kernels(made)
    graph = torch.cuda.CUDAGraph()
    slots = torch.arange(len(names), device=DEVICE)
    nodes = SampledNodes(slots, made.positions, made.tree.tokens, made.tree.ancestors)
    with torch.cuda.graph(graph):
        found = made.state.backend.sample_nodes(made.logits, nodes, made.state.tables)
    for scale in (1.0, 0.5):
        made.logits.mul_(scale)
        clean.logits.mul_(scale)
        graph.replay()
        assert torch.equal(found.cpu(), in_torch(clean))
