"""Heads that draft token after token: each depth continues from the outputs of the one above it.

While drafting, only the first token after a verify step is predicted from the target's own hidden
states; every later one is predicted from the head's previous output. Training does the same, for
whole answers at once: depth 0 reads the target's features, depth j reads the head's outputs at
depth j - 1 (HASS, arXiv 2408.15766; the "training-time test" of EAGLE-3, arXiv 2503.01840).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.kernels.ssd.torch import ssd_chunked
from mamba_eagle.layers.context import AttentionView, FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.train.batches import PaddedAnswers
from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.target import TargetOutputs


def shift(x: Tensor, by: int) -> Tensor:
    """Moves [batch, length, ...] ``by`` positions later, or earlier if negative, and fills with
    zeros."""
    length = x.shape[1]
    pad = [0, 0] * (x.ndim - 2)
    if by < 0:
        return F.pad(x[:, -by:], [*pad, 0, min(-by, length)])
    return F.pad(x[:, : max(length - by, 0)], [*pad, min(by, length), 0])


def convolve(layer: Mamba2Mixer, inputs: list[Tensor]) -> Tensor:
    """Causal convolution and SiLU at the last depth of ``inputs``, in float32.

    The predecessor k positions before an input at depth j is at depth max(j - k, 0). The
    convolution is a sum of shifted products, because the backward pass of a depthwise ``conv1d`` is
    many times slower on a GPU.

    Args:
        inputs: [batch, length, channels] of each depth.
    """
    weight, depth = layer.conv1d.weight[:, 0].float(), len(inputs) - 1  # [channels, K]
    width = weight.shape[1]
    out = inputs[depth] * weight[:, width - 1]
    for back in range(1, width):
        predecessor = shift(inputs[max(depth - back, 0)], back)
        out = torch.addcmul(out, predecessor, weight[:, width - 1 - back])
    return F.silu(out if layer.conv1d.bias is None else out + layer.conv1d.bias)


class Scanned(NamedTuple):
    """What the entries of one depth feed into a recurrence."""

    xbc: Tensor  # [b, l, channels], before the convolution
    x: Tensor  # [b, l, H, P]
    B: Tensor  # [b, l, H, N], repeated for each head
    dt: Tensor  # [b, l, H], after softplus


class UnrolledContext(FullSequenceContext):
    """``batch`` sequences of ``length`` tokens in which every position drafts, all at once.

    Depth 0 holds the true entries, those that a drafter makes from the target's own features. Depth
    j holds, at every position p, the entry drafted j tokens after the last true one: its history is
    the true entries up to p - j, then the entries of depth i at p - j + i for i = 1 … j. The depths
    run in ascending order, and each calls a layer once. Differentiable; tokens are flat in the
    layers. The recurrence runs outside of autocast, which would round its sums to bfloat16.
    """

    def __init__(self, batch: int, length: int, device: torch.device | None = None) -> None:
        super().__init__(batch, length, device)
        # by layer index: a list of what each depth has stored
        self._kv: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._scanned: dict[int, list[Scanned]] = {}

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (t.unflatten(0, (self.batch, self.length)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))  # [b, heads, l, D]
        entries = self._kv.setdefault(layer.index, [])
        entries.append((k, v))
        depth = len(entries) - 1
        if depth == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
        else:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*entries))
            mask = self._visible(depth, q.device)
            out = F.scaled_dot_product_attention(q, keys, values, mask, scale=layer.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _visible(self, depth: int, device: torch.device) -> Tensor:
        """[l, (depth + 1) * l] bool: the keys that a query sees, concatenated over all depths."""
        position = torch.arange(self.length, device=device)
        distance = position[:, None] - position[None, :]  # [query, key]
        own = [distance == depth - i for i in range(1, depth + 1)]
        return torch.cat([distance >= depth, *own], dim=1)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        assert isinstance(layer, Mamba2Mixer), "heads have no other recurrence"
        with torch.autocast(channels.device.type, enabled=False):
            return self._mamba(layer, channels.float(), raw.float())

    def _mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """Depth j continues from the true state after p - j, which is never built: what C reads
        from it is a scan over the true entries with C moved j positions earlier. The j drafted
        entries are then added one by one, each decayed to p."""
        xbc, dt = (t.unflatten(0, (self.batch, self.length)) for t in (xbc, dt))
        entries = self._scanned.setdefault(layer.index, [])
        depth = len(entries)
        inputs = [entry.xbc for entry in entries] + [xbc]
        x, B, C = layer.split_xbc(convolve(layer, inputs))
        heads = x.shape[2] // B.shape[2]
        now = Scanned(xbc, x, B.repeat_interleave(heads, 2), layer.step_size(dt))
        entries.append(now)
        A, D = layer.decay_rate(), layer.D
        first, chunk = entries[0], layer.config.chunk_size
        if depth == 0:
            y = ssd_chunked(x, now.dt, A, B, C, D, chunk).y
            return y.flatten(2).flatten(0, 1)

        C = C.repeat_interleave(heads, 2)  # [b, l, H, N]
        no_skip = torch.zeros_like(D)
        read = ssd_chunked(first.x, first.dt, A, first.B, shift(C, -depth), no_skip, chunk).y
        log_decay = torch.zeros_like(now.dt)  # from after the entry at hand to p
        y = D[:, None] * x
        for i in range(depth, 0, -1):
            entry_x, entry_B, entry_dt = (
                shift(t, depth - i) for t in (entries[i].x, entries[i].B, entries[i].dt)
            )
            share = log_decay.exp() * entry_dt * (entry_B * C).sum(-1)  # [b, l, H]
            y = y + share[..., None] * entry_x
            log_decay = log_decay + entry_dt * A
        y = y + log_decay.exp()[..., None] * shift(read, depth)
        return y.flatten(2).flatten(0, 1)


class Begun(NamedTuple):
    """Depth 0 of an unrolled pass."""

    outputs: Tensor  # [b, l, O]
    context: UnrolledContext


DEPTH_DECAY = 0.8  # weight of each depth relative to the one above it


class UnrolledHead(TrainableHead):
    """``network`` drafts with the weights of ``module``.

    Shapes: n entries of the draft network, O its output size, W the width of the target's features,
    D the number of tokens that the head can draft.
    """

    network: DraftNetwork

    def begin(self, tokens: Tensor, features: Tensor) -> Begun:
        """Runs the true entries: tokens [b, l], features [b, l, W]."""
        network, (batch, length) = self.network, tokens.shape
        context = UnrolledContext(batch, length, tokens.device)
        given = network.entry_features(features.flatten(0, 1)).unflatten(0, tokens.shape)
        carry = given.new_zeros(len(tokens), network.carry_size)
        return Begun(network.run_entries(tokens, shift(given, 1), carry, context), context)

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """Yields the outputs [b, l, O] of each depth below ``depth``.

        At depth j, entry p is the draft token j places after its root and predicts token p + 1; the
        first j entries are meaningless.

        Args:
            tokens: [b, l].
            features: [b, l, W], the target's at these tokens.
        """
        outputs, context = self.begin(tokens, features)
        yield outputs
        for j in range(1, depth):
            above = shift(outputs, 1).flatten(0, 1)
            outputs = self.network.lanes(j, tokens.flatten(), above, context)
            outputs = outputs.unflatten(0, tokens.shape)
            yield outputs

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        """Logits of the head's own vocabulary: outputs [n, O] of entries at ``depth`` -> [n, D]
        float32."""
        return self.network.logits(depth, outputs).float()

    def target_probs(self, probs: Tensor) -> Tensor:
        """The target's distribution [n, vocab_size], restricted to the head's vocabulary [n, D]."""
        return probs

    def token_ids(self, choice: Tensor) -> Tensor:
        """Maps indices into the head's vocabulary to the target's token ids, both [n]."""
        return choice

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        """A loss in addition to the cross entropy: outputs [n, O] and the target's features [n, W]
        at the same positions -> [n]; None if this kind of head has none."""
        return None

    def loss(self, answers: PaddedAnswers, target: TargetOutputs, num_drafts: list[int]) -> Tensor:
        """Cross entropy against the target's distribution plus the head's feature loss, averaged at
        each depth; the depths are then weighted and added."""
        total = target.probs.new_zeros(())
        weights = [DEPTH_DECAY**j for j in range(len(num_drafts))]
        probs = self.target_probs(target.probs)
        features = target.features.flatten(0, 1)
        unrolled = self.unroll(answers.tokens, target.features, len(num_drafts))
        for j, outputs in enumerate(unrolled):
            positions = answers.drafts[j]
            drafted = outputs.flatten(0, 1)[positions.flat]
            log_probs = self.logits(j, drafted).log_softmax(-1)
            loss = -(probs[positions.among_roots] * log_probs).sum(-1)
            feature_loss = self.feature_loss(drafted, features[positions.flat])
            if feature_loss is not None:
                loss = loss + feature_loss
            total = total + weights[j] / sum(weights) * loss.sum() / max(num_drafts[j], 1)
        return total

    def greedy_drafts(
        self, answers: PaddedAnswers, target: TargetOutputs, depth: int
    ) -> Iterator[Tensor]:
        unrolled = self.unroll(answers.tokens, target.features, depth)
        for j, outputs in enumerate(unrolled):
            drafted = outputs.flatten(0, 1)[answers.drafts[j].flat]
            yield self.token_ids(self.logits(j, drafted).argmax(-1))
