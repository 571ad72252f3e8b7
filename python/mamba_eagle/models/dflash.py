"""Block drafters: DFlash (arXiv 2602.06036), and DSpark (arXiv 2607.05147) with a Markov head.

A few attention layers draft a whole block in one pass. Names and shapes are those of the published
checkpoints, which vLLM (``qwen3_dflash.py``, ``qwen3_dspark.py``), SGLang and z-lab/dflash read.
dflash_config.py reads their config.json.
"""

from collections.abc import Callable, Container

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block import PreNormLayer, until_last_sum
from mamba_eagle.layers.block_attention import BlockAttention
from mamba_eagle.layers.context import ForwardContext, Rotation
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import Target
from mamba_eagle.models.dflash_config import block_config
from mamba_eagle.models.draft_vocabulary import DraftVocabularyModel
from mamba_eagle.models.markov import ConfidenceHead, MarkovHead

Head = Callable[[Tensor], Tensor]  # an lm_head

# of other tools: the target's own, what only training needs, and what config.json implies
NOT_NEEDED = ("verifier_norm.", "verifier_lm_head.", "t2d")
ENCODER_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class BlockLayer(PreNormLayer):
    """A layer of Qwen3."""

    def new_attention(self, config: ModelConfig, index: int) -> BlockAttention:
        block = block_config(config)
        assert config.attention is not None
        given = (config.attention, config.hidden_size, index, config.norm_eps)
        return BlockAttention(*given, block.windows[index], block.causal[index], block.sinks)


class BlockDraftModel(DraftVocabularyModel):
    """The rows of a block are its anchor, the last known token, and mask tokens.

    A token of the context enters as keys and values only, which every layer computes from the same
    feature of the token (``context``). So these depend on no other token, and are written once.

    Row i stands at position P + i, where P is the anchor's. It predicts the token at its own
    position, or with ``sample_from_anchor`` the next one.
    """

    mask_embedding: nn.Parameter | None  # [hidden_size]: of mask rows, instead of their token's

    def __init__(self, config: ModelConfig, stored: Container[str] | None = None) -> None:
        """stored: names in the checkpoint, as returned by ``published_name``, which say what
        optional weights there are. None: those that config.json asks for, for a new drafter."""
        super().__init__()
        self.config, self.block = config, block_config(config)
        size, block = config.hidden_size, self.block
        stored = block.own_weights(config) if stored is None else stored
        self.fc = Linear(len(block.taps) * block.target_hidden_size, size)
        self.hidden_norm = RMSNorm(size, config.norm_eps)
        layers = [BlockLayer(config, i) for i in range(len(config.blocks))]
        self.layers = nn.ModuleList(layers)
        self._blocks = tuple(layers)
        self.norm = RMSNorm(size, config.norm_eps)
        foreign = size != block.target_hidden_size
        self.make_vocabulary(config, block.draft_vocab_size, foreign, stored)
        masked = "mask_embedding" in stored
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if masked else None
        self.markov_head = self.confidence_head = None
        if block.markov_rank:
            self.markov_head = MarkovHead(config)
            if "confidence_head.proj.weight" in stored:
                self.confidence_head = ConfidenceHead(config)
        assert config.attention is not None and config.attention.rope is not None
        self.rotary = Rotary(config.attention.rope)
        self._context: _StackedContext | None = None

    def prepare(self, ops: LayerOps) -> None:
        super().prepare(ops)
        self._context = _StackedContext([layer.parts.mixer for layer in self._blocks], ops)

    # ── the context ──

    def context(self, taps: Tensor) -> Tensor:
        """The feature of tokens that the target has processed, from its tapped hidden states:
        [n, taps * target_hidden_size] -> [n, hidden_size]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all L layers: context features [n, hidden_size] of tokens at
        ``positions`` [n] -> both [L, n, kv_heads, D]."""
        rotation = self.rotary(positions, context.device)
        if self._context is not None:
            return self._context(context, rotation)
        pairs = [layer.parts.mixer.context_kv(context, rotation) for layer in self._blocks]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    # ── the block ──

    def embed(self, tokens: Tensor, embedding: Embedding) -> Tensor:
        """The rows' inputs: tokens [b, N] int64, the anchor first -> [b * N, hidden_size].
        embedding: the target's, used if the drafter has none of its own."""
        own = self.embed_tokens if self.embed_tokens is not None else embedding
        embedded = own(tokens.reshape(-1))
        if self.block.embedding_scale != 1.0:
            embedded = embedded * self.block.embedding_scale
        if self.mask_embedding is None:
            return embedded
        is_mask = torch.arange(tokens.shape[1], device=tokens.device) > 0
        rows = torch.where(is_mask[:, None], self.mask_embedding, embedded.view(*tokens.shape, -1))
        return rows.flatten(0, 1)

    def forward(self, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """embedded [n, hidden_size], not used afterwards -> the rows after the final norm
        [n, hidden_size], which ``lm_head`` reads. ``ctx.attention`` gives each layer its context.
        """
        ctx.rotation = self.rotary(ctx.positions, embedded.device)
        normed, _ = self.norm.after(*until_last_sum(self._blocks, embedded, ctx))
        assert isinstance(normed, Tensor)
        return normed

    def logits(self, hidden: Tensor, lm_head: Head) -> Tensor:
        """Without the Markov head: hidden [n, hidden_size] -> [n, draft_vocab_size], of a rank
        those of its tokens. lm_head: the target's, used if the drafter has none of its own."""
        own = self.lm_head if self.lm_head is not None else lm_head
        logits = own(hidden)
        return logits if self.block.logit_scale == 1.0 else logits * self.block.logit_scale

    # ── the checkpoint ──

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor goes."""
        name = published_name(name)
        if name.startswith(NOT_NEEDED) or name.endswith("rotary_emb.inv_freq"):
            return None
        if name == "confidence_head.proj.weight" and self.confidence_head is None:
            return None
        return Target(name)


class _StackedContext:
    """``context_kv`` of all layers as one product, one norm and one rotation."""

    def __init__(self, layers: list[BlockAttention], ops: LayerOps) -> None:
        first, self.ops = layers[0], ops
        self.shape = (2, len(layers), first.config.num_kv_heads, first.config.head_dim)
        parts = [layer.k_proj for layer in layers] + [layer.v_proj for layer in layers]
        self.product = Linear.copied(parts)
        self.product.prepare(ops)
        self.norms = torch.stack([layer.k_norm.weight.detach() for layer in layers])  # [L, D]
        self.ones, self.eps = torch.ones_like(self.norms[0]), first.k_norm.eps

    def __call__(self, context: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """context [n, hidden_size] -> keys, values [L, n, kv_heads, D]."""
        both = self.product(context).unflatten(-1, self.shape)  # [n, 2, L, kv_heads, D]
        k, v = both[:, 0], both[:, 1]
        normed = self.ops.rms_norm(k.reshape(-1, k.shape[-1]), self.ones, self.eps).view(k.shape)
        heads = (normed * self.norms[:, None]).flatten(1, 2)  # [n, L * kv_heads, D]
        rotated = self.ops.rotate(heads, *rotation).view(k.shape)
        return rotated.transpose(0, 1), v.transpose(0, 1)


def published_name(name: str) -> str:
    """A weight's name as in z-lab's checkpoints; others put ``model.`` in front or name the context
    projection ``encoder``."""
    name = name.removeprefix("model.")
    for prefix, own in ENCODER_NAMES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
