"""Attention by FlashInfer: what it is told, and on a GPU what it answers.

Without a GPU a wrapper in plain torch stands in for FlashInfer's. It follows the documentation of
BatchPrefillWithPagedKVCacheWrapper, so it shows whether plans mean what we want them to mean.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from prompt_inputs import ATTENTION, SPANS, Inputs
from torch import Tensor
from triton_rig import triton_backend

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.torch.attention import CausalAttention
from mamba_eagle.kernels.tree_attention.torch import masked_attention

pytest.importorskip("triton")

MODELS = Path(__file__).parents[3] / "benchmark/models"
MODULE = "mamba_eagle.backend.triton.flashinfer"


class Event:
    """Made with each wrapper: a recorded copy counts as pending until ``synchronize``."""

    last: Event

    def __init__(self) -> None:
        self.copied = True

    def record(self) -> None:
        self.copied = False

    def synchronize(self) -> None:
        self.copied = True


class PlainWrapper:
    """Checks plans as the device would, and runs them request by request."""

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.event = Event.last = Event()

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        pages = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 for part in pages)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert page_size == 1 and bool((paged_kv_last_page_len == 1).all())
        assert self.event.copied, "the device may still be copying the last plan"
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.queries, self.keys = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.read, self.options = paged_kv_indices.long(), options

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        keys, values = (part.flatten(0, 1) for part in cache)  # pages of one token
        assert (q.shape[1], keys.shape[1], keys.shape[2]) == self.heads
        assert self.options["causal"]
        spans = zip(self.queries, self.queries[1:], self.keys, self.keys[1:])
        for first, end, first_key, end_key in spans:
            T, S = end - first, end_key - first_key
            seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
            at = self.read[first_key:end_key]
            scale = self.options["sm_scale"]
            inputs = (part[None] for part in (q[first:end], keys[at], values[at], seen))
            out[first:end] = masked_attention(*inputs, scale)[0]
        return out


@pytest.fixture
def plain_flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = PlainWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event.last)
    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    yield
    sys.modules.pop(MODULE, None)  # it holds the stand-in


def prompt_attention(pool: KVPool, table: Tensor) -> NewTokenAttention | None:
    """As a backend with FlashInfer chooses it."""
    backend: Any = triton_backend()
    backend.flashinfer = True
    parts: Any = [SimpleNamespace(span=span) for span in SPANS]
    return backend.prompt_attention(pool, table, parts)


def check_prompts(inputs: Inputs) -> None:
    ours, _ = inputs.pools
    found = prompt_attention(ours, inputs.table)
    assert type(found).__name__ == "FlashInferPrompts"
    inputs.check(found)


def test_prompts_are_planned_as_the_torch_path_runs_them(plain_flashinfer: None) -> None:
    check_prompts(Inputs("cpu", torch.float32, ATTENTION))


def test_plans_wait_for_the_copy_of_the_last_one_of_their_wrapper(plain_flashinfer: None) -> None:
    inputs = Inputs("cpu", torch.float32, ATTENTION)
    wrappers = []
    for _ in range(4):
        prompts: Any = prompt_attention(inputs.pools[0], inputs.table)
        prompts.attend(inputs.layer, *inputs.tokens(sum(span.length for span in SPANS)))
        wrappers.append(prompts.wrapper)
        assert not prompts.wrapper.event.copied, "this plan's copy is awaited before the next"
    assert wrappers[0] is wrappers[2] is not wrappers[1] is wrappers[3]


def needed_bytes(queries: list[int], keys: list[int], heads: int, kv_heads: int, size: int) -> int:
    """What FlashInfer 0.6.18's PrefillPlan takes of the workspace on a chip of 132
    multiprocessors."""
    tiles = [-(-n * (heads // kv_heads) // 128) for n in queries]

    def shares(length: int) -> int:
        return sum(t * -(-n // length) for t, n in zip(tiles, keys))

    room, low, high = 2 * 132 // kv_heads, 128, max(keys)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if shares(middle) > room else (low, middle)
    return heads * shares(low) * 128 * (size + 1) * 4 if low < max(keys) else 0


@pytest.mark.parametrize("folder", sorted(MODELS.iterdir()), ids=lambda path: path.name)
def test_every_plan_of_a_published_geometry_fits(folder: Path, plain_flashinfer: None) -> None:
    from mamba_eagle.backend.triton.flashinfer import workspace_bytes

    values = json.loads((folder / "config.json").read_text())
    heads = (values["num_attention_heads"], values["num_key_value_heads"])
    size = values.get("head_dim") or values["hidden_size"] // heads[0]
    room, most = workspace_bytes(*heads, size, 132), 0
    rng = random.Random(3)
    for tokens, requests in itertools.product((300, 2048, 8192), (1, 2, 3, 8, 32, 256)):
        for prefix in (0, 500, 8192, 100_000):
            queries = [max(1, tokens // requests - rng.randrange(0, 9)) for _ in range(requests)]
            queries = [n if rng.random() < 0.7 else rng.randrange(1, 600) for n in queries]
            keys = [n + rng.randrange(prefix + 1) for n in queries]
            most = max(most, needed_bytes(queries, keys, *heads, size))
    assert 0 < most <= room


def test_prompts_without_a_plan_take_the_torch_path(
    plain_flashinfer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_s")

    monkeypatch.setattr(PlainWrapper, "plan", refuse)
    check_prompts(Inputs("cpu", torch.float32, ATTENTION))


def test_other_head_sizes_take_the_torch_path(plain_flashinfer: None) -> None:
    inputs = Inputs("cpu", torch.float32, replace(ATTENTION, head_dim=80))
    found = prompt_attention(inputs.pools[0], inputs.table)
    assert isinstance(found, CausalAttention)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flashinfer_gives_what_torch_gives(dtype: torch.dtype, head_dim: int) -> None:
    pytest.importorskip("flashinfer")
    attention = replace(ATTENTION, head_dim=head_dim)
    check_prompts(Inputs("cuda", dtype, attention))
