"""Block drafters computed plainly, in float64, from a checkpoint's tensors and what its config.json
says: no layer of ours, one block at a time, position by position where that is the definition."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Weights = dict[str, Tensor]


class Form(NamedTuple):
    """What config.json means, written down by hand."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    mask: int
    from_anchor: bool  # row i predicts the token behind it
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    eps: float = 1e-5
    theta: float = 10000.0
    yarn: dict[str, Any] | None = None
    kind: str = ""  # of the Markov head
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, positions: Tensor, form: Form) -> Tensor:
    """Channel i and channel i + D/2 of [length, D] as one complex number, times exp(i angle)."""
    half, size = form.head_dim // 2, 1.0
    speeds = torch.tensor([form.theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    if form.yarn is not None:
        config = Qwen3Config(
            rope_parameters={**form.yarn, "rope_theta": form.theta}, head_dim=form.head_dim
        )
        found, size = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        speeds = found.double()
    angles = torch.outer(positions.double(), speeds)
    pairs = torch.complex(x[:, :half], x[:, half:])
    pairs = pairs * torch.polar(torch.full_like(angles, size), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def product(w: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def block_rows(w: Weights, form: Form, taps: Tensor, anchor: int, embedding: Tensor) -> Tensor:
    """The rows behind a context of S tokens, after the final norm: taps [S, t] -> [rows, h]."""
    context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"], form.eps)
    own = w.get("embed_tokens.weight", embedding)
    x = torch.stack([own[anchor], *[own[form.mask]] * (form.rows - 1)]) * form.embedding_scale
    if "mask_embedding" in w:
        x[1:] = w["mask_embedding"]
    before = torch.arange(len(taps))
    places = len(taps) + torch.arange(form.rows)
    for layer, (window, causal) in enumerate(zip(form.windows, form.causal, strict=True)):
        name = f"layers.{layer}"
        normed = rms(x, w[f"{name}.input_layernorm.weight"], form.eps)
        x = x + attended(
            w, f"{name}.self_attn", form, context, normed, before, places, window, causal
        )
        normed = rms(x, w[f"{name}.post_attention_layernorm.weight"], form.eps)
        gate = product(w, f"{name}.mlp.gate_proj", normed)
        inner = gate * gate.sigmoid() * product(w, f"{name}.mlp.up_proj", normed)
        x = x + product(w, f"{name}.mlp.down_proj", inner)
    return rms(x, w["norm.weight"], form.eps)


def attended(
    w: Weights,
    name: str,
    form: Form,
    context: Tensor,
    normed: Tensor,
    before: Tensor,
    places: Tensor,
    window: int,
    causal: bool,
) -> Tensor:
    dim, out = form.head_dim, []
    q = product(w, f"{name}.q_proj", normed)
    keys_of, values_of = (
        product(w, f"{name}.{part}_proj", torch.cat([context, normed])) for part in "kv"
    )
    positions = torch.cat([before, places])
    for head in range(form.heads):
        kv = head * form.kv_heads // form.heads
        queries = rms(q[:, head * dim : head * dim + dim], w[f"{name}.q_norm.weight"], form.eps)
        keys = rms(keys_of[:, kv * dim : kv * dim + dim], w[f"{name}.k_norm.weight"], form.eps)
        queries, keys = turned(queries, places, form), turned(keys, positions, form)
        values, sums = values_of[:, kv * dim : kv * dim + dim], []
        for place, query in zip(places.tolist(), queries):
            seen = [
                at
                for at, position in enumerate(positions.tolist())
                if (not window or abs(position - place) < window)
                and (position < places[0] or not causal or position <= place)
            ]
            weights = (keys[seen] @ query / math.sqrt(dim)).exp()
            total = weights.sum()
            if f"{name}.attention_sink_bias" in w:
                total = total + w[f"{name}.attention_sink_bias"][head].exp()
            sums.append(weights @ values[seen] / total)
        out.append(torch.stack(sums))
    return product(w, f"{name}.o_proj", torch.cat(out, dim=-1))


def path_log_probs(
    w: Weights, form: Form, rows: Tensor, path: list[int], lm_head: Tensor, vocab: int
) -> Tensor:
    """Of the token behind ``path``, the anchor and drafts after it: [vocab]."""
    depth = len(path) - 1
    hidden = rows[0 if form.from_anchor else 1 :]
    logits = hidden[depth] @ w.get("lm_head.weight", lm_head).T
    if form.kind:
        embedded = w["markov_head.markov_w1.weight"][path]
        code, state = embedded[depth], torch.zeros_like(embedded[0])
        if form.kind == "gated":
            both = torch.cat([hidden[depth], embedded[depth]])
            code = product(w, "markov_head.gate_proj", both).sigmoid() * embedded[depth]
        for step in range(depth + 1) if form.kind == "rnn" else ():
            joint = torch.cat([state, embedded[step], hidden[step]])
            a, c, o = product(w, "markov_head.joint_proj", joint).chunk(3)
            state = a.sigmoid() * state + (1 - a.sigmoid()) * c.tanh()
            code = o.tanh()
        logits = logits + w["markov_head.markov_w2.weight"] @ code
    log_probs = (logits * form.logit_scale).log_softmax(0)
    if "d2t" not in w:
        return log_probs
    whole = torch.full((vocab,), float("-inf"), dtype=torch.float64)
    whole[torch.arange(len(log_probs)) + w["d2t"].long()] = log_probs
    return whole
