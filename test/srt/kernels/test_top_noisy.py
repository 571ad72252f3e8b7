"""The best guesses of samples whose noise is known, in each form against naive.py.

Triton's interpreter runs this file beside test_sampling.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, backend_of, device_of, every_form, runs_kernels
from torch import Tensor

from mamba_eagle.kernels.best_token.naive import best_token
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.sampling_noise.naive import gumbel
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy import naive
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys

TEMPERATURES = [0.0, 1.0, 0.3, 5.0]
SEEDS = [3, 2**63 - 1, 77, 0]
WHOLE = 300  # the target's vocabulary


class Case(NamedTuple):
    logits: Tensor  # [b, lanes, V']
    ids: Tensor | None
    noise: NoiseKeys


def case(b: int, lanes: int, known: int, reduced: bool, kind: str = "random") -> Case:
    """Request i is in slot b - i. known: V'; reduced: it is a part of the target's vocabulary."""
    generator = torch.Generator().manual_seed(known)
    logits = 3 * torch.randn(b, lanes, known, generator=generator)
    if kind == "impossible":  # most tokens, and whole blocks of them
        logits[..., 3:-3] = -torch.inf
    ids = None
    if reduced:
        ids = torch.randperm(WHOLE, generator=generator)[:known].sort().values
    numbers = torch.randn(b + 1, 6, generator=generator)  # beside the temperature, for others
    integers = torch.randint(1000, (b + 1, 3), generator=generator)
    slots = torch.arange(b, 0, -1)
    for i in range(b):
        numbers[slots[i], 0] = TEMPERATURES[i % 4]
        integers[slots[i], 0] = SEEDS[i % 4]
    positions = torch.arange(40, 40 + b)
    vocab = WHOLE if reduced else known
    return Case(logits, ids, NoiseKeys(slots, positions, numbers[:, 0], integers[:, 0], vocab))


def on_device(made: Case, device: torch.device) -> Case:
    noise = (part.to(device) for part in made.noise[:4])
    ids = None if made.ids is None else made.ids.to(device)
    return Case(made.logits.to(device), ids, NoiseKeys(*noise, made.noise.vocab_size))


def found_by(form: str, made: Case, k: int) -> TopTokens:
    made = on_device(made, device_of(form))
    if form != "triton":
        return backend_of(form).top_noisy(*made, k)
    from mamba_eagle.kernels.top_parts import triton

    return triton.top_noisy(*made, k, block=64)


def assert_best(found: TopTokens, made: Case, k: int) -> None:
    b, lanes, known = made.logits.shape
    assert found.log_probs.dtype == torch.float32 and found.tokens.dtype == torch.int64
    assert found.log_probs.shape == found.tokens.shape == (b, lanes, k)
    ids = range(known) if made.ids is None else made.ids.tolist()
    for i in range(b):
        seed, position = SEEDS[i % 4], int(made.noise.positions[i])
        for lane in range(lanes):
            wanted = naive.top_noisy(
                made.logits[i, lane].tolist(),
                ids,
                TEMPERATURES[i % 4],
                lambda token: gumbel(seed, position, token),  # noqa: B023
                k,
            )
            assert found.tokens[i, lane].tolist() == wanted.tokens
            exact = torch.tensor(wanted.log_probs, dtype=torch.float64)
            close = {"rtol": 1e-5, "atol": 2e-5}
            torch.testing.assert_close(found.log_probs[i, lane].cpu().double(), exact, **close)


def test_a_row_worked_out_by_hand() -> None:
    """Logits 0, 2, 1 of the target's tokens 4, 5, 9 at temperature 2: scores 2, 1, 0.5."""
    found = naive.top_noisy([0.0, 2.0, 1.0], [4, 5, 9], 2.0, {4: 2.0, 5: 0.0, 9: 0.0}.get, 2)
    assert found.tokens == [4, 5]
    assert found.log_probs == pytest.approx([-0.4643688, -1.4643688])
    assert naive.top_noisy([0.0, 2.0], [4, 5], 0.0, {}.get, 1).tokens == [5]


@every_form
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_guesses_are_those_of_the_definition(form: str, reduced: bool) -> None:
    """With and without noise side by side, in one block and in several; noise belongs to the
    target's tokens, whatever a drafter's vocabulary."""
    for b, lanes, known, kind in ((4, 3, 70, "random"), (2, 1, 200, "impossible"), (1, 2, 64, "")):
        made = case(b, lanes, known, reduced, kind)
        assert_best(found_by(form, made, 3), made, 3)


def of_parts(form: str, made: Case, k: int) -> TopTokens:
    """By three ranks, of which the first has fewer than k tokens."""
    made, backend = on_device(made, device_of(form)), backend_of(form)
    lanes, told, first = made.logits.shape[1], [], 0
    for own in made.logits.tensor_split((2, 41), dim=2):
        ids = None if made.ids is None else made.ids[first : first + own.shape[2]]
        told.append(backend.top_part(own, first, ids, made.noise, k))
        first += own.shape[2]
    return backend.top_of_parts(torch.stack(told), made.ids, made.noise, lanes)


@every_form
def test_ranks_with_parts_of_the_tokens_guess_the_same(form: str) -> None:
    for made in (case(2, 2, 45, reduced=True), case(2, 1, 50, reduced=False)):
        assert_best(of_parts(form, made, 3), made, 3)


@every_form
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_ranks_with_parts_of_the_tokens_find_the_best_one(form: str, sampled: bool) -> None:
    """Of equal scores the lowest token; none where a score is NaN or the highest is infinite, on
    whatever rank, with whatever sign NaN has."""
    generator, vocab = torch.Generator().manual_seed(3), 90
    scores = (4 * torch.randn(7, vocab, generator=generator)).round()
    scores[1, 80], scores[2, 3], scores[3] = torch.nan, torch.inf, -torch.inf
    scores[4, 70] = -torch.tensor(torch.nan).abs()
    rows = torch.arange(7), torch.arange(40, 47)  # seeds and positions
    temperatures = torch.tensor([0.7, 1.0, 1.0, 1.0, 0.0, 0.0, 3.0])
    device, backend, told, first = device_of(form), backend_of(form), [], 0
    noise = RowNoise(*(part.to(device) for part in (*rows, temperatures)), vocab)
    for own in scores.to(device).tensor_split((31, 60), dim=1):
        told.append(backend.best_keys(own, first, 31, noise if sampled else None))
        first += own.shape[1]
    found = backend.best_tokens(torch.stack(told).amax(0)).tolist()
    for i, row in enumerate(scores.tolist()):
        if sampled:
            temperature = float(temperatures[i])
            row = [x + temperature * gumbel(i, 40 + i, v) for v, x in enumerate(row)]
        assert found[i] == best_token(row), i
    assert found[1:5] == [-1, -1, -1, -1]


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_rank_finds_the_best_one(form: str, dtype: torch.dtype) -> None:
    """The same where the scores are on one rank; zeros of both signs are equal."""
    scores = (4 * torch.randn(7, 2100, generator=torch.Generator().manual_seed(4))).round()
    scores[1, 2080], scores[2, 3], scores[3] = torch.nan, torch.inf, -torch.inf
    scores[4, 70] = -torch.tensor(torch.nan).abs()
    scores[5] = -1.0
    scores[5, 2], scores[5, 2090] = -0.0, 0.0
    found = backend_of(form).best_of(scores.to(device_of(form), dtype).view(7, 1, -1))
    assert found[:, 0].tolist() == [best_token(row) for row in scores.tolist()]
    assert found[:6, 0].tolist()[1:] == [-1, -1, -1, -1, 2]


@runs_kernels
def test_what_fills_the_device_is_not_split_into_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then takes a block for all lanes of a request."""
    from mamba_eagle.kernels.top_parts import triton

    made = case(4, 3, 150, reduced=True)
    split = found_by("triton", made, 4)
    monkeypatch.setattr(triton, "ONE_WAVE", 0)
    assert all(torch.equal(a, b) for a, b in zip(split, found_by("triton", made, 4)))


@runs_kernels
def test_the_best_guess_of_the_targets_own_logits_is_its_sample() -> None:
    """At any temperature: both round alike."""
    from test_sampling import nodes_of, state_of

    from mamba_eagle.core import SamplingParams
    from mamba_eagle.kernels.sampling.triton import Sizes, sample_nodes

    params = [SamplingParams(seed=n, temperature=t) for n, t in enumerate((0.0, 1e-5, 0.7, 900.0))]
    state = state_of(params, 90, kernels=True)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 5, 90, generator=generator).to(state.device)
    positions = torch.arange(4, device=state.device)
    slots = torch.arange(4, device=state.device)
    noise = NoiseKeys(slots, positions, state.number("temperature"), state.integer("seed"), 90)
    guessed = backend_of("triton").top_noisy(logits, None, noise, 2)
    assert state.tables is not None
    nodes = nodes_of(positions[:, None].expand(-1, 5))
    sampled = sample_nodes(logits, nodes, state.tables, Sizes(block=32, sub=4))
    assert torch.equal(guessed.tokens[..., 0], sampled)


@runs_kernels
@pytest.mark.parametrize("k", [0, 17, 11])
def test_a_k_that_cannot_be_is_refused(k: int) -> None:
    made = on_device(case(1, 1, 10, reduced=False), DEVICE)
    from mamba_eagle.kernels.top_parts import triton

    with pytest.raises(ValueError, match=f"k = {k}: must be between 1 and 16, and at most the 10"):
        triton.top_noisy(*made, k)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("b", [1, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_other_logits(b: int, dtype: torch.dtype) -> None:
    """At the size of a real vocabulary, as torch does it. Near-equal scores may change places."""
    from mamba_eagle.backend.base import Backend

    made = on_device(case(b, 3, 131_072, reduced=False), DEVICE)
    made = made._replace(logits=made.logits.to(dtype))
    backend = backend_of("triton", dtype)
    backend.top_noisy(*made, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backend.top_noisy(*made, 3)
    for scale in (0.3, 2.0):
        made.logits.mul_(scale)
        graph.replay()
        wanted = Backend.top_noisy(backend, *made, 3)  # type: ignore[arg-type]
        assert (found.tokens == wanted.tokens).double().mean() > 0.99
        torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-3)
