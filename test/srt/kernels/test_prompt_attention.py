"""Attention of prompts on Hopper: on a CPU in the rig, and on a GPU."""

from __future__ import annotations

import random
from typing import NamedTuple

import hopper_rig  # noqa: F401 - for the interpreted module
import prompt_inputs
import pytest
import torch
from forms import GPU
from gluon_rig import interpreted
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.place import Cuda, Host
from mamba_eagle.backend.triton import prompt_attention as gathered
from mamba_eagle.kernels.exact_attention.triton import prompt_tiles
from mamba_eagle.kernels.prompt_attention import naive
from mamba_eagle.kernels.prompt_attention.gluon import TILE, prompt_attention, supports

Span = tuple[int, int]
# starts and lengths: whole tiles, one token, ends inside of a tile, no or several whole tiles first
SPANS = [(0, 200), (130, 70), (0, 1), (64, 64), (63, 65), (127, 1), (300, 130)]


class Inputs(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    def tiles(self, spans: list[Span]) -> Tensor:
        chunks, first = [], 0
        for start, length in spans:
            chunks.append((first, start, length))
            first += start + length
        tiles = prompt_tiles(chunks, TILE)
        return torch.tensor(tiles, dtype=torch.int32, device=self.q.device)


def inputs(
    shape: tuple[int, int, int], spans: list[Span], device: str, dtype: torch.dtype
) -> Inputs:
    """Queries are a part of longer rows."""
    heads, kv_heads, D = shape
    generator = torch.Generator().manual_seed(0)
    n, S = sum(length for _, length in spans), sum(map(sum, spans))
    q, keys, values = (
        torch.randn(*size, D, generator=generator).to(device, dtype)
        for size in ((n, heads + 1), (S, kv_heads), (S, kv_heads))
    )
    return Inputs(q[:, :heads], keys, values, 2 * D**-0.5)


def assert_close(found: Tensor, wanted: Tensor, spans: list[Span]) -> None:
    """Chunk by chunk."""
    lengths = [length for _, length in spans]
    for span, *pair in zip(spans, found.cpu().double().split(lengths), wanted.split(lengths)):
        error = float((pair[0] - pair[1]).norm() / pair[1].norm())
        assert error < 1e-2, span


def test_a_token_sees_its_request_up_to_itself() -> None:
    (kernels,) = interpreted("prompt_attention.gluon")
    given = inputs((2, 1, 64), SPANS, "cpu", torch.bfloat16)
    found = kernels.prompt_attention(*given[:3], given.tiles(SPANS), given.scale)
    assert_close(found, naive.prompt_attention(*given[:3], SPANS, given.scale), SPANS)


@pytest.mark.parametrize("most_keys", [2**17, 50, 1], ids=["together", "two-parts", "each"])
@pytest.mark.parametrize("stored_as", [None, torch.float8_e4m3fn], ids=["as-written", "e4m3"])
def test_keys_are_gathered_from_the_pool(
    stored_as: torch.dtype | None, most_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "MOST_KEYS", most_keys)
    device = "cuda" if GPU else "cpu"
    if not GPU:
        (kernels,) = interpreted("prompt_attention.gluon")
        monkeypatch.setattr(gathered, "prompt_attention", kernels.prompt_attention)
    given = prompt_inputs.Inputs(device, torch.bfloat16, prompt_inputs.ATTENTION, stored_as)
    place = Cuda(torch.device(device)) if GPU else Host()
    spans = prompt_inputs.SPANS
    prompts = gathered.GatheredPrompts(given.pools[0], given.table, spans, place)
    assert len(prompts.parts) == {2**17: 1, 50: 2, 1: 3}[most_keys]
    given.check(prompts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 2, 256), (10, 2, 128), (4, 4, 64)], ids=str)
def test_a_gpu_gives_what_the_definition_gives(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rng = random.Random(3)
    spans = [*SPANS, *((rng.randrange(900), rng.randrange(1, 300)) for _ in range(4))]
    rng.shuffle(spans)
    given = inputs(shape, spans, "cuda", dtype)
    if not supports(shape[2], dtype, given.q.device):
        pytest.skip("needs a Hopper GPU")
    tiles = given.tiles(spans)
    found = prompt_attention(*given[:3], tiles, given.scale)
    wanted = naive.prompt_attention(*(part.cpu() for part in given[:3]), spans, given.scale)
    assert_close(found, wanted, spans)
    assert torch.equal(found, prompt_attention(*given[:3], tiles, given.scale))
