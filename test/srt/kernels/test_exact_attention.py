"""Attention with the same bits however a token is served: its values against naive.py, and prompts,
chunks, chains, trees and batches against each other; on a GPU to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, in_the_interpreter, runs_kernels
from torch import Tensor

pytest.importorskip("triton")

from triton_rig import triton_backend

from mamba_eagle.backend.attention import PromptSpan, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.triton.attention import TritonTreeAttention
from mamba_eagle.backend.triton.exact_attention import ExactPrompts, ExactTreeAttention
from mamba_eagle.kernels.exact_attention import naive
from mamba_eagle.kernels.exact_attention import triton as kernels
from mamba_eagle.kernels.exact_attention.triton_pages import lay_out
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_verify.naive import root_path
from mamba_eagle.model_config import AttentionConfig

SMALL = (6, 2, 20)  # query heads, key heads, channels
GARBAGE = 1e4  # in KV slots that must not be read

test_in_the_interpreter = in_the_interpreter


class Text(NamedTuple):
    """What attention gets of some tokens."""

    q: Tensor  # [n, heads, D]
    k: Tensor  # [n, kv_heads, D]
    v: Tensor

    def __add__(self, other: Any) -> Text:
        return Text(*(torch.cat(parts) for parts in zip(self, other)))

    def at(self, tokens: Sequence[int] | slice) -> Text:
        return Text(*(part[tokens] for part in self))


def joined(texts: Sequence[Text]) -> Text:
    return Text(*(torch.cat(parts) for parts in zip(*texts)))


class World:
    """A pool whose free KV slots are handed out in random order, and a layer."""

    def __init__(
        self, shape: tuple[int, int, int] = SMALL, dtype: torch.dtype = torch.float32, size: int = 0
    ) -> None:
        heads, kv_heads, D = self.shape = shape
        config = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=D)
        self.random = random.Random(1)
        self.generator = torch.Generator().manual_seed(0)
        self.pool = KVPool(1, size or 3000, config, dtype, DEVICE)
        self.layer: Any = SimpleNamespace(index=0, scale=0.3)
        self.place = triton_backend().place
        self.reset()

    def reset(self) -> None:
        """All slots are free again, and full of garbage."""
        self.pool.k.fill_(GARBAGE)
        self.pool.v.fill_(-GARBAGE)
        self.free = torch.randperm(len(self.pool.k[0]) - 1, generator=self.generator).tolist()

    def slots(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n
        return taken

    def text(self, n: int) -> Text:
        """Queries that see a few keys, values of different sizes, as views of one product."""
        heads, kv_heads, D = self.shape
        packed = torch.randn(n, heads + 2 * kv_heads, D, generator=self.generator)
        sizes = torch.randint(-4, 5, (n, kv_heads, 1), generator=self.generator)
        packed[:, -kv_heads:] *= sizes.float().exp2()
        parts = packed.to(self.pool.k).split([heads, kv_heads, kv_heads], dim=1)
        return Text(*parts)

    def prompts(
        self, texts: Sequence[Text], cuts: Sequence[Sequence[int]] | None = None, start: int = 0
    ) -> list[Tensor]:
        """The outputs of texts from position ``start`` on, each in chunks that end at its ``cuts``;
        the keys and values before are in the pool."""
        lengths = [len(text.q) for text in texts]
        table = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
        for row, n in zip(table, lengths):
            row[:n] = torch.tensor(self.slots(n))
        table = table.to(DEVICE)
        for row, text in zip(table, texts):
            self.pool.write(0, row[:start], text.k[:start], text.v[:start])
        ends = [sorted({*cut, n}) for cut, n in zip(cuts or [[]] * len(texts), lengths)]
        found = [[] for _ in texts]  # type: list[list[Tensor]]
        while any(ends):
            live = [i for i, mine in enumerate(ends) if mine]
            self.random.shuffle(live)
            begins = [start + sum(map(len, found[i])) for i in live]
            spans = [PromptSpan(i, begin, ends[i].pop(0) - begin) for i, begin in zip(live, begins)]
            new = joined([texts[i].at(slice(s, s + n)) for i, s, n in spans])
            out = ExactPrompts(self.pool, table, spans, self.place).attend(self.layer, *new)
            for i, part in zip(live, out.split([span.length for span in spans])):
                found[i].append(part)
        return [torch.cat(parts) for parts in found]

    def trees(
        self,
        texts: Sequence[Text],
        nodes: Sequence[Text],
        parents: Sequence[Sequence[int]],
        form: Any = ExactTreeAttention,
    ) -> Tensor:
        """The outputs of a tree behind each text: [b, T, heads, D]."""
        b, T = len(texts), len(parents[0])
        prefix = [len(text.q) for text in texts]
        table = torch.zeros(b, max(prefix) + 1, dtype=torch.int64)
        for row, n, text in zip(table, prefix, texts):
            row[:n] = torch.tensor(self.slots(n))
            self.pool.write(0, row[:n].to(DEVICE), text.k, text.v)
        own = torch.tensor([self.slots(T) for _ in texts], device=DEVICE)
        seen = torch.stack([ancestors(each) for each in parents]).to(DEVICE)
        rest = (torch.tensor(prefix, device=DEVICE), own, own, seen)
        form = form(self.pool, TreeNodes(table.to(DEVICE), torch.arange(b, device=DEVICE), *rest))
        new = joined(nodes)
        out = form.attend(self.layer, *new)
        for pool, written in ((self.pool.k, new.k), (self.pool.v, new.v)):
            assert torch.equal(pool[0][own.view(-1)], written)
        return out.unflatten(0, (b, T))


def ancestors(parents: Sequence[int]) -> Tensor:
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen[node, root_path(parents, node)] = True
    return seen


def random_tree(rng: random.Random, nodes: int, reach: int = 3) -> list[int]:
    """The smaller ``reach``, the deeper."""
    return [0, *(rng.randrange(max(0, i - reach), i) for i in range(1, nodes))]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """To the bit; numpy, which the interpreter multiplies with, promises less."""
    if GPU:
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def assert_trees_are_their_paths(
    world: World, texts: Sequence[Text], nodes: Sequence[Text], parents: Sequence[Sequence[int]]
) -> None:
    """Each path as a prompt."""
    found = world.trees(texts, nodes, parents)
    for out, text, mine, above in zip(found, texts, nodes, parents):
        paths = [root_path(above, i) for i in range(len(above)) if i not in above[i + 1 :]]
        for path in paths:
            if len(world.free) < len(text.q) + len(path):
                world.reset()
            assert_same(out[path], world.prompts([text + mine.at(path)], start=len(text.q))[0])


# ── the definition ──


def test_few_parts_are_joined_and_none_is_most_of_the_work() -> None:
    for length in (1, 256, 257, 4096, 4097, 8192, 9000, 70_000, 300_000):
        parts = naive.parts(length)
        assert kernels.num_parts(length) == len(parts) <= 16 + 8 * 7
        assert max(end - begin for begin, end in parts) <= max(256, length / 8)


@runs_kernels
def test_prompts_have_the_values_of_the_definition() -> None:
    world = World(size=700)
    texts = [world.text(n) for n in (5, 130, 260)]
    cuts = [[3], [128, 129], [255, 257]]
    for text, cut, start in zip(texts, cuts, (0, 124, 250)):
        world.reset()
        (out,) = world.prompts([text], [cut], start)
        for i in (0, 4, len(out) - 1):
            seen = text.at(slice(0, start + i + 1))
            wanted = naive.attention(seen.q[-1].cpu(), seen.k.cpu(), seen.v.cpu(), 0.3)
            torch.testing.assert_close(out[i].cpu(), wanted, rtol=1e-5, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_16_bits(dtype: torch.dtype) -> None:
    world = World(dtype=dtype)
    text = world.text(270)
    (out,) = world.prompts([text], start=250)
    for i in (0, 19):
        seen = Text(*(part[: 250 + i + 1].cpu() for part in text))
        wanted = naive.attention(seen.q[-1], seen.k, seen.v, 0.3).float()
        error = (out[i].cpu().float() - wanted).norm() / wanted.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-3)


# ── trees are their paths ──

TREES = {
    "a-chain-over-two-blocks": ((60, 0), [0, 0, 1, 2, 3, 4, 5, 6]),
    "a-chain-into-the-next-part": ((253, 31), [0, 0, 1, 2, 3, 4]),
    "one-node": ((256, 319, 5), [0]),
    "branches": ((250, 64), [0, 0, 0, 1, 1, 2, 5, 3, 7]),
    "more-leaves-than-columns": ((40, 14), [0] * 10),
    "a-crowd-in-a-step": ((12,), [0, 0, 1, 2, *(3, *range(4, 9)), *(3, *range(10, 15)), *[3] * 6]),
}


@runs_kernels
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("name", TREES)
def test_nodes_are_tokens_of_a_prompt(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 1 if whole else 10**9)
    prefixes, parents = TREES[name]
    world = World()
    texts = [world.text(n) for n in prefixes]
    nodes = [world.text(len(parents)) for _ in prefixes]
    assert_trees_are_their_paths(world, texts, nodes, [parents] * len(prefixes))


@runs_kernels
def test_a_tree_of_64_nodes_in_several_tiles() -> None:
    world = World((2, 1, 16))
    parents = [max(0, i - 2) for i in range(64)]  # two branches
    assert_trees_are_their_paths(world, [world.text(50)], [world.text(64)], [parents])


@runs_kernels
def test_pages_hold_whole_paths_in_their_steps() -> None:
    rng = random.Random(1)
    for nodes, reach in ((1, 1), (2, 1), (16, 1), (16, 3), (16, 64), (64, 2)):
        prefixes = [0, 63, 90, 1000 + nodes]
        seen = torch.stack([ancestors(random_tree(rng, nodes, reach)) for _ in prefixes])
        masks = pack_paths(seen)[..., 0].to(DEVICE)
        count, page_of, columns = lay_out(masks, torch.tensor(prefixes, device=DEVICE))
        for i, prefix in enumerate(prefixes):
            own, depth = seen[i], seen[i].sum(1) - 1
            leaves = int((own.sum(0) == 1).sum())
            assert 1 <= int(count[i]) <= leaves
            if nodes + prefix % 16 <= 16 or reach == 1:
                assert int(count[i]) == 1
            pages = columns[i, : int(count[i])].tolist()
            for node, page in enumerate(page_of[i].tolist()):
                for above in own[node].nonzero().flatten().tolist():
                    assert pages[page].count(above) == 1
            for page in pages:
                for column, node in enumerate(page):
                    if node >= 0:
                        position = prefix + int(depth[node])
                        assert (prefix // 64 * 64 + column) // 16 == position // 16
                        assert prefix // 64 * 64 + column >= prefix


@runs_kernels
def test_what_has_other_bits_is_refused() -> None:
    world = World()
    with pytest.raises(ValueError, match="at most 64"):
        world.trees([world.text(1)], [world.text(65)], [[0] * 65])
    world.pool.k = world.pool.k.to(torch.float8_e4m3fn)
    text = world.text(1)
    config = kernels.prompt_config(*world.shape, 4)
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        kernels.exact_prompt_attention(
            text.q.float(), world.pool.k[0], world.pool.v[0], text.q, text.q, 0.3, config
        )


# ── on a GPU, to the bit ──

KINDS = [
    ((40, 8, 128), torch.bfloat16),
    ((24, 4, 256), torch.bfloat16),
    ((16, 8, 64), torch.bfloat16),
    ((32, 2, 128), torch.float16),
    ((8, 8, 80), torch.float32),
]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("shape", "dtype"), KINDS, ids=str)
def test_every_way_to_serve_a_token_gives_its_bits(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Prompts alone and in batches and chunks, single tokens, chains and trees, of which a program
    takes a part or all."""
    world = World(shape, dtype, size=30_000)
    rng = random.Random(3)
    lengths = (1, 17, 300, 1100, 4500)
    texts = [world.text(n) for n in lengths]
    wanted = world.prompts(texts)
    for i in (1, 3):
        assert torch.equal(world.prompts([texts[i]])[0], wanted[i]), "alone"
    world.reset()
    cuts = [rng.sample(range(n), min(n, 4)) for n in lengths]
    order = rng.sample(range(len(texts)), len(texts))
    found = world.prompts([texts[i] for i in order], [cuts[i] for i in order])
    for i, out in zip(order, found):
        assert torch.equal(out, wanted[i]), "chunks"
    many = kernels.PROGRAMS // shape[1] + 1  # trees
    for nodes, b in ((1, 1), (1, 5), (8, many), (16, 2)):
        world.reset()
        chosen = rng.choices([3, 4] if b < many else [2], k=b)
        begins = [rng.randrange(lengths[i] - nodes) for i in chosen]
        prefixes = [texts[i].at(slice(0, begin)) for i, begin in zip(chosen, begins)]
        new = [texts[i].at(slice(s, s + nodes)) for i, s in zip(chosen, begins)]
        found = world.trees(prefixes, new, [[max(0, j - 1) for j in range(nodes)]] * b)
        for out, i, begin in zip(found, chosen, begins):
            assert torch.equal(out, wanted[i][begin : begin + nodes]), (nodes, b, "chains")
    for nodes, begins in ((8, [0, *rng.choices(range(300), k=many)]), (16, [62, 253, 1023, 4090])):
        world.reset()
        prefixes = [texts[4].at(slice(0, begin)) for begin in begins]
        parents = [random_tree(rng, nodes, rng.choice([1, 3, 9])) for _ in begins]
        new = [world.text(nodes) for _ in begins]
        assert_trees_are_their_paths(world, prefixes, new, parents)


@pytest.mark.gpu
@runs_kernels
def test_the_usual_kernel_has_other_bits() -> None:
    """So the comparisons above can see."""
    world = World((40, 8, 128), torch.bfloat16)
    text = world.text(700)
    wanted = world.prompts([text], start=699)[0][0]
    parts = [text.at(slice(0, 699))], [text.at([699])], [[0]]
    assert not torch.equal(world.trees(*parts, TritonTreeAttention)[0, 0], wanted)
    assert torch.equal(world.trees(*parts)[0, 0], wanted)
