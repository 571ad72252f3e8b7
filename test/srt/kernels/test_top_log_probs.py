"""The best tokens of rows of logits, in each form against naive.py.

Triton's interpreter runs this file beside test_sampling.py.
"""

from __future__ import annotations

import pytest
import torch
from forms import (
    DEVICE,
    GPU,
    backend_of,
    device_of,
    every_form,
    runs_kernels,
)
from tensor_checks import host_backend
from torch import Tensor

from mamba_eagle.cpu.ops import top_log_probs as cpu
from mamba_eagle.kernels.top_log_probs import naive
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_log_probs.torch import top_log_probs as torch_top_log_probs
from mamba_eagle.kernels.top_parts import naive as parts_naive


def top(form: str, logits: Tensor, k: int) -> TopTokens:
    if form == "torch":
        return torch_top_log_probs(logits, k)
    if form == "cpu":
        shape = (len(logits), k)
        found = TopTokens(torch.empty(shape), torch.empty(shape, dtype=torch.int64))
        cpu.top_log_probs(logits.numpy(), *(part.numpy() for part in found))
        return found
    from mamba_eagle.kernels.top_log_probs import triton

    return triton.top_log_probs(logits, k, part=16, read=64)


def rows_of(kind: str, n: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(vocab + n)
    logits = 4 * torch.randn(n, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros(n, vocab)
        logits[:, ::2] = -0.0  # is no less than 0.0
    elif kind == "impossible":  # most tokens, and whole blocks of them
        logits[:, 2:-2] = -torch.inf
    elif kind == "large":
        logits = logits * 1000 - 5000
    return logits.to(dtype)


def assert_best(found: TopTokens, logits: Tensor, k: int, stable: bool = True) -> None:
    """stable: of equal logits the lower token id must come first."""
    assert found.log_probs.dtype == torch.float32 and found.tokens.dtype == torch.int64
    wanted = [naive.top_log_probs(row, k) for row in logits.tolist()]
    if stable:
        assert found.tokens.tolist() == [row.tokens for row in wanted]
    exact = torch.tensor([row.log_probs for row in wanted], dtype=torch.float64)
    torch.testing.assert_close(found.log_probs.cpu().double(), exact, rtol=1e-6, atol=2e-6)


def test_one_row_worked_out_by_hand() -> None:
    """Probabilities 1/8, 4/8, 2/8, 1/8 and an impossible token."""
    logits = [0.0, 2 * torch.tensor(2.0).log().item(), torch.tensor(2.0).log().item(), 0.0]
    found = naive.top_log_probs([*logits, float("-inf")], 5)
    assert found.tokens == [1, 2, 0, 3, 4]
    halves = [value / torch.tensor(2.0).log().item() for value in found.log_probs]
    assert halves == pytest.approx([-1, -2, -3, -3, float("-inf")], abs=1e-6)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "impossible", "large"])
def test_the_best_are_those_of_a_stable_sort(form: str, kind: str, dtype: torch.dtype) -> None:
    """On a GPU in one block and in several, the last of which may be partly or nearly empty."""
    if kind == "large" and dtype == torch.float16:
        pytest.skip("beyond float16's range")
    if form == "cpu" and dtype != torch.float32:
        pytest.skip("the fused kernel takes float32")
    for n, vocab, k in ((3, 50, 3), (1, 16, 16), (2, 193, 5), (2, 128, 1)):
        logits = rows_of(kind, n, vocab, dtype)
        # torch.topk leaves the order of equals open
        stable = form != "torch" or len(logits.unique()) == logits.numel()
        found = top(form, logits.to(device_of(form)), k)
        assert_best(found, logits, k, stable)


def of_parts(form: str, logits: Tensor, borders: tuple[int, ...], k: int) -> TopTokens:
    """The best of all ranks' tokens, of which each rank has those up to a border."""
    backend, told, first = backend_of(form), [], 0
    for own in logits.to(device_of(form)).tensor_split(borders, dim=1):
        if form == "triton":  # in several blocks
            from mamba_eagle.kernels.top_parts.triton import packed

            told.append(packed(own[:, None], first, None, None, k, block=32))
        else:
            told.append(backend.top_part(own[:, None], first, None, None, k))
        first += own.shape[1]
    found = backend.top_of_parts(torch.stack(told), None, None, lanes=1)
    return TopTokens(*(part[:, 0] for part in found))


@every_form
@pytest.mark.parametrize("kind", ["ties", "impossible"])
def test_ranks_with_parts_of_the_tokens_find_the_best_of_all(form: str, kind: str) -> None:
    """Also where a rank has fewer than k tokens, or none that is possible."""
    for n, vocab, k, borders in ((3, 50, 3, (17, 34)), (2, 90, 5, (2, 50)), (2, 64, 1, (32,))):
        logits = rows_of(kind, n, vocab, torch.float32)
        stable = form != "torch" or len(logits.unique()) == logits.numel()
        assert_best(of_parts(form, logits, borders, k), logits, k, stable)


def test_parts_of_a_row_worked_out_by_hand() -> None:
    """Two equal logits on different ranks: the lower token comes first."""
    told = [parts_naive.part([-1.0, 2.0], 0, 2), parts_naive.part([2.0, 0.5], 2, 2)]
    assert told[1].tokens == [2, 3] and told[0].log_total == pytest.approx(0.0485874)
    found, whole = parts_naive.merged(told, 3), naive.top_log_probs([-1.0, 2.0, 2.0, 0.5], 3)
    assert found.tokens == whole.tokens == [1, 2, 3]
    assert found.log_probs == pytest.approx(whole.log_probs)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "impossible", "large"])
def test_a_cpu_takes_the_fused_form(kind: str) -> None:
    logits = rows_of(kind, 4, 75, torch.float32)
    assert_best(host_backend().top_log_probs(logits, 5), logits, 5)


@runs_kernels
def test_rows_may_be_part_of_wider_ones() -> None:
    wide = rows_of("random", 5, 200, torch.float32).to(DEVICE)
    assert_best(top("triton", wide[::2, 40:150], 4), wide[::2, 40:150], 4)


@runs_kernels
@pytest.mark.parametrize("k", [0, 17, 11])
def test_a_k_that_cannot_be_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k}: must be between 1 and 16, and at most the 10"):
        top("triton", torch.zeros(2, 10, device=DEVICE), k)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("n", [1, 3, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_other_logits(n: int, dtype: torch.dtype) -> None:
    """At the size of a real vocabulary; of many rows every eighth is looked at."""
    from mamba_eagle.kernels.top_log_probs import triton

    logits = rows_of("random", n, 131072, dtype).to(DEVICE)
    triton.top_log_probs(logits, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton.top_log_probs(logits, 3)
    some = slice(None, None, 8 if n > 8 else 1)
    for kind in ("ties", "random", "impossible"):
        logits.copy_(rows_of(kind, n, 131072, dtype))
        graph.replay()
        assert_best(TopTokens(*(part[some] for part in found)), logits[some], 3)
