"""What DFlash and DSpark drafters share in training: blocks from many anchors in one pass."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block_attention import BlockAttention, block_mask
from mamba_eagle.layers.context import Rotation
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.dflash import BlockDraftModel
from mamba_eagle.models.dflash_config import block_config, parse_config
from mamba_eagle.train.batches import Answer, PaddedAnswers
from mamba_eagle.train.heads.base import TrainableHead, initialize
from mamba_eagle.train.heads.config import block_draft_config, head_attention
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import TargetOutputs


class BlockTrainingContext:
    """A row sees the features of its own answer before its anchor, and its own block; never another
    block. So one pass gives what a drafter would propose from each anchor.

    Shapes: b answers of length l, A anchors in each, N rows per block, n = b * A * N rows; H query
    heads, kv of keys, D channels each; L layers.
    """

    rotation: Rotation | None = None

    def __init__(self, anchors: Tensor, rows: int, keys: Tensor, values: Tensor) -> None:
        """anchors: [b, A] int64, -1 where there is none; rows: N.
        keys, values: [L, b, l, kv, D], of the answers' features."""
        self.anchors, self.rows = anchors, rows
        self.keys, self.values = keys, values
        offsets = torch.arange(rows, device=anchors.device)
        self.row_positions = anchors.clamp(min=0)[..., None] + offsets  # [b, A, N]
        self._masks: dict[int, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """[n] int64"""
        return self.row_positions.flatten()

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        return None

    def attention(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, D], k and v [n, kv, D] -> [n, H, D]."""
        (b, A), N, kv = self.anchors.shape, self.rows, k.shape[1]
        q = q.view(b, A, N, kv, -1, q.shape[2]).permute(0, 3, 4, 1, 2, 5)  # [b, kv, G, A, N, D]
        k, v = (x.view(b, A, N, kv, -1).permute(0, 3, 1, 2, 4) for x in (k, v))  # [b, kv, A, N, D]
        keys, values = (x[layer.index].to(q.dtype) for x in (self.keys, self.values))
        before = torch.einsum("bkgand,bskd->bkgans", q, keys)
        own = torch.einsum("bkgand,bkamd->bkganm", q, k)
        seen = block_mask(N, layer.window, layer.causal, q.device)
        parts = [
            (before.float() * layer.scale).masked_fill_(~self._sees(layer.window), -torch.inf),
            (own.float() * layer.scale).masked_fill_(~seen, -torch.inf),
        ]
        if layer.attention_sink_bias is not None:
            sinks = layer.attention_sink_bias.float().view(1, kv, -1, 1, 1, 1)
            parts.append(sinks.expand(*own.shape[:-1], 1))
        shares = torch.cat(parts, dim=-1).softmax(-1).to(v.dtype)
        length = before.shape[-1]
        out = torch.einsum("bkgans,bskd->bkgand", shares[..., :length], values)
        of_block = shares[..., length : length + N]
        out = out + torch.einsum("bkganm,bkamd->bkgand", of_block, v)
        return out.permute(0, 3, 4, 1, 2, 5).reshape(b * A * N, -1, q.shape[-1])

    def _sees(self, window: int) -> Tensor:
        """Which features each row sees: [b, 1, 1, A, N or 1, l] bool."""
        if window not in self._masks:
            place = torch.arange(self.keys.shape[2], device=self.anchors.device)
            sees = (place < self.anchors[..., None])[:, :, None]  # [b, A, 1, l]
            if window:
                sees = sees & (self.row_positions[..., None] - place < window)
            self._masks[window] = sees[:, None, None]
        return self._masks[window]


MANY_LAYERS = 24  # of a target from which five of them are tapped


class Drafted(NamedTuple):
    """n places of blocks that are followed by an answer token."""

    logits: Tensor  # [n, vocab_size] float32
    probs: Tensor  # [n, vocab_size] float32: the target's
    labels: Tensor  # [n] int64: the answer's tokens
    hidden: Tensor  # [n, hidden_size]: rows after the final norm
    sources: Tensor  # [n] int64: the tokens before


class TrainableBlockDrafter(TrainableHead):
    """Embedding and lm_head are the target's; mask rows have an embedding of their own.

    Shapes: b answers, A anchors in each, k drafts per block, N rows.
    """

    architecture: str  # in config.json
    module: BlockDraftModel
    optional = frozenset({"mask_embedding"})  # weights that not every drafter has

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        self.target, self.decay = target, settings.loss_decay
        self.max_anchors = settings.max_anchors
        taps = default_taps(target.config)
        self.config = block_draft_config(self.architecture, settings, taps, target.config)
        if target.logits_scale != 1.0:
            self.config["logit_scale"] = target.logits_scale
        parsed = parse_config(self.config)
        self.block = block_config(parsed)
        target.tap(self.block.taps)
        module = BlockDraftModel(parsed, stored=self.optional).float()
        initialize(module, settings.seed)
        embedding = target.parts.embedding.weight
        with torch.no_grad():  # ends in the target's norm, before the target's lm_head
            module.norm.weight.copy_(target.parts.norm.weight)
            assert module.mask_embedding is not None
            generator = torch.Generator().manual_seed(settings.seed)
            noise = torch.randn(parsed.hidden_size, generator=generator)
            module.mask_embedding.copy_(noise * embedding.float().std().cpu())
        self.module = module.to(embedding.device)

    @classmethod
    def problems(cls, settings: TrainSettings, target: ModelConfig) -> list[str]:
        head_dim = head_attention(target).head_dim
        if head_dim % 2:
            return [f"--algorithm {settings.algorithm}: heads of {head_dim} channels do not rotate"]
        return []

    # ── the pass ──

    def rows(self, answers: PaddedAnswers, features: Tensor) -> Tensor:
        """The drafting rows of all blocks, after the final norm: features [b, l, W] of the target
        -> [b, A, k, hidden_size]."""
        model, anchors = self.module, answers.blocks.anchors
        b, length = answers.tokens.shape
        k, N = len(answers.drafts), self.block.num_rows(len(answers.drafts))
        taps = features[..., self.target.config.hidden_size :].flatten(0, 1)
        context = model.context(taps.to(model.fc.weight.dtype))
        places = torch.arange(length, device=anchors.device).repeat(b)
        keys, values = (x.unflatten(1, (b, length)) for x in model.context_kv(context, places))
        ctx = BlockTrainingContext(anchors, N, keys, values)
        tokens = anchors.new_full((*anchors.shape, N), self.block.mask_token)
        tokens[..., 0] = answers.tokens.gather(1, anchors.clamp(min=0))
        embedded = model.embed(tokens.flatten(0, 1), self.target.parts.embedding)
        hidden = model(embedded.to(context.dtype), ctx)
        return hidden.view(*anchors.shape, N, -1)[:, :, N - k :]

    def loss(self, answers: PaddedAnswers, target: TargetOutputs, num_drafts: list[int]) -> Tensor:
        """The mean over all places, those further from the anchor weighing less: in place j from 0
        on, ``exp(-j / decay)``."""
        blocks, tokens = answers.blocks, answers.tokens.flatten()
        hidden = self.rows(answers, target.features)
        chosen = hidden.flatten(0, 2)[blocks.flat]
        logits = self.module.logits(chosen, self.target.lm_head).float()
        sources = tokens[blocks.sources]
        drafted = Drafted(
            logits=self.biased(logits, hidden, answers),
            probs=target.probs[blocks.among_roots],
            labels=tokens[blocks.sources + 1],
            hidden=chosen,
            sources=sources,
        )
        weights = torch.exp(-(blocks.flat % hidden.shape[2]) / self.decay)
        return (weights * self.place_loss(drafted)).sum() / max(sum(num_drafts), 1)

    @abstractmethod
    def place_loss(self, drafted: Drafted) -> Tensor:
        """[n], before weights."""

    def biased(self, logits: Tensor, hidden: Tensor, answers: PaddedAnswers) -> Tensor:
        """Logits [n, vocab_size] of the places in ``answers.blocks``, given the answer's own tokens
        before them; hidden [b, A, k, hidden_size]."""
        return logits

    # ── drafting ──

    def greedy_drafts(
        self, answers: PaddedAnswers, target: TargetOutputs, depth: int
    ) -> Iterator[Tensor]:
        blocks = answers.blocks
        hidden = self.rows(answers, target.features).flatten(0, 1)  # [b * A, k, hidden_size]
        anchors = answers.tokens.gather(1, blocks.anchors.clamp(min=0)).flatten()
        drafts = self.chains(hidden, anchors).flatten()
        for j in range(depth):
            yield drafts[blocks.flat[blocks.flat % depth == j]]

    def chains(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        """The most likely token of each row, given those drafted before it: hidden
        [m, k, hidden_size], tokens of the anchors [m] -> [m, k] int64."""
        return self.module.logits(hidden, self.target.lm_head).argmax(-1)


def default_taps(target: ModelConfig) -> list[int]:
    """Layers whose outputs are read: from the second to the last, at equal distances; three, or
    five of a deep target."""
    layers = len(target.blocks)
    count = min(5 if layers >= MANY_LAYERS else 3, layers)
    first = min(1, layers - 1)
    steps = max(count - 1, 1)
    return sorted({first + round(i * (layers - 1 - first) / steps) for i in range(count)})


class TrainableDflash(TrainableBlockDrafter):
    """Learns the target's distribution: cross entropy, which is the divergence that published
    drafters are trained with, up to a constant."""

    architecture = "DFlashDraftModel"

    def place_loss(self, drafted: Drafted) -> Tensor:
        return -(drafted.probs * drafted.logits.log_softmax(-1)).sum(-1)
