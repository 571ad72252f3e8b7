"""Executes plans: weights, pools, drafter, and one step at a time. No policy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import PLAIN, SamplingParams
from mamba_eagle.kernels.pointwise import pointwise_ops
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.message import (
    DecodeBatch,
    DecodeResult,
    Plan,
    PrefillItem,
    PrefillResult,
    Release,
    RunnerReady,
    StepResult,
    TokenLogprob,
)
from mamba_eagle.models.config import ModelConfig, UnsupportedModel
from mamba_eagle.models.loader import (
    CheckpointError,
    created_as,
    load_weights,
    random_weights,
)
from mamba_eagle.models.registry import model_class
from mamba_eagle.runner.commit import accept_tokens, commit_tokens, step_trace
from mamba_eagle.runner.contexts import (
    PrefillPart,
    VerifyContext,
    prefill_context,
    tree_attention,
)
from mamba_eagle.runner.memory import memory_table, plan_memory, size_text
from mamba_eagle.runner.pools import CheckpointPool, KVPool, RequestTable
from mamba_eagle.runner.sampler import SamplingState, batch_noise, sample, token_logprobs
from mamba_eagle.runner.stateless_verify import StatelessVerify
from mamba_eagle.runner.verify import VERIFY_SCHEMES, SchemeSize, VerifyScheme
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.drafters import draft_source
from mamba_eagle.spec.drafters.base import Drafter, DraftParts, DraftSource, NoDrafter
from mamba_eagle.spec.tree import Tree, single_node_tree

log = logging.getLogger("mamba_eagle.runner")

Model = TypeVar("Model", bound=nn.Module)

UNLIMITED_CONTEXT = 32768  # of a model whose config.json names no limit, unless a flag says more


class ModelRunner:
    """Owns every tensor. Slots, rows and checkpoints are the scheduler's numbers.

    A step: releases, then prompt chunks, then one tree for each decoding request: draft, verify,
    accept. Results are Python lists; on the CPU reading them costs nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises: ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError."""
        self.config = config
        self.device = resolve_device(config.device)
        self.model_config = ModelConfig.from_pretrained(config.model_path)
        self.dtype = resolve_dtype(config.dtype, self.model_config, self.device)
        self.context_length = self._context_length()
        self.shape = config.tree_shape

        source = self._draft_source()
        make_model = model_class(self.model_config)
        self.model = self._load(lambda: make_model(self.model_config), config.model_path)
        if source is not None:
            self.model.tap(source.tap_layers)
        self.memory = plan_memory(
            config,
            self.model_config,
            self.model.feature_size,
            source.config if source else None,
            self.dtype,
            self.device,
        )
        weights = f"weights {size_text(sum(p.nbytes for p in self.model.parameters()))}"
        log.info("memory:\n%s", memory_table(self.memory, config, weights))
        self._make_pools()
        self.drafter: Drafter = NoDrafter()
        if source is not None:
            self.drafter = source.make(
                DraftParts(
                    config=config,
                    target=self.model,
                    table=self.table,
                    kv_slots=self.memory.kv_slots,
                    checkpoints=self.memory.checkpoints,
                    dtype=self.dtype,
                    device=self.device,
                    load=self._load,
                )
            )
        self.ready = self._describe()
        self._ended = time.perf_counter()  # the last step
        self.warm_up()

    # ── one step ──

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Run a plan. Results stand in the plan's order."""
        began = time.perf_counter()
        for release in plan.releases:
            self._release(release)
        prefill = self._prefill(plan.prefill) if plan.prefill else []
        if prefill and plan.decode is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what prompts took is not the decode part's time
        decode_began = time.perf_counter()
        decode = self._decode(plan.decode) if plan.decode is not None else []
        ended = time.perf_counter()
        idle, self._ended = began - self._ended, ended
        return StepResult(
            step=plan.step,
            prefill=prefill,
            decode=decode,
            seconds=ended - began,
            decode_seconds=ended - decode_began,
            idle_seconds=idle,
        )

    def _release(self, release: Release) -> None:
        slot = release.slot
        self.drafter.release(slot, release.fold_to)
        if release.fold_to >= 0:
            slots = torch.tensor([slot], device=self.device)
            keep = release.fold_to - int(self.scheme.folded(slots))
            self.scheme.finish(slot, int(self.table.checkpoint[slot]), keep)
        self.table.remaining[slot] = 0
        self.sampling.release(slot)

    # ── prefill ──

    def _prefill(self, items: list[PrefillItem]) -> list[PrefillResult]:
        parts, first = [], 0
        befores = []
        for item in items:
            self._admit(item)
            length = len(item.token_ids)
            # copied: the pass below overwrites the checkpoint's feature
            befores.append(self.pool.feature[item.checkpoint].clone())
            parts.append(PrefillPart(item, first, length))
            first += length
        tokens = torch.tensor([t for item in items for t in item.token_ids], device=self.device)
        mamba = self.model_config.mamba
        ctx = prefill_context(parts, self.pool, self.kv, self.table.kv_slots, mamba)
        features = self.model(tokens, ctx)
        results = []
        for part, before in zip(parts, befores, strict=True):
            span = slice(part.first, part.first + part.length)
            results.append(self._after_chunk(part.item, tokens[span], features[span], before))
        return results

    def _admit(self, item: PrefillItem) -> None:
        """The request's slot table, and at its first chunk everything else about it."""
        table, slot, end = self.table, item.slot, item.start + len(item.token_ids)
        table.kv_slots[slot, item.start : end] = torch.tensor(item.kv_slots, device=self.device)
        if not item.is_first:
            return
        params = item.sampling
        assert params is not None
        table.kv_slots[slot, : item.start] = torch.tensor(
            item.prefix_kv_slots, dtype=torch.int64, device=self.device
        )
        table.checkpoint[slot] = item.checkpoint
        table.set_stop_tokens(slot, params.stop_tokens(self.model_config.eos_token_ids))
        table.wants_logprobs[slot] = item.return_logprob
        table.top_logprobs[slot] = item.top_logprobs
        table.wants_trace[slot] = item.return_spec_trace
        self.sampling.set(slot, params, item.output_start, item.history)
        # of output tokens; a retracted request has made some of them before
        self.budget_end[slot] = item.output_start + params.max_new_tokens
        if item.load_from < 0:
            self.pool.clear(item.checkpoint)
        else:
            self.pool.copy(item.load_from, item.checkpoint)

    def _after_chunk(
        self, item: PrefillItem, tokens: Tensor, features: Tensor, before: Tensor
    ) -> PrefillResult:
        """Features, logprobs, the drafter's entries; and the first token after the last chunk."""
        slot, end = item.slot, item.start + len(item.token_ids)
        for save in item.saves:
            self.pool.feature[save.checkpoint] = features[save.position - item.start - 1]
        self.pool.feature[item.checkpoint] = features[-1]
        self.table.run[slot] = end
        self.sampling.observe(slot, tokens, item.start)
        self.drafter.observe_prefill(item, tokens, features, before)
        result = PrefillResult()
        if item.logprob_start >= 0:
            result.input_logprobs = self._input_logprobs(item, tokens, features, before)
        if not item.is_last:
            return result
        self.scheme.start(slot, item.checkpoint)
        logits = self.model.compute_logits(features[-1:])
        position = torch.tensor([[end]], device=self.device)
        token = sample(self.sampling, [slot], logits[:, None], position, None)[0]  # [1]
        slots = torch.tensor([slot], device=self.device)
        self.sampling.observe_accepted(slots, token[:, None], torch.ones_like(slots))
        self.table.last_token[slot] = token[0]
        is_stop = (self.table.stop_tokens[slot] == token[0]).any()
        left = self.budget_end[slot] - end - 1
        self.table.remaining[slot] = torch.where(is_stop, 0, max(left, 0))
        self.drafter.observe_first_token(slot, token[0], features[-1])
        result.token = int(token[0])
        if item.return_logprob:
            result.logprob = self._logprobs(logits, token, item.top_logprobs)[0]
        return result

    def _input_logprobs(
        self, item: PrefillItem, tokens: Tensor, features: Tensor, before: Tensor
    ) -> list[TokenLogprob]:
        """Logprobs of the chunk's tokens from position logprob_start on; that of token q comes
        from the features at q-1, and the very first token has none."""
        first = max(item.logprob_start, item.start)
        offset = first - item.start
        sources = torch.cat([before[None].to(features.dtype), features[:-1]])[offset:]
        wanted = tokens[offset:]
        out = self._logprobs(self.model.compute_logits(sources), wanted, item.top_logprobs)
        if first == 0 and out:
            out[0] = TokenLogprob(out[0].token_id, None)
        return out

    # ── draft, verify, accept ──

    def _decode(self, batch: DecodeBatch) -> list[DecodeResult]:
        table = self.table
        slots = torch.tensor(batch.slots, device=self.device)
        kv_slots = torch.tensor(batch.kv_slots, device=self.device)  # [b, T]
        run = table.run[slots]
        table.kv_slots[slots, run] = kv_slots[:, 0]

        if batch.shape == PLAIN:
            tree = single_node_tree(table.last_token[slots])
        else:
            noise = batch_noise(self.sampling, batch.slots)
            tree = self.drafter.propose(slots, batch.shape, noise)
        attention = tree_attention(
            self.kv, table.kv_slots, slots, run, kv_slots, tree.parents, tree.ancestors
        )
        self.scheme.begin(slots, tree)
        positions = run[:, None] + tree.depths
        context = VerifyContext(self.scheme, attention, positions.reshape(-1))
        features = self.model(tree.tokens.reshape(-1), context)
        logits = self.model.compute_logits(features).unflatten(0, tree.tokens.shape)
        target = sample(self.sampling, batch.slots, logits, positions + 1, tree)

        accepted = accept_tokens(table, slots, tree, target, batch.shape.steps)
        self._commit(slots, kv_slots, accepted, features.unflatten(0, tree.tokens.shape))
        return self._decode_results(batch, slots, tree, accepted, logits)

    def _commit(
        self, slots: Tensor, kv_slots: Tensor, accepted: Truncated, features: Tensor
    ) -> None:
        """The accepted nodes become part of the sequence: indices only, in every table."""
        self.scheme.accept(accepted, features)
        commit_tokens(self.table, slots, kv_slots, accepted)
        self.sampling.observe_accepted(slots, accepted.tokens, accepted.count)
        self.drafter.observe_accepted(slots, accepted, features)

    def _decode_results(
        self, batch: DecodeBatch, slots: Tensor, tree: Tree, accepted: Truncated, logits: Tensor
    ) -> list[DecodeResult]:
        counts = accepted.count.tolist()
        tokens, nodes = accepted.tokens.tolist(), accepted.nodes.tolist()
        folded = self.scheme.folded(slots).tolist()
        results = []
        for i, slot in enumerate(batch.slots):
            n = counts[i]
            result = DecodeResult(tokens=tokens[i][:n], nodes=nodes[i][:n], folded=folded[i])
            if n and self.table.wants_logprobs[slot]:
                result.logprobs = self._logprobs(
                    logits[i, accepted.nodes[i, :n]],
                    accepted.tokens[i, :n],
                    self.table.top_logprobs[slot],
                )
            if n and self.table.wants_trace[slot]:
                result.trace = step_trace(tree, i, result)
            results.append(result)
        return results

    def _logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
        """logits [n, V], tokens [n] -> their logprobs and the ``top`` best ones each."""
        own, values, ids = (part.tolist() for part in token_logprobs(logits, tokens, top))
        return [
            TokenLogprob(token, logprob, list(zip(best, which, strict=True)))
            for token, logprob, best, which in zip(tokens.tolist(), own, values, ids, strict=True)
        ]

    # ── start-up ──

    def warm_up(self) -> None:
        """Serve two tokens, so that no request waits for a kernel to be compiled.

        What it leaves in slot 0 and checkpoint 0 goes when a request takes them.
        """
        nodes = self.shape.nodes
        prompt = PrefillItem(
            slot=0,
            checkpoint=0,
            start=0,
            token_ids=[0],
            kv_slots=[0],
            sampling=SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True),
            output_start=1,
        )
        tree = DecodeBatch(shape=self.shape, slots=[0], kv_slots=[list(range(1, 1 + nodes))])
        self.execute(Plan(step=0, prefill=[prompt]))
        self.execute(Plan(step=0, decode=tree))
        self.execute(Plan(step=0, releases=[Release(0, fold_to=2)]))

    def _context_length(self) -> int:
        limit = self.model_config.max_position_embeddings
        wanted = self.config.context_length
        if limit and wanted > limit:
            raise ConfigError(
                [f"--context-length {wanted}: the model was made for {limit} tokens at most"]
            )
        return wanted or limit or UNLIMITED_CONTEXT

    def _load(self, make: Callable[[], Model], path: str) -> Model:
        with created_as(self.dtype, self.device):
            model = make()
        if self.config.load_format == "dummy":
            random_weights(model, self.config.random_seed)
        else:
            load_weights(model, path)
        model.eval().requires_grad_(False)
        prepare_for_inference(model)
        return model

    def _draft_source(self) -> DraftSource | None:
        """Raises: ConfigError with every reason why the drafter does not fit the target."""
        if self.config.speculative_algorithm == "NONE":
            return None
        make_source = draft_source(self.config.speculative_algorithm)
        source = make_source(self.config, self.model_config)
        if wrong := source.problems():
            raise ConfigError(wrong)
        return source

    def _make_pools(self) -> None:
        config, model, memory = self.config, self.model_config, self.memory
        running = config.max_running_requests
        self.table = RequestTable(running, self.context_length, self.device)
        self.budget_end = [0] * running
        self.kv = KVPool(
            model.num_attention_layers, memory.kv_slots, model.attention, self.dtype, self.device
        )
        self.pool = CheckpointPool(
            model.num_mamba_layers,
            memory.checkpoints,
            model.mamba,
            self.model.feature_size,
            getattr(torch, config.mamba_ssm_dtype),
            self.dtype,
            self.device,
        )
        self.scheme: VerifyScheme = StatelessVerify(self.table, self.pool)
        if model.mamba is not None:
            size = SchemeSize(
                layers=model.num_mamba_layers,
                features=self.model.feature_size,
                rows=memory.rows,
                nodes=self.shape.nodes,
                accepts=self.shape.steps + 1,
            )
            make_scheme = VERIFY_SCHEMES[config.mamba_verify_mode]
            self.scheme = make_scheme(model.mamba, size, self.table, self.pool)
        self.sampling = SamplingState(running, model.vocab_size, model.eos_token_ids, self.device)

    def _describe(self) -> RunnerReady:
        memory, weights = self.memory, sum(p.nbytes for p in self.model.parameters())
        return RunnerReady(
            max_kv_slots=memory.kv_slots,
            max_checkpoints=memory.checkpoints,
            max_running_requests=self.config.max_running_requests,
            context_length=self.context_length,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=list(self.model_config.eos_token_ids),
            pid=os.getpid(),
            details={
                "architecture": self.model_config.architecture,
                "model_type": self.model_config.model_type,
                "device": str(self.device),
                "dtype": str(self.dtype).removeprefix("torch."),
                "weight_bytes": weights,
                "kv_bytes": self.kv.num_bytes,
                "checkpoint_bytes": self.pool.num_bytes,
                "verify_bytes": self.scheme.num_bytes,
                "draft_bytes": self.drafter.num_bytes,
                "rows_per_request": memory.rows,
                "pointwise_ops": pointwise_ops(self.device, self.dtype).name,
            },
        )


def resolve_device(name: str) -> torch.device:
    """Raises: ConfigError when cuda is asked for and not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device cuda: torch sees no CUDA device; use --device cpu"])
    return torch.device(name)


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU and the checkpoint's own dtype on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    return getattr(torch, name)


START_ERRORS = (ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError)
