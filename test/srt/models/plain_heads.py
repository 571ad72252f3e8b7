"""Draft heads computed plainly from a checkpoint's tensors: no layer of ours, one sequence at a
time, loops where a loop is the definition."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def behind(x: Tensor) -> Tensor:
    """[length, …]: what stood one position before; at first nothing."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def turned(x: Tensor, theta: float) -> Tensor:
    """Channel i and channel i + D/2 of [length, D] as one complex number, times exp(i angle)."""
    length, dim = x.shape
    half = dim // 2
    speeds = torch.tensor([theta ** (-i / half) for i in range(half)])
    angles = torch.outer(torch.arange(length).float(), speeds)
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def attention(w: Weights, name: str, x: Tensor, config: dict[str, Any], theta: float = 0) -> Tensor:
    """Head by head; theta 0: no position encoding."""
    heads, kv_heads, dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    q, k, v = (x @ w[f"{name}.{part}_proj.weight"].T for part in "qkv")
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out = []
    for head in range(heads):
        own = head * kv_heads // heads
        queries, keys = q[:, head * dim : (head + 1) * dim], k[:, own * dim : (own + 1) * dim]
        if f"{name}.q_norm.weight" in w:
            queries = rms(queries, w[f"{name}.q_norm.weight"])
            keys = rms(keys, w[f"{name}.k_norm.weight"])
        if theta:
            queries, keys = turned(queries, theta), turned(keys, theta)
        scores = (queries @ keys.T / math.sqrt(dim)).masked_fill(~seen, float("-inf"))
        out.append(scores.softmax(-1) @ v[:, own * dim : (own + 1) * dim])
    return torch.cat(out, dim=-1) @ w[f"{name}.o_proj.weight"].T


# ── EAGLE-3 ──


def eagle3_features(w: Weights, config: dict[str, Any], taps: Tensor) -> Tensor:
    """taps [length, 3, t] -> [length, h], with the norms of EAGLE 3.1 where they are asked for."""
    if config.get("fc_norm"):
        taps = torch.stack([rms(taps[:, i], w[f"fc_norm.{i}.weight"]) for i in range(3)], dim=1)
    taps = taps.flatten(1)
    if config.get("norm_before_fc"):
        taps = rms(taps, w["input_norm.weight"])
    return taps @ w["fc.weight"].T


def eagle3(w: Weights, config: dict[str, Any], embeddings: Tensor, features: Tensor) -> Tensor:
    """embeddings, features [length, h] -> what comes out ahead of the norm."""
    normed = rms(features, w["midlayer.hidden_norm.weight"])
    both = torch.cat([rms(embeddings, w["midlayer.input_layernorm.weight"]), normed], dim=-1)
    seen = attention(w, "midlayer.self_attn", both, config, config["rope_theta"])
    hidden = (normed if config.get("norm_before_residual") else features) + seen
    x = rms(hidden, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (x @ w[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return hidden + (gate * gate.sigmoid() * up) @ w["midlayer.mlp.down_proj.weight"].T


def eagle3_log_probs(w: Weights, vocab: int, outputs: Tensor) -> Tensor:
    own = (rms(outputs, w["norm.weight"]) @ w["lm_head.weight"].T).log_softmax(-1)
    whole = torch.full((len(outputs), vocab), float("-inf"))
    for i, offset in enumerate(w["d2t"].tolist()):
        whole[:, i + offset] = own[:, i]
    return whole


# ── multi-token prediction ──


def mamba2(w: Weights, name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """Token by token."""
    heads, dim, size, groups = (
        config[key] for key in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    )
    inner = heads * dim
    projected = x @ w[f"{name}.in_proj.weight"].T
    gate, xbc, dt = projected.split([inner, inner + 2 * groups * size, heads], dim=-1)
    kernel = w[f"{name}.conv1d.weight"]
    padded = F.pad(xbc.T, (kernel.shape[-1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, kernel, w[f"{name}.conv1d.bias"], groups=len(padded)).T)
    dt = F.softplus(dt + w[f"{name}.dt_bias"])
    decay = (-w[f"{name}.A_log"].exp() * dt).exp()
    state, out = torch.zeros(heads, dim, size), []
    for t in range(len(x)):
        values, keys, queries = xbc[t].split([inner, groups * size, groups * size])
        values = values.view(heads, dim)
        keys, queries = (
            part.view(groups, size).repeat_interleave(heads // groups, dim=0)
            for part in (keys, queries)
        )
        new = dt[t][:, None, None] * values[:, :, None] * keys[:, None, :]
        state = decay[t][:, None, None] * state + new
        out.append((state @ queries[:, :, None])[..., 0] + w[f"{name}.D"][:, None] * values)
    y = torch.stack(out).flatten(1) * F.silu(gate)
    grouped = y.unflatten(-1, (groups, -1))
    y = (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
    return (y * w[f"{name}.norm.weight"]) @ w[f"{name}.out_proj.weight"].T


def relu2(w: Weights, name: str, x: Tensor) -> Tensor:
    inner = (x @ w[f"{name}.up_proj.weight"].T).relu() ** 2
    return inner @ w[f"{name}.down_proj.weight"].T


def experts(w: Weights, name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """Token by token, expert by expert, in the latent width."""
    scores = (x @ w[f"{name}.gate.weight"].T).sigmoid()
    wanted = scores + w[f"{name}.gate.e_score_correction_bias"]
    narrow = x @ w[f"{name}.fc1_latent_proj.weight"].T
    out = []
    for t in range(len(x)):
        best = wanted[t].topk(config["num_experts_per_tok"]).indices.tolist()
        total = sum(scores[t, e] for e in best)
        made = [relu2(w, f"{name}.experts.{e}", narrow[t]) * scores[t, e] / total for e in best]
        out.append(sum(made) @ w[f"{name}.fc2_latent_proj.weight"].T)
    return torch.stack(out) + relu2(w, f"{name}.shared_experts", x)


def mtp(
    w: Weights, config: dict[str, Any], module: int, embeddings: Tensor, hidden: Tensor
) -> Tensor:
    """One module: embeddings, hidden [length, h] -> its output."""
    pattern = config["mtp_hybrid_override_pattern"]
    first = module * len(pattern)
    normed = rms(embeddings, w[f"mtp.layers.{first}.enorm.weight"])
    both = torch.cat([normed, rms(hidden, w[f"mtp.layers.{first}.hnorm.weight"])], dim=-1)
    hidden = both @ w[f"mtp.layers.{first}.eh_proj.weight"].T
    for i, letter in enumerate(pattern):
        name = f"mtp.layers.{first + i}"
        x = rms(hidden, w[f"{name}.norm.weight"])
        if letter == "*":
            made = attention(w, f"{name}.mixer", x, config)
        elif letter == "M":
            made = mamba2(w, f"{name}.mixer", x, config)
        elif letter == "E":
            made = experts(w, f"{name}.mixer", x, config)
        else:
            made = relu2(w, f"{name}.mixer", x)
        hidden = hidden + made
    return rms(hidden, w[f"mtp.layers.{first + len(pattern) - 1}.final_layernorm.weight"])
