"""What is printed about a measured batch, for other tools to parse, and what is kept of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import kv_dtype
from mamba_eagle.bench.batch import Generation
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN
from mamba_eagle.layers.moe import Experts
from mamba_eagle.layers.weights import matrix_layers
from mamba_eagle.message import Ready
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.loader import created_as
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.quantization.policy import Policy
from mamba_eagle.runner.memory import kv_slot_bytes, state_bytes


class StepBytes(NamedTuple):
    """The least that one step reads: every weight once, the recurrent state of each request, the
    keys and values of its tokens so far. Any engine moves that much, so engines can be compared by
    it. States that a scheme writes, rows, activations and everything that drafting reads are left
    out; they lower the share."""

    weights: float
    states: float
    kv: float

    @property
    def total(self) -> float:
        return sum(self)

    def share(self, seconds: float, copy_tb_s: float) -> float:
        """Time for these bytes at the device's own copy rate, as a fraction of ``seconds``."""
        return self.total / (copy_tb_s * 1e12) / seconds


class StepSize(NamedTuple):
    batch: int
    nodes: int  # of each request; 1: plain decoding
    position: float  # mean number of tokens before the step
    experts: float = 0.0  # per layer that its tokens go to; 0: as many as independent tokens reach


class FewBits(NamedTuple):
    """What has fewer bits than the model's dtype."""

    weights: Policy = Policy()
    kv_cache_dtype: str = "auto"  # as in --kv-cache-dtype


def step_bytes(
    model: ModelConfig,
    size: StepSize,
    dtype: str,
    ssm_dtype: str,
    few_bits: FewBits = FewBits(),  # noqa: B008 (immutable)
) -> StepBytes:
    """weights: as ``weight_bytes``. states: batch · (layers · H·P·N and the convolution's history).
    kv: batch · position · 2 · layers · kv_heads · head_dim. Dtypes by torch's names."""
    itemsize, ssm_itemsize = (getattr(torch, name).itemsize for name in (dtype, ssm_dtype))
    kv_itemsize = kv_dtype(few_bits.kv_cache_dtype, getattr(torch, dtype)).itemsize
    return StepBytes(
        weight_bytes(model, dtype, size.batch * size.nodes, few_bits.weights, size.experts),
        size.batch * state_bytes(model, ssm_itemsize, itemsize),
        size.batch * size.position * kv_slot_bytes(model, kv_itemsize),
    )


def weight_bytes(
    model: ModelConfig,
    dtype: str,
    tokens: int,
    policy: Policy = Policy(),  # noqa: B008 (immutable)
    touched: float = 0.0,
) -> float:
    """All parameters except those that are only looked up: an embedding that is not also the
    lm_head counts one row per token, of E experts those count that are ``touched`` in a layer; 0:
    E (1 - (1 - top_k / E)^tokens), if tokens choose independently."""
    kind = getattr(torch, dtype)
    with created_as(kind, torch.device("meta")):
        made = model_class(model)(model)
    few = few_bit_weights(made, policy)

    def size_of(weights: Iterable[Tensor]) -> float:
        return sum(w.numel() * few.get(id(w), 8 * w.itemsize) / 8 for w in weights)

    total = size_of(made.parameters())
    if not model.tie_word_embeddings:
        unread = model.vocab_size - min(tokens, model.vocab_size)
        total -= unread * model.hidden_size * kind.itemsize
    if model.moe is not None:
        experts = size_of(
            p for m in made.modules() if isinstance(m, Experts) for p in m.parameters()
        )
        missed = (1 - model.moe.top_k / model.moe.num_experts) ** tokens
        total -= experts * (1 - touched / model.moe.num_experts if touched else missed)
    return total


def few_bit_weights(model: nn.Module, policy: Policy) -> dict[int, int]:
    """The bits of the parameters that ``policy`` rounds, by ``id``. Scales are left out."""
    found = {}
    for name, layer in matrix_layers(model):
        for leaf in layer.matrix_names:
            weight = getattr(layer, leaf)
            bits = policy.bits(f"{name}.{leaf}", weight)
            if bits is not None:
                found[id(weight)] = bits
    return found


SHOWN_STEPS = 5


def report_lines(made: Generation) -> list[str]:
    """The lines other tools parse, and the acceptance of the drafts."""
    lines = [
        f"Prefill. latency: {made.prefill_seconds:6.5f} s, "
        f"throughput: {made.prompt_tokens / made.prefill_seconds:9.2f} token/s"
    ]
    shown = list(zip(made.step_requests, made.step_seconds, made.step_tokens))[:SHOWN_STEPS]
    for i, (requests, seconds, tokens) in enumerate(shown):
        lines.append(
            f"Decode {i}. Batch size: {requests}, latency: {seconds:6.5f} s, "
            f"throughput: {tokens / seconds:9.2f} token/s"
        )
    if made.step_seconds:
        lines.append(
            f"Decode.  median latency: {made.median_decode_latency:6.5f} s, "
            f"median throughput: {made.median_decode_throughput:9.2f} token/s"
        )
        lines.append(f"Decode.  mean latency: {made.mean_decode_latency:6.5f} s")
    throughput = (made.prompt_tokens + made.output_tokens) / made.seconds
    lines.append(f"Total. latency: {made.seconds:6.3f} s, throughput: {throughput:9.2f} token/s")
    if made.step_seconds:
        histogram = ", ".join(f"{n}: {count}" for n, count in sorted(made.accept_lengths.items()))
        lines.append(
            f"Acceptance. length: {made.accept_length:.3f} token/step, steps by length: {histogram}"
        )
    return lines


@dataclass
class Speed:
    """Decode steps of the whole batch: means, because a median hides the steps that fold."""

    nodes: int
    seconds: float  # per step
    tokens: float  # per step, of all requests
    least: StepBytes
    copy_tb_s: float | None  # of the GPU; not measured on a CPU
    experts: float = 0.0  # per layer that a step's tokens went to; 0: not known, or none

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def gb_per_second(self) -> float:
        return self.least.total / self.seconds / 1e9

    @property
    def share(self) -> float | None:
        return None if self.copy_tb_s is None else self.least.share(self.seconds, self.copy_tb_s)

    def line(self) -> str:
        kind = "plain" if self.nodes == 1 else f"tree of {self.nodes} nodes"
        gb = [f"{what} {size / 1e9:.2f}" for what, size in self.least._asdict().items()]
        text = (
            f"Step.    {kind}: {self.seconds * 1e3:.3f} ms, {self.tokens_per_second:.1f} token/s, "
            f"{self.gb_per_second:.1f} GB/s ({' + '.join(gb)} GB)"
        )
        if self.experts:
            text += f", {self.experts:.1f} experts per layer"
        if self.copy_tb_s is not None:
            text += f", {self.share:.0%} of the GPU's copy rate of {self.copy_tb_s:.2f} TB/s"
        return text


def speed_of(
    made: Generation,
    config: EngineConfig,
    ready: Ready,
    copy_tb_s: float | None,
    experts: float = 0.0,
) -> Speed:
    """The speed of the steps in which no request had finished yet; ``made`` has at least one."""
    steps, batch = made.full_steps, len(made.tokens)
    seconds = sum(made.step_seconds[i] for i in steps) / len(steps)
    tokens = sum(made.step_tokens[i] for i in steps) / len(steps)
    size = StepSize(
        batch,
        config.tree_shape.nodes,
        position=(made.prompt_tokens + made.output_tokens / 2) / batch,
        experts=experts,
    )
    model = read_model_config(config.model_path)
    policy = Policy(config.quantization, config.quantize_lm_head)
    few_bits = FewBits(policy, config.kv_cache_dtype)
    dtype, ssm_dtype = str(ready.details["dtype"]), config.mamba_ssm_dtype
    least = step_bytes(model, size, dtype, ssm_dtype, few_bits)
    return Speed(size.nodes, seconds, tokens, least, copy_tb_s, experts)


@dataclass
class StateMemory:
    """Recurrent state of one running request, in bytes."""

    checkpoint: float
    beside: float  # rows, or the states of a tree's nodes

    @classmethod
    def of(cls, ready: Ready) -> StateMemory:
        # On a GPU there is one more slot, which pads batches.
        spare = int(str(ready.details["device"]).startswith("cuda"))
        return cls(
            float(ready.details["checkpoint_bytes"]) / (ready.max_state_slots + spare),
            float(ready.details["verify_bytes"]) / (ready.max_running_requests + spare),
        )

    @property
    def megabytes(self) -> float:
        return (self.checkpoint + self.beside) / 1e6


def result_record(
    made: Generation, args: argparse.Namespace, config: EngineConfig, facts: dict[str, str]
) -> dict[str, Any]:
    """One line of --result-filename: SGLang's keys first, then our own."""
    requests = len(made.tokens)
    return {
        "run_name": args.run_name,
        "batch_size": requests,
        "input_len": made.prompt_tokens // requests,
        "output_len": made.output_tokens // requests,
        "prefill_latency": made.prefill_seconds,
        "prefill_throughput": made.prompt_tokens / made.prefill_seconds,
        "median_decode_latency": made.median_decode_latency,
        "median_decode_throughput": made.median_decode_throughput,
        "mean_decode_latency": made.mean_decode_latency,
        "total_latency": made.seconds,
        "overall_throughput": (made.prompt_tokens + made.output_tokens) / made.seconds,
        "speculative_algorithm": config.speculative_algorithm,
        "tree": msgspec.to_builtins(config.tree_shape),
        "mamba_verify_mode": config.mamba_verify_mode,
        "quantization": few_bits_name(config),
        "accept_length": made.accept_length,
        "simulated_accept_length": config.simulate_acc_len or None,
        "accept_histogram": dict(sorted(made.accept_lengths.items())),
        **facts,
    }


def few_bits_name(config: EngineConfig) -> str:
    """What a run quantizes by its flags; empty: nothing."""
    weights = {"auto": "", "none": ""}.get(config.quantization, config.quantization)
    head = "lm_head" if weights and config.quantize_lm_head else ""
    kind = config.quantizations.get("--speculative-draft-model-quantization", "")
    drafter = f"drafter {kind}" if kind else ""
    kv = "" if config.kv_cache_dtype == "auto" else f"kv {config.kv_cache_dtype}"
    return ", ".join(filter(None, (weights, head, drafter, kv)))


def result_lines(
    made: Generation,
    speed: Speed | None,
    args: argparse.Namespace,
    config: EngineConfig,
    ready: Ready,
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    """Lines of --results, in the form of benchmark/results. speed: None without decode steps."""
    batch, state = len(made.tokens), StateMemory.of(ready)
    common = {
        "mode": "exact" if config.exact else config.mamba_verify_mode,
        "batch": batch,
        "nodes": config.tree_shape.nodes,
        "rows": ready.details["rows_per_request"],
        "accept_length": round(made.accept_length, 3),
        "simulated_accept_length": config.simulate_acc_len or None,
        "tree": config.tree_shape.name,
        "model": Path(config.model_path).name,
        "input_len": made.prompt_tokens // batch,
        "output_len": made.output_tokens // batch,
    }
    if few_bits := few_bits_name(config):
        common["quantization"] = few_bits
    if config.num_ranks > 1:
        common["ranks"] = f"tp {config.tp_size}, pp {config.pp_size}"
    if config.tp_size > 1:
        common["all_reduce"] = f"{config.all_reduce}: {ready.details['sums']}"

    def line(name: str, value: float, **fields: Any) -> dict[str, Any]:
        return {"name": name, **common, **fields, "value": float(f"{value:.6g}"), **facts}

    lines = [
        line("prefill_s", made.prefill_seconds),
        line("state_mb_per_request", state.megabytes, checkpoint_mb=state.checkpoint / 1e6),
    ]
    if speed is not None:
        name = "decode_step_ms" if config.tree_shape == PLAIN else "tree_step_ms"
        share = None if speed.share is None else round(speed.share, 4)
        reached = {"gb_s": round(speed.gb_per_second, 1), "share": share}
        if speed.copy_tb_s is not None:
            reached["least_ms"] = round(speed.least.total / speed.copy_tb_s / 1e9, 3)
        if speed.experts:
            reached |= {"experts": round(speed.experts, 1), "routing": args.dummy_routing}
        lines.append(line(name, speed.seconds * 1e3, **reached))
        lines.append(line("tokens_per_s", speed.tokens_per_second))
    return lines
