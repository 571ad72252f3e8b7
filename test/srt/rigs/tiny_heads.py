"""EAGLE-3 and multi-token-prediction heads for the models of tiny_model.py, in the layout in which
heads are published. They guess right now and then: what is linear in them is fitted to the target's
hidden states on random tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_model import VOCAB, load_model, round_to_bfloat16
from torch import Tensor, nn

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.kernels.top_noisy.torch import whole_log_probs
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.models.eagle3 import Eagle3Head, tap_layers
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import parse_as, parse_config

BATCH, LENGTH = 60, 50


def log_probs(network: DraftNetwork, depth: int, outputs: Tensor) -> Tensor:
    """What entries at ``depth`` predict, of all V tokens of the target, -inf outside of the
    network's vocabulary: [n, O] -> [n, V] float32."""
    logits = network.logits(depth, outputs)
    return whole_log_probs(logits, network.target_ids(), network.config.vocab_size)


EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": 60,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 160,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
}

MTP_CONFIG = {
    "architectures": ["NemotronHMTPModel"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 20,
}


@torch.no_grad()
def write_eagle3_head(folder: Path, model_folder: Path, seed: int = 2, **changes: object) -> Path:
    """Its attention looks at its own entry most of all; ``o_proj`` and ``down_proj`` are fitted.
    The tokens that it knows are a random choice; its taps span the target's layers."""
    target = load_model(model_folder)
    vocab, layers = target.config.vocab_size, len(target.parts.layers)
    sizes = {"vocab_size": vocab, "draft_vocab_size": vocab * 5 // 8}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, layers // 2, layers]}
    config = {**EAGLE3_CONFIG, **sizes, "eagle_config": taps, **changes}
    head = Eagle3Head(parse_config(config))
    random_weights(head, seed)
    layer = head.midlayer
    attention, mlp = layer.self_attn, layer.mlp
    for part in (attention.k_proj, attention.v_proj, mlp.up_proj, mlp.gate_proj):
        part.weight.mul_(4.0)
    attention.q_proj.weight.copy_(per_query_head(attention.k_proj.weight, attention.config))
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    if head.d2t is not None:
        head.choose_tokens(chosen[: head.draft_vocab_size].sort().values)
    ids = slice(None) if head.d2t is None else head.target_ids()
    head.lm_head.weight.copy_(target.lm_head.weight[ids])

    embeddings, features = ask(target, tap_layers(head.config, layers), seed)
    wanted, taps = features.flatten(0, 1).split([64, features.shape[-1] - 64], dim=-1)
    head.fc.weight.mul_(0.3 / head.fuse(taps).std())  # little beside what is fitted
    given = head.fuse(shifted(features[..., 64:]).flatten(0, 1))
    ctx = FullSequenceContext(BATCH, LENGTH)
    ctx.rotation = Rotary(attention.config.rope)(ctx.positions, given.device)
    both = [layer.input_layernorm(embeddings.flatten(0, 1)), layer.hidden_norm(given)]
    seen = attended(attention, torch.cat(both, dim=-1), ctx)
    attention.o_proj.weight.copy_(fit(seen, wanted - given))
    before = given + attention.o_proj(seen)
    normed = layer.post_attention_layernorm(before)
    inner = F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
    mlp.down_proj.weight.copy_(fit(inner, wanted - before))
    round_to_bfloat16(head)
    return save(folder, config, head.published_weights())


def attended(attention: Attention, both: Tensor, ctx: FullSequenceContext) -> Tensor:
    """What goes into ``o_proj``, [n, heads * head_dim]."""
    heads, dim = attention.config.num_heads, attention.config.head_dim
    attention.o_proj.weight = nn.Parameter(torch.eye(heads * dim))
    seen = attention(both, ctx)
    attention.o_proj.weight = nn.Parameter(torch.empty(64, heads * dim))
    return seen


@torch.no_grad()
def write_mtp_head(folder: Path, model_folder: Path, seed: int = 3, **changes: object) -> Path:
    """``eh_proj`` of each module is fitted. In the target's own folder the modules join its files
    and its config.json, as they are published."""
    beside = folder == model_folder
    target = load_model(model_folder)
    own = target.config.raw if beside else {"vocab_size": target.config.vocab_size}
    config = {**MTP_CONFIG, **own, **changes}
    head = MtpHead(parse_as("mtp", config))
    random_weights(head, seed)
    embeddings, features = ask(target, (), seed)
    ahead = shifted(features).flatten(0, 1)
    for module in range(head.num_modules):
        first = head.mtp.layers[module * head.length]
        both = [first.enorm(embeddings.flatten(0, 1)), first.hnorm(ahead)]
        first.eh_proj.weight.copy_(fit(torch.cat(both, dim=-1), features.flatten(0, 1)))
        made = head(module, embeddings.flatten(0, 1), ahead, FullSequenceContext(BATCH, LENGTH))
        ahead = shifted(made.unflatten(0, (BATCH, LENGTH))).flatten(0, 1)
    round_to_bfloat16(head)
    weights = head.published_weights()
    if beside:
        weights = {**load_file(folder / "model.safetensors"), **weights}
    return save(folder, config, weights)


def ask(target, taps: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Embeddings and features [BATCH, LENGTH, …] of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.config.vocab_size, (BATCH * LENGTH,), generator=generator)
    target.tap(taps)
    features = target(tokens, FullSequenceContext(BATCH, LENGTH))
    return tuple(part.unflatten(0, (BATCH, LENGTH)) for part in (target.embed(tokens), features))


def shifted(x: Tensor) -> Tensor:
    """[batch, length, …]: what stood one position before, zeros at first."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def fit(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The weight [out, in] of the best linear map; small where inputs nearly repeat each other, so
    that rounding does not decide what it is."""
    x, y = inputs.double(), wanted.double()
    products = x.t() @ x
    ridge = 1e-4 * products.diagonal().mean() * torch.eye(len(products), dtype=torch.float64)
    return torch.linalg.solve(products + ridge, x.t() @ y).t().float()


def per_query_head(weight: Tensor, config) -> Tensor:
    """Each key head's rows once for each of its query heads."""
    heads = weight.unflatten(0, (config.num_kv_heads, config.head_dim))
    return heads.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).flatten(0, 1)


def save(folder: Path, config: dict[str, object], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    plain = {name: value.contiguous().clone() for name, value in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class GrowingSequence:
    """A sequence that grows: each pass sees what the passes before it saw, layer by layer."""

    rotation = None

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._seen: dict[tuple[str, int], tuple[Tensor, ...]] = {}

    def then(self, position: int) -> GrowingSequence:
        self.positions = torch.tensor([position])
        return self

    def run(self, layers: Any, hidden: Tensor) -> None:
        return None

    def attention(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = self._grown(("attention", layer.index), q, k, v)
        return FullSequenceContext(1, len(whole[0])).attention(layer, *whole)[-len(q) :]

    def recur(self, layer: Any, xbc: Tensor, dt: Tensor) -> Tensor:
        whole = self._grown(("mamba", layer.index), xbc, dt)
        return FullSequenceContext(1, len(whole[0])).recur(layer, *whole)[-len(dt) :]

    def _grown(self, key: tuple[str, int], *parts: Tensor) -> tuple[Tensor, ...]:
        before = self._seen.get(key, tuple(part[:0] for part in parts))
        self._seen[key] = tuple(map(torch.cat, zip(before, parts)))
        return self._seen[key]
