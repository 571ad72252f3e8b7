"""What all families share: embedding, layers, norm, lm_head, and the places of stored tensors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block import run_layers, run_with_late_sums
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import ModelConfig, Span
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard


@dataclass(frozen=True)
class Target:
    """Where a checkpoint's tensor goes: into a parameter, into one slice of a stacked one, or into
    half of such a slice."""

    name: str
    index: int | None = None
    scale: float | Tensor = 1.0  # factor, applied in float32
    shift: float = 0.0  # added after that: norms are often stored as what they differ from 1 by
    half: int | None = None  # of the slice's rows: 0 or 1


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def gated_expert_place(name: str) -> Target | None:
    """Where a tensor goes, if it is that of an expert, which are published one by one; ours are
    stacked, and gate and up projection are one matrix."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    stem, index, half = found[1], int(found[2]), HALVES.get(found[3])
    if half is None:
        return Target(f"{stem}.down_proj", index)
    return Target(f"{stem}.up_proj", index, half=half)


class Elsewhere(Layer):
    """Takes the place of a module that another pipeline stage has."""


def numbered(layers: Sequence[nn.Module], first: int) -> nn.Module:
    """The layers from number ``first`` on, under the names that they have in the whole model."""
    if first == 0:
        return nn.ModuleList(layers)
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers, first)})


class Parts(NamedTuple):
    """A model's modules, independent of the names they have in checkpoints; of a pipeline stage,
    its own ones."""

    embedding: Any  # an Embedding, or Elsewhere
    layers: tuple[nn.Module, ...]
    norm: Any  # an RMSNorm, or Elsewhere


class Handed(NamedTuple):
    """What a pipeline stage hands to the next one, side by side in one tensor."""

    hidden: Tensor  # [n, hidden_size]
    embedded: Tensor  # [n, hidden_size], or [n, 0] where layers do not read it
    tapped: Tensor  # [n, hidden_size * taps of earlier stages]


class Names(NamedTuple):
    """What a family calls its modules: ``model.embed_tokens.weight``, ``model.layers.0…``,
    ``model.norm.weight`` with these defaults."""

    backbone: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"


class CausalLM(Layer):
    """A decoder with a language-model head; parameters have the names that the family publishes.

    A family gives ``layer_class`` or its layers, ``names``, and what differs in its checkpoints:
    ``renamed``, ``skipped``, ``place``. It may set ``embedding_scale`` and ``logits_scale``, and
    ``late_sums`` if its layers' ``forward`` is that of ``ResidualLayer``, with steps of a norm and
    a body alone, or override ``run_layers``.

    If ``config.stage`` says so it has only some layers, and hands what they make to the next stage.
    """

    names = Names()
    layer_class: ClassVar[type[Any]]  # made of the config and the layer's index among all
    renamed: ClassVar[Mapping[str, str]] = {}  # parts of published names -> ours, in this order
    skipped: ClassVar[tuple[str, ...]] = ()  # what names of tensors that are not needed begin with
    late_sums: ClassVar[bool] = False
    reads_embeddings: ClassVar[bool] = False  # whether layers after the first one do

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module] | None = None) -> None:
        """layers: all of the model's, each with its place in this stage's pools; None: all are of
        ``layer_class``."""
        super().__init__()
        if layers is None:
            layers = [self.layer_class(config, i) for i in range(len(config.blocks))]
        self.config, self.held = config, config.held_layers
        layers = layers[self.held.begin : self.held.end]
        is_last = config.is_last_stage
        embeds = config.stage is None or config.stage.embeds
        embedding = Embedding(config.vocab_size, config.hidden_size) if embeds else Elsewhere()
        norm = RMSNorm(config.hidden_size, config.norm_eps) if is_last else Elsewhere()
        self.parts = Parts(embedding, tuple(layers), norm)
        # registered in this order: dummy weights are drawn parameter by parameter
        backbone = Layer()
        backbone.add_module(self.names.embedding, embedding)
        backbone.add_module("layers", numbered(layers, self.held.begin))
        backbone.add_module(self.names.norm, norm)
        self.add_module(self.names.backbone, backbone)
        self.head_tokens = Span(0, 0)
        if is_last:
            self.head_tokens = config.head_tokens or Span(0, config.vocab_size)
            self.lm_head = Linear(config.hidden_size, self.head_tokens.size)
        self.dtype = torch.get_default_dtype()  # of hidden states
        if config.tie_word_embeddings and is_last:
            self.lm_head.weight = self.parts.embedding.weight
        rope = config.attention.rope if config.attention else None
        self.rotary = Rotary(rope) if rope else None
        self.embedding_scale = 1.0
        self.logits_scale = 1.0
        self.tap_layers: tuple[int, ...] = ()

    def embed(self, input_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        embedded = self.parts.embedding(input_ids)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on ``forward`` also returns the input of these layers; the number of layers
        stands for the input of the final norm. layers: ascending, of the whole model."""
        self.tap_layers = layers

    @property
    def feature_size(self) -> int:
        """Columns of what ``forward`` returns."""
        if not self.config.is_last_stage:
            return 0
        return self.config.hidden_size * (1 + len(self.tap_layers))

    @property
    def handed_size(self) -> int:
        """Columns of what a stage hands to the next one, at most."""
        return self.config.hidden_size * (1 + self.reads_embeddings + len(self.tap_layers))

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """input_ids [n] int64 -> features [n, feature_size]: hidden states after the final norm,
        then the tapped ones in the order of the layers. A stage before the last one hands on what
        it has made, and returns no columns."""
        hidden, embedded, before = self._begin(input_ids)
        if self.rotary is not None:
            ctx.rotation = self.rotary(ctx.positions, hidden.device)
        tapped = [before] if before.shape[1] else []
        first, end = self.held
        begin = first
        for tap in self.tap_layers:
            if first <= tap < end or tap == end == len(self.config.blocks):
                layers = self.parts.layers[begin - first : tap - first]
                hidden = self.run_layers(layers, hidden, embedded, ctx)
                tapped.append(hidden.clone())  # layers may write over their input
                begin = tap
        hidden = self.run_layers(self.parts.layers[begin - first :], hidden, embedded, ctx)
        if not self.config.is_last_stage:
            words = [embedded] if self.reads_embeddings else []
            self._ops.stages.hand_on(torch.cat([hidden, *words, *tapped], dim=-1))
            return hidden[:, :0]
        normed = self.parts.norm(hidden)
        return torch.cat([normed, *tapped], dim=-1) if tapped else normed

    def _begin(self, input_ids: Tensor) -> Handed:
        """What the first of this stage's layers reads."""
        size = self.config.hidden_size
        if self.config.is_first_stage:
            embedded = self.embed(input_ids)
            return Handed(embedded, embedded, embedded[:, :0])
        words = size if self.reads_embeddings else 0
        taps = sum(tap < self.held.begin for tap in self.tap_layers) * size
        columns = [size, words, taps]
        rows = len(input_ids)
        room = torch.empty(rows, sum(columns), dtype=self.dtype, device=input_ids.device)
        arrived = self._ops.stages.take(room)
        return Handed(*(part.contiguous() for part in arrived.split(columns, dim=1)))

    def run_layers(
        self, layers: Sequence[nn.Module], hidden: Tensor, embedded: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Some layers in a row, none if ``layers`` is empty.

        Args:
            hidden: [n, hidden_size], the input of the first one; may be overwritten.
            embedded: [n, hidden_size], the embeddings, for families whose layers read them too.
        """
        run = run_with_late_sums if self.late_sums else run_layers
        return run(layers, hidden, ctx)

    def head_cuts(self, shard: Shard) -> dict[str, Cut]:
        if self.config.tie_word_embeddings:
            return {}  # lm_head is a part of the embedding, which is copied
        return {"lm_head.weight": rows(shard.span(self.config.vocab_size))}

    def prepare(self, ops: LayerOps) -> None:
        super().prepare(ops)
        if not self.config.is_last_stage:
            return
        if self.config.tie_word_embeddings and self.config.head_tokens is not None:
            begin, end = self.head_tokens  # a view: the embedding is there as a whole
            own = self.parts.embedding.weight.detach()[begin:end]
            self.lm_head.weight = nn.Parameter(own, requires_grad=False)
            if self.lm_head.matrix is not None:
                rounded = self.lm_head.matrix.narrow(-2, begin, end - begin)
                self.lm_head.matrices["weight"] = rounded

    def connect(self) -> None:
        """A tied embedding reads its rows where lm_head holds all of them."""
        if not self.config.is_last_stage or not self.config.tie_word_embeddings:
            return
        packed = self.lm_head.packed
        if packed is not None and packed.outputs == self.config.vocab_size:
            self.parts.embedding.read_from(packed)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size or feature_size] -> [n, vocab_size], float32; of a model that is split
        only the logits of ``head_tokens``, of which a pipeline stage before the last one has
        none."""
        return self.step_logits(hidden).float()

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of ``step_logits``: lm_head's own, but float32 where logits are scaled."""
        return self.dtype if self.logits_scale == 1.0 else torch.float32

    def step_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``compute_logits`` in ``logits_dtype``, in which they are the same numbers: on a GPU,
        converting those of a step takes longer than to choose from them. Written to ``out``, of
        that dtype, if it is given."""
        dtype, scale = self.logits_dtype, self.logits_scale
        if not self.config.is_last_stage:
            return hidden.new_empty(len(hidden), 0, dtype=dtype) if out is None else out
        hidden = hidden[..., : self.config.hidden_size]
        if scale == 1.0:
            return self.lm_head(hidden) if out is None else self.lm_head.into(out, hidden)
        logits = self.lm_head(hidden)
        logits = logits.float() if out is None else out.copy_(logits)
        return torch.mul(logits, scale, out=out)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same for drafters: [n, hidden_size or feature_size] -> [n, tokens of this rank]."""
        if self.logits_scale != 1.0:
            return self.compute_logits(hidden)
        return self.lm_head(hidden[..., : self.config.hidden_size])

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor of this name goes; None if it is not needed."""
        if name.startswith(self.skipped):
            return None
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return None
        if name.endswith("rotary_emb.inv_freq"):  # in older checkpoints; config.json implies it
            return None
        for published, ours in self.renamed.items():
            name = name.replace(published, ours)
        return self.place(name) or Target(name)

    @staticmethod
    def place(name: str) -> Target | None:
        """Where a tensor goes that is not a parameter as it is, such as one of stacked experts.
        name: ours."""
        return None
