"""A model's sizes and options, under the names that the layers use. Plain data; models/registry.py
reads it from a checkpoint's config.json."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

HYBRID = ("recurrent", "attention")  # the mixers of a hybrid layer


class UnsupportedModel(ValueError):
    """The checkpoint needs something that is not implemented; the text says what."""


class Span(NamedTuple):
    """The numbers from ``begin`` up to but not including ``end``."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class StagePart(NamedTuple):
    """What one of several pipeline stages has of a model."""

    layers: Span
    embeds: bool  # whether it has the embedding


class NormGroups(NamedTuple):
    """The groups of a Mamba2 layer's norm, where some lie on several ranks."""

    num_groups: int  # of all ranks
    group_size: int  # channels
    first_channel: int  # of this rank


class Width(NamedTuple):
    """Numbers of a token that belong to heads or groups: ``size`` of each, one after the other."""

    size: int
    of_groups: bool = False


class RowPart(NamedTuple):
    """What a row holds of a token, beside its convolution's inputs and its gates."""

    width: int
    exact: bool  # in float32, whatever the model's dtype


class RecurrenceConfig(ABC):
    """The sizes of a recurrent layer, of any kind: what pools, rows and journals are made by.

    A token feeds ``conv_dim`` channels into a causal depthwise convolution, and beside them its
    *gates*, ``gate_size`` numbers in float32: dt of Mamba2, decay and beta of a delta rule.
    """

    name: ClassVar[str]  # of the kind, for messages
    conv_silu: ClassVar[bool] = True  # whether what the convolution makes passes a SiLU
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # of heads that share what they read and write the state by
    conv_kernel: int
    chunk_size: int  # of the scan over whole sequences

    @property
    @abstractmethod
    def channel_widths(self) -> tuple[Width, ...]:
        """What the convolution's channels belong to, in their order."""

    @property
    @abstractmethod
    def gate_widths(self) -> tuple[Width, ...]:
        """The same for the gates."""

    @cached_property
    def conv_dim(self) -> int:
        """Channels of the convolution."""
        return self._sum(self.channel_widths)

    @cached_property
    def gate_size(self) -> int:
        return self._sum(self.gate_widths)

    def _sum(self, widths: tuple[Width, ...]) -> int:
        return sum(w.size * (self.num_groups if w.of_groups else self.num_heads) for w in widths)

    @property
    def inner_size(self) -> int:
        """Channels that a token reads from the state, of all heads: the width of x or of values."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, and what each head's state has; zeros for a layer that has rows alone."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    @abstractmethod
    def row_parts(self) -> tuple[RowPart, ...]:
        """What a fold needs of a token beside its gates."""


@dataclass(frozen=True)
class Mamba2Config(RecurrenceConfig):
    name = "Mamba2"

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    time_step_limit: tuple[float, float]
    chunk_size: int
    in_bias: bool = False
    out_bias: bool = False
    norm: str = "gate_first"  # or norm_first, or gate_only: y * silu(gate) without a norm
    norm_groups: NormGroups | None = None  # None: the layer's own groups

    @property
    def channel_widths(self) -> tuple[Width, ...]:
        """x, B and C."""
        return Width(self.head_dim), Width(self.state_size, True), Width(self.state_size, True)

    @property
    def gate_widths(self) -> tuple[Width, ...]:
        return (Width(1),)

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """x and B after the convolution, and L, the sum of dt·A from the state to the row."""
        xB = self.inner_size + self.num_groups * self.state_size
        return RowPart(xB, False), RowPart(self.num_heads, True)


@dataclass(frozen=True)
class DeltaConfig(RecurrenceConfig):
    """A gated delta rule: H heads with a state of P values by N keys each, G heads of queries and
    keys, which neighbouring heads share."""

    name = "delta-rule"

    num_heads: int
    head_dim: int  # P
    state_size: int  # N
    num_groups: int
    conv_kernel: int
    channel_decay: bool = False  # a decay for each of the N, not one per head (Kimi)
    # of these: two matrices make it, and the gate, with P channels between them
    narrow_decay: bool = False
    lowest_decay: float = 0.0  # of these: bound of a token's log decay; 0: none
    max_beta: float = 1.0  # beta is a sigmoid times this
    chunk_size: int = 64

    @property
    def key_size(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_groups * self.state_size

    @property
    def channel_widths(self) -> tuple[Width, ...]:
        """Queries, keys and values."""
        return Width(self.state_size, True), Width(self.state_size, True), Width(self.head_dim)

    @property
    def decay_size(self) -> int:
        """Numbers of log decay, g."""
        return self.num_heads * (self.state_size if self.channel_decay else 1)

    @property
    def gate_widths(self) -> tuple[Width, ...]:
        """g, then beta."""
        return Width(self.decay_size // self.num_heads), Width(1)

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Keys as they come out of the convolution, and u, what the token has written along them:
        its error enters the state."""
        return RowPart(self.key_size, False), RowPart(self.inner_size, True)


@dataclass(frozen=True)
class ShortConvConfig(RecurrenceConfig):
    """A gated convolution over few tokens: rows are its inputs, and there is no state."""

    name = "short-convolution"
    conv_silu = False
    head_dim = 1  # each channel is by itself

    channels: int
    conv_kernel: int
    bias: bool
    chunk_size: int = 1  # of no effect

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return self.channels

    @property
    def num_groups(self) -> int:  # type: ignore[override]
        return self.channels

    @property
    def channel_widths(self) -> tuple[Width, ...]:
        return (Width(1),)

    @property
    def gate_widths(self) -> tuple[Width, ...]:
        return ()

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return ()


@dataclass(frozen=True)
class LinearScaling:
    """All positions are divided by ``factor`` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Channels that complete fewer than ``low_turns`` turns within the trained context are slowed
    down by ``factor``, those with more than ``high_turns`` are left alone, and those in between
    are interpolated by their number of turns (arXiv 2407.21783)."""

    factor: float
    low_turns: float
    high_turns: float
    trained_length: int


@dataclass(frozen=True)
class YarnScaling:
    """Like ``Llama3Scaling``, but interpolated by channel number, and with cosines and sines
    multiplied by ``magnitude`` (YaRN: arXiv 2309.00071)."""

    factor: float
    low_turns: float
    high_turns: float
    trained_length: int
    magnitude: float
    whole_channels: bool  # interpolation begins and ends at whole channel numbers


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding of the first ``dim`` channels of a head."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


class WholeNorm(NamedTuple):
    """An RMS norm over the heads of all ranks, of which several may have the same one."""

    heads: int  # different ones, of all ranks
    copies: tuple[int, ...]  # how many ranks have each of this rank's


class LatentConfig(NamedTuple):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    rank: int  # of what keys and values are made from
    key_size: int  # of a head's keys, beside the rotated part that all heads share
    value_size: int
    gated: bool = False  # the sigmoid of one number per head multiplies what it gives


@dataclass(frozen=True)
class AttentionConfig:
    """With ``latent``, of what is stored and compared: one key head of ``rank`` channels and the
    rotated part, which is also what values are made from."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    scale: float = 0.0  # factor of the scores; 0: head_dim ** -0.5
    rope: RopeConfig | None = None  # None: no position encoding
    head_norm: bool = False  # an RMS norm of each head's query and key (Qwen3)
    # one over all heads' queries, one over all keys (Olmo)
    whole_norms: tuple[WholeNorm, WholeNorm] | None = None
    latent: LatentConfig | None = None

    @property
    def kv_size(self) -> int:
        """Numbers in the KV slot of one layer."""
        return (2 if self.latent is None else 1) * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of the expert that every token passes; 0: none
    latent_size: int = 0  # width of the routed experts' inputs and outputs; 0: hidden_size
    num_groups: int = 1  # groups of experts; a token's experts come from the best top_groups
    top_groups: int = 1
    normalize: bool = True  # make the chosen scores sum to 1
    scaling: float = 1.0  # factor of the routed experts' sum


@dataclass(frozen=True)
class ModelConfig:
    """One decoder model. ``blocks`` names the mixer of each layer: recurrent, attention, mlp, moe,
    or hybrid for attention beside a recurrence. What only one family has is read from ``raw``, the
    config.json itself."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[str, ...]
    norm_eps: float
    recurrence: RecurrenceConfig | None
    attention: AttentionConfig | None
    intermediate_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "float32"
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    # neighbouring channels that share a scale in the checkpoint: the same model may have others
    scale_group: int = field(default=1, compare=False)
    head_tokens: Span | None = None  # the rows of lm_head of this rank; None: all
    stage: StagePart | None = None  # None: all layers. blocks are the whole model's in any case
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def held_layers(self) -> Span:
        """The layers of this pipeline stage."""
        return Span(0, len(self.blocks)) if self.stage is None else self.stage.layers

    @property
    def is_first_stage(self) -> bool:
        """Whether tokens are embedded here."""
        return self.held_layers.begin == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether final norm and lm_head are here."""
        return self.held_layers.end == len(self.blocks)

    @property
    def num_recurrent_layers(self) -> int:
        """Of this stage, as all that pools are made for."""
        return self.places_before(self.held_layers.end, "recurrent")

    @property
    def num_attention_layers(self) -> int:
        return self.places_before(self.held_layers.end, "attention")

    def places_before(self, layer: int, kind: str) -> int:
        """How many of this stage's layers before ``layer`` have a mixer of this kind, which is
        recurrent, attention, mlp or moe: the place of that layer in the stage's pool."""
        before = self.blocks[self.held_layers.begin : layer]
        return before.count(kind) + (before.count("hybrid") if kind in HYBRID else 0)
