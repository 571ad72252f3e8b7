"""Block drafters for the models of tiny_model.py, in the layouts in which they are published. They
guess right now and then: they are trained for a moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_heads import ask, save
from tiny_model import VOCAB, load_model, round_to_bfloat16
from torch import Tensor

from mamba_eagle.kernels.tree_attention.torch import masked_attention, sink_attention
from mamba_eagle.layers.block_attention import BlockAttention, block_mask
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.dflash import BlockDraftModel
from mamba_eagle.models.dflash_config import block_config
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.registry import parse_config

BATCH = 60
ANCHORS = range(4, 44, 3)
STEPS = 40

DFLASH_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 160,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1, 3], "causal": False},
}

DSPARK_CONFIG: dict[str, Any] = {
    **{name: value for name, value in DFLASH_CONFIG.items() if name != "layer_types"},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "attention_sink_bias": True,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [1, 3],
        "causal": True,
        "use_swa": True,
        "swa_window_size": 7,
    },
}


class DenseBlocks:
    """Blocks of b sequences behind the same number of tokens, whose keys and values are given."""

    rotation = None

    def __init__(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """keys, values: [L, b, S, kv_heads, D]."""
        self.keys, self.values, self.rows = keys, values, rows
        self.b, self.length = keys.shape[1:3]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.length, self.length + self.rows).repeat(self.b)

    def attention(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (self.b, self.rows)) for part in (q, k, v))
        keys = torch.cat([self.keys[layer.index], k], dim=1)
        values = torch.cat([self.values[layer.index], v], dim=1)
        seen = torch.ones(self.rows, self.length, dtype=torch.bool)
        if layer.window:
            seen = seen.triu(self.length + 1 - layer.window)
        own = block_mask(self.rows, layer.window, layer.causal)
        mask = torch.cat([seen, own], dim=1).expand(self.b, -1, -1)
        if layer.attention_sink_bias is None:
            return masked_attention(q, keys, values, mask, layer.scale).flatten(0, 1)
        sinks = layer.attention_sink_bias
        return sink_attention(q, keys, values, mask, layer.scale, sinks).flatten(0, 1)


def dense_blocks(model: BlockDraftModel, taps: Tensor, rows: int) -> DenseBlocks:
    """taps: [b, S, taps * hidden_size], of the context."""
    b, length = taps.shape[:2]
    positions = torch.arange(length).repeat(b)
    pairs = model.context_kv(model.context(taps.flatten(0, 1)), positions)
    return DenseBlocks(*(part.unflatten(1, (b, length)) for part in pairs), rows)


def write_block_drafter(
    folder: Path,
    model_folder: Path,
    config: dict[str, Any],
    seed: int = 4,
    optional: Iterable[str] = (),
    **changes: object,
) -> Path:
    """optional: weights that only the file's own header tells of."""
    target = load_model(model_folder)
    config = {**config, "vocab_size": target.config.vocab_size, **changes}
    own, layers = dict(config["dflash_config"]), len(target.parts.layers)
    own["target_layer_ids"] = [i for i in own["target_layer_ids"] if i < layers]
    config["dflash_config"] = own
    parsed = parse_config(config)
    names = block_config(parsed).own_weights(parsed) | {*optional}
    key = (json.dumps(config), *sorted(names), seed, float(target.lm_head.weight.sum()))
    if key not in _made:
        model = BlockDraftModel(parsed, names)
        fill(model, target, seed)
        round_to_bfloat16(model)
        _made[key] = model.published_weights()
    return save(folder, config, _made[key])


_made: dict[tuple, dict[str, Tensor]] = {}  # it takes a second


def fill(model: BlockDraftModel, target: CausalLM, seed: int) -> None:
    roughen(model, target, seed)
    if model.config.hidden_size == target.config.hidden_size:  # else it guesses at random
        train(model, target, *random_text(target, model.block.taps, seed))


@torch.no_grad()
def roughen(model: BlockDraftModel, target: CausalLM, seed: int) -> None:
    random_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name.endswith("attention_sink_bias"):
            value.copy_(torch.randn(value.shape, generator=generator))
        if name.endswith((".bias", "mask_embedding")):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
        if "norm" in name:
            value.copy_(1 + 0.1 * torch.randn(value.shape, generator=generator))
    for layer in model.layers:
        for part in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj):
            part.weight.mul_(4.0)
    model.norm.weight.fill_(1.0)
    if model.d2t is not None:
        chosen = torch.randperm(target.config.vocab_size, generator=generator)
        model.choose_tokens(chosen[: model.block.draft_vocab_size].sort().values)
    if model.config.hidden_size != target.config.hidden_size:
        return
    if model.embed_tokens is not None:
        model.embed_tokens.weight.copy_(target.parts.embedding.weight)
    ids = model.target_ids()
    if model.lm_head is not None:
        model.lm_head.weight.copy_(target.lm_head.weight[slice(None) if ids is None else ids])


def random_text(target: CausalLM, taps: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)  # the tokens that ``ask`` draws
    tokens = torch.randint(0, target.config.vocab_size, (60 * 50,), generator=generator)
    return tokens.view(60, 50), ask(target, taps, seed)[1]


def train(model: BlockDraftModel, target: CausalLM, tokens: Tensor, features: Tensor) -> None:
    """A few steps towards the target's choices behind random tokens. There every token is a
    surprise, so without a Markov head only the first row that predicts has something to learn."""
    block, head = model.block, model.markov_head
    first = 0 if block.sample_from_anchor else 1
    count = block.max_drafts if head is not None else 1
    labels = target.compute_logits(features[..., :64].flatten(0, 1)).argmax(-1).view_as(tokens)
    if (ids := model.target_ids()) is not None:
        known = torch.full((target.config.vocab_size,), -100)
        known[ids] = torch.arange(len(ids))
        labels = known[labels]
    frozen = {id(part) for part in (*target.parameters(), *_shared(model))}
    trained = [part for part in model.parameters() if id(part) not in frozen]
    optimizer = torch.optim.Adam(trained, lr=5e-3)
    for step in range(STEPS):
        anchor = ANCHORS[step % len(ANCHORS)]
        ctx = dense_blocks(model, features[:, :anchor, 64:], block.rows)
        rows = torch.full((BATCH, block.rows), block.mask_token)
        rows[:, 0] = tokens[:, anchor]
        hidden = model(model.embed(rows, target.parts.embedding), ctx)
        hidden = hidden.unflatten(0, rows.shape)[:, first : first + count].flatten(0, 1)
        logits = model.logits(hidden, target.lm_head)
        if head is not None:
            before = tokens[:, anchor : anchor + count].flatten()
            state = torch.zeros(len(before), head.rank)
            code = head.step(head.markov_w1(before), hidden, state).code
            logits = logits + block.logit_scale * head.markov_w2(code)
        F.cross_entropy(logits, labels[:, anchor : anchor + count].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _shared(model: BlockDraftModel) -> Iterable[Tensor]:
    for part in (model.embed_tokens, model.lm_head):
        if part is not None:
            yield part.weight
