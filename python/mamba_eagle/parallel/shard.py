"""Which part of a model a rank holds. Plain data and arithmetic; cut.py applies it to tensors.

A rank's model is a smaller model: ``local`` gives its config, and mixers, kernels and pools read
sizes from that alone. Docs: docs/design/parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from mamba_eagle.model_config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    ModelConfig,
    MoEConfig,
    NormGroups,
    RecurrenceConfig,
    ShortConvConfig,
    Span,
    WholeNorm,
    Width,
)

ALIGNED = 16  # channels that an uneven split of a matrix keeps together, where there are enough


class Shard(NamedTuple):
    """Rank ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1
    together: int = 1  # neighbouring channels of an MLP or an expert that are not divided

    def of(self, config: ModelConfig) -> Shard:
        """The same, with what the model's checkpoint keeps together."""
        return self._replace(together=config.scale_group)

    def span(self, count: int, unit: int = 1) -> Span:
        """This rank's part of ``count`` things; parts are equal, or differ by one ``unit``."""
        if count % self.size == 0 and (count // self.size) % unit == 0:
            unit = count // self.size or 1
        units = -(-count // unit)
        begin, end = (unit * (units * rank // self.size) for rank in (self.rank, self.rank + 1))
        return Span(begin, min(end, count))

    def width(self, count: int) -> Span:
        """This rank's part of the ``count`` channels between two matrices, of an MLP or of each
        expert. Parts are equal where that divides no group of channels that share a scale. Else
        they differ by a group: a matrix that is cut inside of one loses its few bits, and a rank
        that reads twice as many bytes is slower than one that reads a group more."""
        if count % (self.size * self.together) == 0:
            return self.span(count)
        unit = max(self.together, gcd(count, ALIGNED))
        while unit > 1 and count // unit < self.size:
            unit //= 2
        return self.span(count, unit)


class Heads(NamedTuple):
    """A rank's heads, and what groups of heads share: keys and values, or B and C.

    Each local group serves equally many of the rank's heads, so a group whose heads lie on several
    ranks is copied to all of them, and may be copied more than once to the same one.
    """

    heads: Span
    groups: tuple[int, ...]  # the whole model's group for each local one
    idle: bool = False  # more ranks than heads: what this one computes is not used

    def channels(self, width: int) -> Span:
        """The channels of the heads, ``width`` of each."""
        return Span(self.heads.begin * width, self.heads.end * width)

    def group_channels(self, width: int, first: int = 0) -> tuple[Span, ...]:
        """The channels of the groups, ``width`` of each; group 0 begins at channel ``first``."""
        return tuple(Span(first + g * width, first + (g + 1) * width) for g in self.groups)

    def spans(self, widths: Sequence[Width], config: RecurrenceConfig) -> tuple[Span, ...]:
        """Of numbers that belong to heads and groups of ``config``."""
        found: list[Span] = []
        first = 0
        for width, of_groups in widths:
            if of_groups:
                found += self.group_channels(width, first)
            else:
                begin, end = self.channels(width)
                found.append(Span(first + begin, first + end))
            first += width * (config.num_groups if of_groups else config.num_heads)
        return tuple(found)


def split_heads(shard: Shard, heads: int, groups: int) -> Heads:
    """This rank's part of ``heads`` heads in ``groups`` groups, for any numbers of them."""
    per_group = heads // groups
    span, idle = shard.span(heads), False
    if heads < shard.size:
        head = shard.rank % heads
        span, idle = Span(head, head + 1), shard.rank >= heads
    # heads per local group
    served = span.size if groups == 1 else gcd(span.begin, span.size, per_group)
    return Heads(span, tuple(h // per_group for h in range(span.begin, span.end, served)), idle)


def recurrent_heads(shard: Shard, config: RecurrenceConfig) -> Heads:
    return split_heads(shard, config.num_heads, config.num_groups)


def attention_heads(shard: Shard, config: AttentionConfig) -> Heads:
    return split_heads(shard, config.num_heads, config.num_kv_heads)


def problems(config: ModelConfig, size: int) -> list[str]:
    """Why a model cannot be split over ``size`` ranks; [] if it can."""
    wrong = []
    limits = {"tokens in the vocabulary": config.vocab_size}
    if config.recurrence is not None:
        limits[f"heads in a {config.recurrence.name} layer"] = config.recurrence.num_heads
    if config.moe is not None:
        limits["channels in an expert"] = config.moe.intermediate_size
        if config.moe.shared_intermediate_size:
            limits["channels in the shared experts"] = config.moe.shared_intermediate_size
    if config.intermediate_size:
        limits["channels in an MLP"] = config.intermediate_size
    for what, count in limits.items():
        if count < size:
            wrong.append(f"--tp-size {size}: the model has {count} {what}; set it to {count}")
    return wrong


def local(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of the model that a rank holds.

    The residual stream, the embedding and the vocabulary's size stay whole; ``head_tokens`` are the
    rank's rows of lm_head.
    """
    if shard.size == 1:
        return config
    shard = shard.of(config)
    return replace(
        config,
        recurrence=config.recurrence and _local_recurrence(config.recurrence, shard),
        attention=config.attention and _local_attention(config.attention, shard),
        moe=config.moe and _local_experts(config.moe, shard),
        intermediate_size=shard.width(config.intermediate_size).size,
        head_tokens=shard.span(config.vocab_size),
    )


def _local_recurrence(config: RecurrenceConfig, shard: Shard) -> RecurrenceConfig:
    own, per_group = recurrent_heads(shard, config), config.num_heads // config.num_groups
    if isinstance(config, DeltaConfig):
        return replace(config, num_heads=own.heads.size, num_groups=len(own.groups))
    if isinstance(config, ShortConvConfig):
        return replace(config, channels=own.heads.size)
    assert isinstance(config, Mamba2Config)
    norm = NormGroups(
        config.num_groups, per_group * config.head_dim, own.heads.begin * config.head_dim
    )
    return replace(
        config,
        num_heads=own.heads.size,
        num_groups=len(own.groups),
        norm_groups=None if _groups_are_whole(config, shard.size) else norm,
    )


def _groups_are_whole(config: Mamba2Config, size: int) -> bool:
    """Whether no group of heads lies on several ranks. All ranks give the same answer, even those
    whose own groups are whole: either all take part in a norm's sum or none."""
    per_group = config.num_heads // config.num_groups
    return all(Shard(r, size).span(config.num_heads).begin % per_group == 0 for r in range(size))


def _local_attention(config: AttentionConfig, shard: Shard) -> AttentionConfig:
    own = attention_heads(shard, config)
    norms = config.whole_norms
    if norms is not None:
        every = [attention_heads(Shard(rank, shard.size), config) for rank in range(shard.size)]
        heads = [head for each in every for head in range(*each.heads)]
        groups = [group for each in every for group in each.groups]
        norms = (
            WholeNorm(config.num_heads, tuple(map(heads.count, range(*own.heads)))),
            WholeNorm(config.num_kv_heads, tuple(map(groups.count, own.groups))),
        )
    return replace(
        config,
        num_heads=own.heads.size,
        num_kv_heads=len(own.groups),
        scale=config.scale or config.head_dim**-0.5,
        whole_norms=norms,
    )


def _local_experts(config: MoEConfig, shard: Shard) -> MoEConfig:
    widths = config.intermediate_size, config.shared_intermediate_size
    own, shared = (shard.width(width).size for width in widths)
    return replace(config, intermediate_size=own, shared_intermediate_size=shared)
