"""Serves requests on a ModelRunner through plans alone, as the scheduler would.

Slots are assigned in random order, and freed slots are overwritten, so that a runner that still
reads them produces a different text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensor_checks import torch_path
from tiny_model import load_model, write_head, write_model
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.drafters import needs_history
from mamba_eagle.drafting.dflash import BlockDrafter
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.message import (
    DecodeBatch,
    FirstChunk,
    Plan,
    PrefillItem,
    Release,
    RequestResult,
    StateSave,
    StepResult,
    TokenLogprob,
)
from mamba_eagle.message.indices import indices
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

GARBAGE = 1000.0


def greedy(max_new_tokens: int, **others: Any) -> SamplingParams:
    others.setdefault("ignore_eos", True)
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **others)


def sampled(max_new_tokens: int, seed: int, **others: Any) -> SamplingParams:
    others.setdefault("ignore_eos", True)
    return SamplingParams(max_new_tokens=max_new_tokens, seed=seed, **others)


class Settings(NamedTuple):
    """How a runner speculates; the text must not depend on it."""

    algorithm: str = "EAGLE"
    scheme: str = "deferred"
    topk: int = 4
    steps: int = 4
    nodes: int = 12
    rows: int = 0
    fused: bool = True  # fused CPU kernels, where numba is installed
    p_min: float = 0.0  # what a random head drafts is never likely

    def config(self, model: Path, head: Path | None, **others: Any) -> EngineConfig:
        same = others.get("quantization", "auto") != "auto"  # else drafts would have eight bits
        values: dict[str, Any] = {
            "speculative_draft_model_quantization": "same" if same else "auto",
            "device": "cpu",
            "max_running_requests": 5,
            "max_total_tokens": 900,
            "max_mamba_cache_size": 24,
            **others,
        }
        return resolve(
            EngineConfig(
                model_path=str(model),
                speculative_algorithm=self.algorithm,
                speculative_draft_model_path=str(head or ""),
                speculative_num_steps=self.steps,
                speculative_eagle_topk=self.topk,
                speculative_num_draft_tokens=self.nodes,
                speculative_draft_p_min=self.p_min,
                mamba_verify_mode=self.scheme,
                mamba_rows=self.rows or None,
                **values,
            )
        )


PLAIN = Settings("NONE")
TREE = Settings()
DOUBTING = Settings(topk=1, steps=4, nodes=5, p_min=0.3)
SETTINGS = {
    "none": PLAIN,
    "none-snapshot": Settings("NONE", "snapshot"),
    "tree": TREE,
    "tree-snapshot": Settings(scheme="snapshot"),
    "tree-fewest-rows": Settings(rows=12),
    "tree-of-one-row-more": Settings(rows=13),
    "tree-many-rows": Settings(rows=150),
    "chain": Settings(topk=1, steps=4, nodes=5),
    "chain-snapshot": Settings("EAGLE", "snapshot", topk=1, steps=4, nodes=5),
    "chain-doubting": DOUBTING,
    "tree-doubting": DOUBTING._replace(topk=2, nodes=8),
    "star": Settings(topk=5, steps=1, nodes=6),
    "large-tree": Settings(topk=6, steps=7, nodes=40),
    "none-torch": PLAIN._replace(fused=False),
    "tree-torch": TREE._replace(fused=False),
    "tree-snapshot-torch": Settings(scheme="snapshot", fused=False),
    "chain-torch": Settings(topk=1, steps=4, nodes=5, fused=False),
}


class Prefix(NamedTuple):
    """A cached prefix of a request: its tokens, their KV slots, and the state slot at its end."""

    tokens: list[int]
    kv_slots: list[int]
    state_slot: int


class Proposal(NamedTuple):
    """A draft tree of one request, in plain numbers."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


@dataclass
class Live:
    """A running request and the runner's results for it."""

    slot: int
    state_slot: int
    tokens: list[int]  # prompt, then output
    prompt_len: int
    sampling: SamplingParams
    hit: Prefix | None
    kv: list[int]  # KV slots of the processed tokens
    folded: int = 0
    asks: dict[str, Any] = field(default_factory=dict)  # options, such as return_logprob
    steps: list[RequestResult] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    saved: dict[int, Prefix] = field(default_factory=dict)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def processed(self) -> int:
        return len(self.kv)


class Engine:
    """A runner, and the free slots of its pools."""

    def __init__(
        self, model: Path, head: Path | None, settings: Settings = TREE, **others: Any
    ) -> None:
        self.config, self.fused = settings.config(model, head, **others), settings.fused
        with torch_path(not self.fused):
            self.runner = assemble(self.config)
        self.shape = self.config.tree_shape
        self.eos = tuple(self.runner.ready.eos_token_ids)
        ready, shuffled = self.runner.ready, random.Random(5)
        self.free_kv = list(range(ready.max_kv_slots))
        self.free_states = list(range(ready.max_state_slots))
        self.free_slots = list(range(ready.max_running_requests))
        for slots in (self.free_kv, self.free_states, self.free_slots):
            shuffled.shuffle(slots)
        self.steps = 0
        self.overwrites = True  # whether freed slots are filled with garbage
        self.proposed: dict[int, Proposal] = {}
        if self.runner.backend.device.type == "cpu":  # graphs on a GPU do not call propose
            self._record_proposals()
        self._overwrite(self.free_kv)

    def _record_proposals(self) -> None:
        propose = self.runner.drafter.propose

        def recording(slots: Tensor, part: Any, noise: Any) -> Any:
            tree = propose(slots, part, noise)
            trees = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist())
            self.proposed = dict(zip(slots.tolist(), (Proposal(*parts) for parts in trees)))
            return tree

        self.runner.drafter.propose = recording  # type: ignore[method-assign]

    # ── plans ──

    def execute(
        self,
        prefill: list[PrefillItem] | None = None,
        decode: list[Live] | None = None,
        releases: list[Release] | None = None,
        shape: TreeShape | None = None,
        untrack: list[Live] | None = None,
    ) -> StepResult:
        """Execute one plan; the requests in ``decode`` take in its decode results."""
        self.steps += 1
        plan = Plan(step=self.steps, releases=releases or [], prefill=prefill or [])
        plan.untrack = [live.slot for live in untrack or []]
        shape = shape or self.shape
        kv_slots = [[self.free_kv.pop() for _ in range(shape.nodes)] for _ in decode or []]
        if decode:
            plan.decode = DecodeBatch(
                shape=shape, slots=[live.slot for live in decode], kv_slots=kv_slots
            )
        with torch_path(not self.fused):
            result = self.runner.execute(plan)
        for live, own, output in zip(decode or [], kv_slots, result.decode):
            live.kv += [own[node] for node in output.nodes]
            live.tokens += output.tokens
            live.logprobs += output.logprobs
            live.folded = output.folded
            live.steps.append(output)
            if shape.nodes > 1 and self.proposed:
                live.proposals.append(self.proposed[live.slot])
            self.free([slot for node, slot in enumerate(own) if node not in output.nodes])
        return result

    def free(self, kv_slots: list[int]) -> None:
        self.free_kv = kv_slots + self.free_kv
        self._overwrite(kv_slots)

    def _overwrite(self, kv_slots: list[int]) -> None:
        if not self.overwrites:
            return
        pools = [self.runner.kv]
        if isinstance(self.runner.drafter, ModelDrafter | BlockDrafter):
            pools.append(self.runner.drafter.kv)
        for pool in pools:
            if pool.k.shape[0] > 0:
                pool.k[:, kv_slots], pool.v[:, kv_slots] = GARBAGE, -GARBAGE

    def free_state(self, state_slot: int) -> None:
        self.free_states.insert(0, state_slot)
        pools = [self.runner.pool]
        if isinstance(self.runner.drafter, ModelDrafter):
            pools.append(self.runner.drafter.pool)
        for pool in pools:
            pool.ssm[:, state_slot] = GARBAGE
            pool.conv[:, state_slot] = GARBAGE
            pool.feature[state_slot] = GARBAGE

    # ── a request ──

    def admit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        hit: Prefix | None = None,
        prompt_len: int | None = None,
        **asks: Any,
    ) -> Live:
        """Assign slots to a request, without executing a step.

        prompt_len: less than the prompt's length if the prompt ends in output of its own.
        """
        if hit is not None:
            assert prompt[: len(hit.tokens)] == hit.tokens and len(prompt) > len(hit.tokens)
        return Live(
            self.free_slots.pop(),
            self.free_states.pop(),
            list(prompt),
            prompt_len or len(prompt),
            sampling,
            hit,
            list(hit.kv_slots) if hit else [],
            asks=asks,
        )

    def chunk(self, live: Live, end: int, saves: tuple[int, ...] = ()) -> PrefillItem:
        """The item that processes the prompt up to ``end`` and saves states at ``saves``."""
        start, total = live.processed, len(live.tokens)
        live.kv += [self.free_kv.pop() for _ in range(start, end)]
        state_saves = []
        for position in saves:
            if start < position <= end:
                slot = self.free_states.pop()
                state_saves.append(StateSave(position, slot))
                live.saved[position] = Prefix(live.tokens[:position], live.kv[:position], slot)
        item = PrefillItem(
            slot=live.slot,
            state_slot=live.state_slot,
            start=start,
            token_ids=indices(live.tokens[start:end]),
            kv_slots=indices(live.kv[start:end]),
            saves=state_saves,
            is_last=end == total,
            track=live.asks.get("track", True),
        )
        logprobs = live.asks.get("logprob_start", -1)
        if 0 <= logprobs < end:
            item.logprob_start = max(logprobs, start)
        if start == (len(live.hit.tokens) if live.hit else 0):
            asked = (
                "return_logprob",
                "top_logprobs",
                "token_ids_logprob",
                "logprob_temperature",
                "return_spec_trace",
                "pooling",
                "adapter",
            )
            item.first = FirstChunk(
                sampling=live.sampling,
                output_start=live.prompt_len,
                **{name: live.asks[name] for name in asked if name in live.asks},
            )
            if live.hit:
                item.first.load_from = live.hit.state_slot
                item.first.prefix_kv_slots = indices(live.hit.kv_slots)
            if live.sampling.reads_history or needs_history(self.config.speculative_algorithm):
                item.first.history = indices(live.tokens[:start])
        return item

    def after_chunk(self, live: Live, item: PrefillItem, result: Any) -> None:
        live.folded = live.processed
        live.input_logprobs += result.input_logprobs
        if item.is_last:
            live.embedding = result.embedding
            live.tokens += result.tokens or [-1]  # it may be decoded on
            live.logprobs += result.logprobs

    def prefill(self, live: Live, cuts: tuple[int, ...] = (), saves: tuple[int, ...] = ()) -> Live:
        """Process the whole prompt, with one plan for each part between ``cuts``."""
        ends = sorted({cut for cut in cuts if live.processed < cut < len(live.tokens)})
        for end in [*ends, len(live.tokens)]:
            item = self.chunk(live, end, saves)
            self.after_chunk(live, item, self.execute(prefill=[item]).prefill[0])
        return live

    def start(
        self, prompt: list[int], sampling: SamplingParams, hit: Prefix | None = None, **asks: Any
    ) -> Live:
        cuts, saves = asks.pop("cuts", ()), asks.pop("saves", ())
        return self.prefill(self.admit(prompt, sampling, hit, **asks), cuts, saves)

    def ended(self, live: Live) -> bool:
        stops = live.sampling.stop_tokens(self.eos)
        return len(live.output) >= live.sampling.max_new_tokens or live.tokens[-1] in stops

    def finish(self, lives: list[Live]) -> None:
        """Decode until all have ended."""
        while running := [live for live in lives if not self.ended(live)]:
            before = [len(live.tokens) for live in running]
            self.execute(decode=running)
            assert all(len(live.tokens) > was for live, was in zip(running, before))

    def release(self, live: Live, fold_to: int = -1) -> Prefix | None:
        """The request leaves; with ``fold_to`` >= 0, its first tokens are kept as a prefix."""
        self.execute(releases=[Release(live.slot, fold_to)])
        self.free_slots.insert(0, live.slot)
        borrowed = len(live.hit.kv_slots) if live.hit else 0
        if fold_to < 0:
            self.free(live.kv[borrowed:])
            self.free_state(live.state_slot)
            return None
        self.free(live.kv[max(fold_to, borrowed) :])
        return Prefix(live.tokens[:fold_to], live.kv[:fold_to], live.state_slot)

    def generate(
        self, prompt: list[int], sampling: SamplingParams, hit: Prefix | None = None, **asks: Any
    ) -> Live:
        """Serve one request from start to release."""
        live = self.start(prompt, sampling, hit, **asks)
        self.finish([live])
        self.release(live)
        return live


class PlainModel:
    """The same weights in full forward passes from the zero state: the oracle of all texts."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)

    def logits(self, tokens: list[int]) -> Tensor:
        """tokens [n] -> [n, V]; entry i predicts token i + 1."""
        hidden = self.model(torch.tensor(tokens), FullSequenceContext(1, len(tokens)))
        return self.model.compute_logits(hidden)

    def choices(self, live: Live) -> list[int]:
        """The token that the plain model samples at each position of the output, given the tokens
        before it. Equals the output if and only if the plain model would generate it."""
        first, sampling = live.prompt_len, live.sampling
        logits = self.logits(live.tokens[:-1])[first - 1 :]
        positions = torch.arange(first, first + logits.shape[0])
        noise = gumbel(torch.full_like(positions, sampling.seed), positions, logits.shape[1])
        return (logits + sampling.temperature * noise).argmax(1).tolist()

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities of tokens[1:], each given the tokens before it. [n - 1]"""
        logits = self.logits(tokens[:-1]).log_softmax(1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


class Tiny(NamedTuple):
    """The tiny model and its head on disk, and the model in full forward passes."""

    model: Path
    head: Path
    plain: PlainModel

    def engine(self, settings: Settings | str = TREE, **others: Any) -> Engine:
        if isinstance(settings, str):
            settings = SETTINGS[settings]
        return Engine(self.model, self.head, settings, **others)


def write_tiny(folder: Path) -> Tiny:
    model = write_model(folder / "model")
    return Tiny(model, write_head(folder / "head", model), PlainModel(model))


def approximately(proposals: list[Proposal]) -> list[Proposal]:
    """For ==: the same trees, with scores up to rounding."""
    return [each._replace(scores=pytest.approx(each.scores, abs=1e-3)) for each in proposals]


def accepted(lives: list[Live]) -> list[int]:
    """The number of tokens from each decode step."""
    return [len(step.tokens) for live in lives for step in live.steps]


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]
