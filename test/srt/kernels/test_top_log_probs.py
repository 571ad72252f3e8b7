"""The best tokens of rows of logits, by Triton and on a CPU, against a stable sort in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tensor_checks import host_backend
from triton_rig import DEVICE, GPU, needs_interpreter, run_in_the_interpreter, runs_kernels

from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.top_log_probs import torch as torch_top
from mamba_eagle.kernels.top_log_probs import triton
from mamba_eagle.kernels.top_log_probs.torch import TopTokens


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def sorted_oracle(logits: Tensor, k: int) -> TopTokens:
    """Of equal logits the lower id comes first."""
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return TopTokens(logits.double().log_softmax(-1).gather(1, order), order)


def rows_of(kind: str, n: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(vocab + n)
    logits = 4 * torch.randn(n, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros(n, vocab)
        logits[:, ::2] = -0.0  # is no less than 0.0
    elif kind == "impossible":  # for most tokens, for whole blocks of them
        logits[:, 2:-2] = -torch.inf
    elif kind == "large":
        logits = logits * 1000 - 5000
    return logits.to(dtype)


def assert_best(found: TopTokens, logits: Tensor, k: int) -> None:
    expected = sorted_oracle(logits.cpu(), k)
    assert found.log_probs.dtype == torch.float32 and found.tokens.dtype == torch.int64
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(
        found.log_probs.cpu().double(), expected.log_probs, rtol=1e-6, atol=2e-6
    )


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "impossible", "large"])
def test_the_best_are_those_of_a_stable_sort(kind: str, dtype: torch.dtype) -> None:
    """In one block and in several, the last of which may be partly or nearly empty."""
    if kind == "large" and dtype == torch.float16:
        dtype = torch.float32  # beyond its range
    for n, vocab, k in ((3, 50, 3), (1, 16, 16), (2, 193, 5), (2, 128, 1)):
        logits = rows_of(kind, n, vocab, dtype).to(DEVICE)
        assert_best(triton.top_log_probs(logits, k, block=64), logits, k)


@runs_kernels
def test_rows_may_be_part_of_wider_ones() -> None:
    wide = rows_of("random", 5, 200, torch.float32).to(DEVICE)
    assert_best(triton.top_log_probs(wide[::2, 40:150], 4, 64), wide[::2, 40:150], 4)


@runs_kernels
@pytest.mark.parametrize("k", [0, 17, 11])
def test_a_k_that_cannot_be_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k}: must be between 1 and 16, and at most the 10"):
        triton.top_log_probs(torch.zeros(2, 10, device=DEVICE), k)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "impossible", "large"])
@pytest.mark.skipif(numba_math.numba is None, reason="numba is not installed")
def test_a_cpu_finds_the_same(kind: str) -> None:
    logits = rows_of(kind, 4, 75, torch.float32)
    # different logits may have equal log-probabilities: those are what ranks here
    assert_best(host_backend().top_log_probs(logits, 4), logits.log_softmax(-1), 4)


def test_the_readable_form_gives_the_same_values() -> None:
    logits = rows_of("random", 4, 75, torch.float32)
    assert_best(torch_top.top_log_probs(logits, 5), logits, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("n", [1, 3, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_other_logits(n: int, dtype: torch.dtype) -> None:
    """At the size of a real vocabulary."""
    logits = rows_of("random", n, 131072, dtype).to(DEVICE)
    triton.top_log_probs(logits, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton.top_log_probs(logits, 3)
    for kind in ("ties", "random", "impossible"):
        logits.copy_(rows_of(kind, n, 131072, dtype))
        graph.replay()
        assert_best(found, logits, 3)
