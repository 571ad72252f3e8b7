"""Trains an EAGLE draft head for a target: ``python -m mamba_eagle.train.eagle --target DIR …``.

While drafting, only the first guess after a verify step is made from the target's own hidden
states; each further one is made from the head's guess before it. Training unrolls that: step 0 uses
the target's features, step j feeds back the head's output of step j-1 (HASS, arXiv 2408.15766;
"training-time test" of EAGLE-3, arXiv 2503.01840). The loss of each step is the cross entropy
against the target's distribution, plus a small distance to the target's features.

The text is the generator's, the same distribution that the target was trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.layers.attention import Attention
from mamba_eagle.models.config import ModelConfig
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM
from mamba_eagle.train import loop
from mamba_eagle.train.checkpoint import EAGLE_CONFIG, load_weights, save_weights
from mamba_eagle.train.context import TrainingContext
from mamba_eagle.train.data import VALIDATION_STREAM, ProblemEncoder, RowStream, make_block
from mamba_eagle.train.init import initialize
from mamba_eagle.train.pretrain import compiled, to_device

STEP_WEIGHTS = (1.0, 0.8, 0.64, 0.5)  # of the unrolled steps; their number is the depth trained
QUESTION_WEIGHT = 0.1  # an answer token weighs 1: only answers are drafted
FEATURE_WEIGHT = 0.2  # of the smooth L1 distance to the target's features


def shift(x: Tensor, by: int) -> Tensor:
    """Moves [batch, length, ...] later in time by ``by`` positions; zeros enter at the front."""
    if by == 0:
        return x
    pad = [0, 0] * (x.ndim - 2) + [by, 0]
    return F.pad(x[:, : x.shape[1] - by], pad)


class UnrolledContext:
    """Attention of step j of the unrolled training, for j = 0, 1, … in order, one call each.

    The query of position p in step j stands for a draft that began after position p - j: it sees
    the entries with true features (step 0) at positions <= p - j, then the entry of step i at
    position p - j + i for i = 1 … j, its own last. n = batch * length tokens, flat.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self._entries: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: k, v of each step

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (t.unflatten(0, (self.batch, self.length)) for t in (q, k, v))
        k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))  # [b, l, heads, D]
        entries = self._entries.setdefault(layer.index, [])
        entries.append((k, v))
        step = len(entries) - 1
        if step == 0:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
            return out.transpose(1, 2).flatten(0, 1)

        true_k, true_v = entries[0]
        position = torch.arange(self.length, device=q.device)
        visible = position[None, :] <= position[:, None] - step  # [query, key]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, true_k).float() * layer.scale
        scores = scores.masked_fill(~visible, float("-inf"))
        unrolled = [
            (shift(k_i, step - i), shift(v_i, step - i))
            for i, (k_i, v_i) in enumerate(entries[1:], start=1)
        ]
        own = [(q.float() * k_i.float()).sum(-1).transpose(1, 2) for k_i, _ in unrolled]
        own_scores = torch.stack(own, dim=-1) * layer.scale  # [b, h, q, step]
        weights = torch.cat([scores, own_scores], dim=-1).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., : self.length].to(q.dtype), true_v)
        for i, (_, v_i) in enumerate(unrolled):
            share = weights[..., self.length + i].transpose(1, 2)  # [b, q, h]
            out = out + share[..., None].to(q.dtype) * v_i
        return out.flatten(0, 1)

    def mamba(self, layer: object, xbc: Tensor, dt: Tensor) -> Tensor:
        raise NotImplementedError("unrolled training of a draft head with Mamba2 layers")


def unroll(head: EagleHead, embeddings: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The head's predicted features of each unrolled step.

    Args: embeddings of token p and the target's features at p, both [batch, length, hidden].
    Returns: per step [batch, length, hidden]; entry p predicts the feature at p, and is a draft of
        depth j + 1; the first j positions of step j have no meaning.
    """
    batch, length, _ = embeddings.shape
    context = UnrolledContext(batch, length)
    given, outputs = features, []
    for _ in range(steps):
        flat = head(embeddings.flatten(0, 1), shift(given, 1).flatten(0, 1), context)
        given = flat.view(batch, length, -1)
        outputs.append(given)
    return outputs


class Taught(NamedTuple):
    """What the frozen target says about a batch; all without gradient."""

    embeddings: Tensor  # [batch, length, hidden]
    features: Tensor  # [batch, length, hidden], after the final norm
    logits: Tensor  # [batch, length, vocab]


@torch.no_grad()
def ask_target(target: NemotronHForCausalLM, tokens: Tensor) -> Taught:
    """tokens [batch, length]."""
    hidden = target(tokens.flatten(), TrainingContext(*tokens.shape))
    logits = target.compute_logits(hidden)
    embeddings = target.embed(tokens.flatten())
    return Taught(*(t.view(*tokens.shape, -1) for t in (embeddings, hidden.float(), logits)))


def draft_loss(
    head: EagleHead, target: NemotronHForCausalLM, taught: Taught, is_answer: Tensor
) -> Tensor:
    """Weighted sum over the unrolled steps; is_answer [batch, length] bool."""
    wanted = taught.logits.softmax(-1)
    # Entry p predicts token p + 1. What the last one predicts is known to the target only, but
    # whether that is an answer is not.
    weight = QUESTION_WEIGHT + (1 - QUESTION_WEIGHT) * is_answer[:, 1:].float()
    weight = F.pad(weight, (0, 1))
    total = taught.features.new_zeros(())
    drafts = unroll(head, taught.embeddings, taught.features, len(STEP_WEIGHTS))
    for j, (draft, step_weight) in enumerate(zip(drafts, STEP_WEIGHTS)):
        flat = target.compute_logits(draft.flatten(0, 1)).view_as(wanted)
        entropy = -(wanted * flat.log_softmax(-1)).sum(-1)[:, j:]
        distance = F.smooth_l1_loss(draft.float(), taught.features, reduction="none").mean(-1)
        loss = entropy + FEATURE_WEIGHT * distance[:, j:]
        total = total + step_weight * (loss * weight[:, j:]).sum() / weight[:, j:].sum()
    return total / sum(STEP_WEIGHTS)


class Acceptance(NamedTuple):
    """Over drafts that begin inside answers, each a chain of argmax tokens."""

    by_depth: list[float]  # share of drafts whose first d tokens are all the target's argmax
    length: float  # expected accepted tokens of a chain, without the target's own bonus token

    def __str__(self) -> str:
        depths = " ".join(f"{share:.3f}" for share in self.by_depth)
        return f"accepted up to depth 1, 2, …: {depths}; {self.length:.2f} of {len(self.by_depth)}"


@torch.no_grad()
def measure_acceptance(
    head: EagleHead,
    target: NemotronHForCausalLM,
    tokens: Tensor,
    is_answer: Tensor,
    steps: int = len(STEP_WEIGHTS),
    rows_at_once: int = 16,
) -> Acceptance:
    """tokens, is_answer [rows, length]. Counts a depth only if all before it were right."""
    right = torch.zeros(steps, device=tokens.device, dtype=torch.float64)
    drafts_begun = 0
    for at in range(0, len(tokens), rows_at_once):
        part, marks = tokens[at : at + rows_at_once], is_answer[at : at + rows_at_once]
        taught = ask_target(target, part)
        best = taught.logits.argmax(-1)
        begins = F.pad(marks[:, 1:], (0, 1))
        begins[:, -steps:] = False  # the whole chain must lie inside the row
        alive = begins
        drafts_begun += int(begins.sum())
        for j, draft in enumerate(unroll(head, taught.embeddings, taught.features, steps)):
            logits = target.compute_logits(draft.flatten(0, 1))
            match = logits.argmax(-1).view_as(best) == best
            # the draft that began at p is at p + j now
            alive = alive & match.roll(-j, dims=1)
            right[j] += alive.sum()
    shares = (right / max(drafts_begun, 1)).tolist()
    return Acceptance(shares, sum(shares))


def load_target(folder: Path, device: str) -> NemotronHForCausalLM:
    """The target in float32, frozen."""
    target = NemotronHForCausalLM(ModelConfig.from_pretrained(folder)).float()
    load_weights(target, folder)
    return target.to(device).requires_grad_(False)


def head_config(target: ModelConfig) -> dict:
    return {
        **EAGLE_CONFIG,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "max_position_embeddings": target.max_position_embeddings,
    }


def train(args: argparse.Namespace) -> tuple[EagleHead, NemotronHForCausalLM]:
    rows_ahead = min(128, max(4, args.batch_rows))
    data = RowStream(
        args.target, args.seed + 1, args.length, args.workers, rows_ahead, args.extra_data
    )
    try:
        return _train(args, data)
    finally:
        data.close()


def _train(args: argparse.Namespace, data: RowStream) -> tuple[EagleHead, NemotronHForCausalLM]:
    loop.set_precision()
    device = args.device
    target = load_target(args.target, device)
    config = head_config(target.config)
    head = EagleHead(ModelConfig.from_dict(config)).float()
    initialize(head, args.seed)
    with torch.no_grad():  # the head ends in the same norm, in front of the same lm_head
        head.norm.weight.copy_(target.backbone.norm_f.weight)
    head.to(device)
    count = sum(p.numel() for p in head.parameters())
    print(f"draft head of {count / 1e6:.2f} M parameters on {device}", flush=True)

    loss_function = compiled(draft_loss, args.compile)
    validation = validation_rows(args)

    def compute_loss() -> Tensor:
        tokens, is_answer = to_device(data.batch(args.batch_rows), device)
        return loss_function(head, target, ask_target(target, tokens), is_answer)

    loop.run(
        args,
        head,
        data,
        compute_loss,
        evaluate=lambda: str(measure_acceptance(head, target, *validation)),
        save=lambda: save_weights(head, args.output, config),
    )
    return head, target


def validation_rows(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    encoder = ProblemEncoder(args.target)
    count = max(1, args.eval_count * 150 // args.length)  # a problem has about 150 tokens
    block = make_block(encoder, 0, 0, args.length, count, split=VALIDATION_STREAM)
    return to_device(block, args.device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    loop.add_arguments(parser, minutes=6.0, lr=2e-3)
    parser.add_argument(
        "--target", type=Path, required=True, help="checkpoint folder of the target"
    )
    args = parser.parse_args(argv)
    if args.batch_rows is None and args.device.startswith("cuda"):
        args.batch_rows = 32
    loop.fill_defaults(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    head, target = train(args)
    save_weights(head, args.output, head_config(target.config))
    load_weights(head, args.output)  # what is measured now is what was saved
    print(f"saved {args.output}", flush=True)
    with loop.autocast(args.device):
        print("rounded:", measure_acceptance(head, target, *validation_rows(args)), flush=True)


if __name__ == "__main__":
    main()
