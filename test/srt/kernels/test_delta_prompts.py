"""Prompts of delta rules on a GPU against the recurrence, token by token in float64."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import hopper_rig  # noqa: F401 - for the interpreted module
import pytest
import torch
import torch.nn.functional as F
from forms import DEVICE, GPU, INTERPRETED, in_the_interpreter, runs_kernels
from gluon_rig import interpreted
from tensor_checks import Draw, relative_error
from test_triton_delta import QWEN_27B, QWEN_35B, Case, Random
from torch import Tensor
from triton_rig import BFLOAT16_ERROR, triton_backend
from verify_rig import HIDDEN, Sequence, delta_config, random_mixer

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.prefill import prefill_parts
from mamba_eagle.backend.triton.delta_prefill import DeltaPrefillContext, Stretches, TorchScan
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.delta_rule import gluon_prompts, naive
from mamba_eagle.kernels.delta_rule.triton_gates import chunk_gates, delta_gates
from mamba_eagle.kernels.delta_rule.triton_states import CHUNK, states
from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify.layout import Sizes
from mamba_eagle.layers.delta_rule import DeltaRule
from mamba_eagle.message import FirstChunk, PrefillItem, StateSave
from mamba_eagle.model_config import DeltaConfig

test_in_the_interpreter = in_the_interpreter

needs_fla = pytest.mark.skipif(
    not (GPU and find_spec("fla")), reason="fla-core is not installed, or there is no GPU"
)
ITEMS = (  # slot, state slot, start, length, state to start from, saves
    (0, 3, 10, 21, 3, ((15, 1), (26, 7), (26, 13))),
    (1, 0, 0, 1, -1, ()),
    (2, 5, 40, 2, 6, ((40, 11), (41, 8), (42, 9))),
    (3, 4, 5, 70, 4, ((70, 10),)),
    (4, 2, 0, 3, -1, ((3, 12),)),
)
STATE_SLOTS = 15


def prompt_items() -> list[PrefillItem]:
    return [
        PrefillItem(
            slot=slot,
            state_slot=own,
            start=start,
            token_ids=list(range(length)),
            kv_slots=list(range(length)),
            saves=[StateSave(*save) for save in saves],
            first=FirstChunk(sampling=SamplingParams(), output_start=99, load_from=source)
            if source != own
            else None,
        )
        for slot, own, start, length, source, saves in ITEMS
    ]


class Prompts:
    """A pool with random states, and random inputs of one layer."""

    def __init__(self, items: list[PrefillItem], ssm_dtype: torch.dtype) -> None:
        draw, config = Draw(0), delta_config(16, 16)
        self.layer: Any = random_mixer(config, 0, seed=1).to(DEVICE)
        backend, table = triton_backend(), RequestTable(len(ITEMS), 128, DEVICE)
        table.seed += torch.arange(len(ITEMS), device=DEVICE)
        mode = "nearest" if ssm_dtype == torch.float32 else "stochastic"
        rounding = backend.state_rounding(mode, ssm_dtype, table)
        pool = StatePool(1, STATE_SLOTS, config, HIDDEN, rounding, torch.float32, DEVICE)
        pool.ssm += draw.normal(*pool.ssm.shape).to(DEVICE)
        pool.conv += draw.normal(*pool.conv.shape).to(DEVICE)
        self.items, self.pool, self.table = items, pool, table
        tokens = sum(len(item.token_ids) for item in items)
        self.channels = draw.normal(tokens, config.conv_dim)
        self.raw = draw.normal(tokens, 2 * config.num_heads)

    def run(self) -> Tensor:
        parts, place = prefill_parts(self.items), triton_backend().place
        ctx = DeltaPrefillContext(parts, self.pool, None, place, TorchScan())
        return ctx.recur(self.layer, self.channels.to(DEVICE), self.raw.to(DEVICE)).cpu()


def start_of(item: PrefillItem, pool: StatePool) -> Sequence:
    found = Sequence(pool.ssm[0, item.source].double().cpu(), pool.conv[0, item.source].cpu())
    if item.source < 0:
        found = Sequence(*map(torch.zeros_like, found))
    return found._replace(history=found.history.double())


@runs_kernels
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chosen", [[0], [1, 4], range(len(ITEMS))], ids=["one", "new", "all"])
def test_prompts_and_states_saved_inside_them_are_the_recurrence(
    chosen: list[int], ssm_dtype: torch.dtype
) -> None:
    prompts = Prompts([prompt_items()[i] for i in chosen], ssm_dtype)
    starts = [start_of(item, prompts.pool) for item in prompts.items]
    before = prompts.pool.ssm.clone()
    found = prompts.run()
    pool, layer, token, saved = prompts.pool, prompts.layer.cpu(), 0, set()
    for item, sequence in zip(prompts.items, starts, strict=True):
        end = item.start + len(item.token_ids)
        saves = [*((save.position, save.state_slot) for save in item.saves), (end, item.state_slot)]
        for position in range(item.start, end + 1):
            if position > item.start:
                given = (prompts.channels[token], prompts.raw[token])
                sequence, y = sequence.after(layer, *given)
                assert relative_error(found[token], y.flatten()) < 1e-5
                token += 1
            for slot in (slot for at, slot in saves if at == position):
                check_saved(pool, slot, sequence, (int(prompts.table.seed[item.slot]), position))
                saved.add(slot)
    rest = [slot for slot in range(STATE_SLOTS) if slot not in saved]
    assert torch.equal(pool.ssm[:, rest], before[:, rest])


def check_saved(pool: StatePool, slot: int, wanted: Sequence, noise: tuple[int, int]) -> None:
    found = pool.ssm[0, slot].cpu()
    if found.dtype == torch.float32:
        assert relative_error(found, wanted.state) < 1e-5
    else:
        keys = token_keys(*(torch.tensor([number]) for number in noise))
        rounded = round_states(wanted.state.float()[None], keys, 0, found.dtype)[0]
        # a number beside its threshold may be rounded to the other side
        assert float((found != rounded).double().mean()) < 1e-3
    assert torch.equal(pool.conv[0, slot].cpu().double(), wanted.history)


class Rule(DeltaRule):
    """Its gates are made."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.config, self.index = config, 0

    def gates(self, raw: Tensor) -> Tensor:
        return raw


FLA_CASES = {
    "27b": Case(QWEN_27B, 1, 0, (), dtype=torch.bfloat16),
    "35b": Case(QWEN_35B, 1, 0, (), dtype=torch.bfloat16),
    "beta-2": Case(QWEN_35B, 1, 0, (), dtype=torch.bfloat16, max_beta=2.0),
    "forgets-all": Case(QWEN_35B, 1, 0, (), dtype=torch.bfloat16, decay=200.0),
    "float32": Case(Sizes(4, 32, 2, 32), 1, 0, ()),
}


STRETCHES = {  # of each request
    "27b": [[65], [64], [63], [200], [1]],
    "35b": [[130, 64, 70], [1]],
    "beta-2": [[130, 3], [7, 1]],
    "forgets-all": [[130], [7]],
    "float32": [[70, 65], [3]],
}


@pytest.mark.gpu
@needs_fla
@pytest.mark.parametrize("name", FLA_CASES)
def test_scans_of_fla_are_the_recurrence(name: str) -> None:
    from mamba_eagle.backend.triton.fla import FlaScan

    case, lengths = FLA_CASES[name], STRETCHES[name]
    random, sizes = Random(case), case.sizes
    config = DeltaConfig(sizes.heads, sizes.head_dim, sizes.state_size, sizes.groups, 4)
    gates, convolved = random.tokens(sum(map(sum, lengths)))
    state = random.draw.normal(len(lengths), *config.state_shape)
    keys, size = config.key_size, (config.num_groups, config.state_size)
    q, k, v = convolved.split([keys, keys, config.inner_size], dim=1)
    q, k = (F.normalize(part.unflatten(1, size).float(), dim=2) for part in (q, k))
    heads = q, k, v.unflatten(1, (config.num_heads, -1))
    heads = [part.to(DEVICE, convolved.dtype).contiguous() for part in heads]
    stretches = Stretches.of(lengths, triton_backend().place)
    with torch.inference_mode():
        y, ends = FlaScan().scan(Rule(config), heads, gates.to(DEVICE), stretches, state.to(DEVICE))
    limit = BFLOAT16_ERROR if case.dtype == torch.bfloat16 else 1e-3  # of tf32
    first, found = 0, iter(ends)
    for own, begun in zip(lengths, state, strict=True):
        span = slice(first, first + sum(own))
        rule = random.rule(gates[span].to(DEVICE), convolved[span].to(DEVICE))
        nodes = naive.chain(rule, begun.to(DEVICE))
        wanted = torch.stack([node.o for node in nodes]).flatten(1)
        assert relative_error(y[span], wanted) < 4 * limit
        for end in accumulate(own):
            assert relative_error(next(found), nodes[end - 1].state) < 4 * limit
        first = span.stop


@runs_kernels
@pytest.mark.parametrize("made", [False, True], ids=["raw", "made"])
def test_gates_of_chunks(made: bool) -> None:
    """Rows of a wider product."""
    H, lengths, draw = 3, [[70, 65], [3]], Draw(0)
    starts = Stretches.of(lengths, triton_backend().place).starts
    raw, rate, bias = draw.normal(138, 2 * H + 2)[:, 2:], -draw.normal(H).abs(), draw.normal(H)
    raw, rate, bias = (part.to(DEVICE).float() for part in (raw, rate, bias))
    wanted = raw if made else delta_gates(raw, rate, bias, 2.0)
    found = chunk_gates(raw, None if made else (rate, bias), 2.0, starts, CHUNK)
    g, beta = (part.cpu() for part in found)
    assert torch.equal(beta, wanted[:, H:].cpu())
    for begin, end in pairwise(starts.tolist()):
        sums = wanted[begin:end, :H].double().cpu().cumsum(0) / math.log(2)
        torch.testing.assert_close(g[begin:end].double(), sums, rtol=1e-5, atol=1e-5)


class Walk(NamedTuple):
    """Inputs of a walk along some requests' stretches."""

    q: Tensor
    k: Tensor
    w: Tensor
    u: Tensor
    g: Tensor
    state: Tensor
    stretches: Stretches

    @classmethod
    def of(cls, sizes: Sizes, lengths: list[list[int]], dtype: torch.dtype) -> Walk:
        (H, P, G, N), draw, n = sizes, Draw(0), sum(map(sum, lengths))
        q, k = draw.normal(n, G, N), draw.normal(n, G, N)
        w, u = draw.normal(n, H, N) / N, draw.normal(n, H, P)
        g = -draw.normal(n, H).abs().cumsum(0).float() / 9
        state = draw.normal(len(lengths), H, P, N).float()
        stretches = Stretches.of(lengths, triton_backend().place)
        return cls(*(part.to(dtype) for part in (q, k, w, u)), g, state, stretches)

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.stretches.starts, self.stretches.ends, self.stretches.chunks

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(part.to(device) for part in self[:6])

    def wanted(self) -> tuple[Tensor, ...]:
        """The states that chunks begin with, values, those at the stretches' ends, and what is
        read; in float64."""
        q, k, w, u, g, state = (part.double() for part in self[:6])
        q, k = (part.repeat_interleave(u.shape[1] // k.shape[1], 1) for part in (q, k))
        starts, ends, chunks = (part.tolist() for part in self.where)
        firsts, values, saved, y = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for chunk, own in enumerate(map(slice, starts, starts[1:])):
            if chunk in chunks:
                s = state[chunks.index(chunk)]
            since, last = torch.exp2(g[own]), g[own][-1]
            v = u[own] - torch.einsum("hpn,thn->thp", s, w[own])
            decay = torch.exp2(g[own, None] - g[None, own])
            pairs = torch.einsum("thn,ihn,tih->hti", q[own], k[own], decay).tril()
            read = torch.einsum("hpn,thn,th->thp", s, q[own], since)
            y.append((read + torch.einsum("hti,ihp->thp", pairs, v)) * q.shape[2] ** -0.5)
            firsts.append(s)
            values.append(v)
            added = torch.einsum("thp,thn,th->hpn", v, k[own], torch.exp2(last - g[own]))
            s = s * torch.exp2(last)[:, None, None] + added
            if ends[chunk] >= 0:
                saved.append(s)
        return torch.stack(firsts), torch.cat(values), torch.stack(saved), torch.cat(y)


@runs_kernels
def test_states_from_chunk_to_chunk() -> None:
    """Against the definition, with chunks that are not whole. A GPU's products of float32 round
    their factors to ten bits, and a state passes several of them."""
    walk = Walk.of(Sizes(4, 16, 2, 32), [[70, 65], [3]], torch.float32)
    assert walk.stretches.starts.tolist() == [0, 64, 70, 134, 135, 138]
    assert walk.stretches.chunks.tolist() == [0, 4, 5]
    found = states(*walk.inputs(DEVICE)[1:], walk.where, 3)
    for own, wanted in zip(found, walk.wanted()):
        for each, definition in zip(own.cpu(), wanted, strict=True):
            assert relative_error(each, definition) < 2e-3


@pytest.mark.skipif(INTERPRETED, reason="the rig runs in another process")
def test_a_walk_on_hopper_in_the_rig() -> None:
    """A chunk that ends inside of a tile, three that do not, and several rows' programs."""
    (kernels,) = interpreted("delta_rule.gluon_prompts")
    check_walk(kernels, Sizes(2, 128, 1, 64), torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_a_walk_on_hopper(size: int, dtype: torch.dtype) -> None:
    sizes = Sizes(8, 128, 4, size)
    if not gluon_prompts.supports(torch.empty(1, *sizes[:2], dtype=dtype, device=DEVICE), size):
        pytest.skip("needs a Hopper GPU")
    check_walk(gluon_prompts, sizes, dtype, DEVICE)


def check_walk(kernels: Any, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Also with what tiles hold of a request that has become NaN."""
    walk = Walk.of(sizes, [[70, 65], [3], [300]], dtype)
    where = tuple(part.to(device) for part in walk.where)
    _, _, ends, y = walk.wanted()
    found = kernels.walk(*walk.inputs(device), where, 4)
    for own, wanted in zip(found, (y, ends)):
        for each, definition in zip(own.cpu(), wanted, strict=True):
            assert relative_error(each, definition) < 2 * BFLOAT16_ERROR
    for part in walk[:4]:
        part[135:138] = torch.nan
    after = kernels.walk(*walk.inputs(device), where, 4)
    for pair, own in zip(zip(found, after), (slice(135, 138), slice(2, 3))):
        once, again = (part.cpu() for part in pair)
        assert again[own].isnan().any()
        once[own] = again[own] = 0
        assert torch.equal(once, again)
