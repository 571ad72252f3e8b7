"""Which layers each pipeline stage holds. Plain data and arithmetic.

Docs: docs/design/parallel.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from mamba_eagle.model_config import ModelConfig, Span, StagePart

RECURRENT = ("recurrent", "hybrid")


class Weights(NamedTuple):
    """Bytes that a stage holds."""

    layers: Sequence[int]  # of each layer, with its states
    first: int = 0  # of the first stage beside its layers: the embedding
    last: int = 0  # of the last one: lm_head, drafter, copies of the embedding


def given_problems(config: ModelConfig, counts: Sequence[int]) -> list[str]:
    """What is wrong with numbers of layers that a user gives; [] if nothing is."""
    shown = ",".join(map(str, counts))
    if sum(counts) != len(config.blocks):
        return [
            f"--pp-layers {shown}: {sum(counts)} layers, the model has {len(config.blocks)}; "
            "give numbers that add up to these"
        ]
    return [
        f"--pp-layers {shown}: stage {number} would have no recurrent layer, and each needs one"
        for number, span in enumerate(spans_of(counts))
        if not _is_whole(config.blocks, span)
    ]


def size_problems(config: ModelConfig, stages: int) -> list[str]:
    """Why a model cannot be split over this many stages; [] if it can."""
    most = sum(kind in RECURRENT for kind in config.blocks) or len(config.blocks)
    if stages <= most:
        return []
    is_hybrid = most < len(config.blocks) or config.recurrence
    kind = "recurrent layers" if is_hybrid else "layers"
    return [f"--pp-size {stages}: the model has {most} {kind}; set it to {most}"]


def spans_of(counts: Sequence[int]) -> list[Span]:
    """Layers by stage, from their numbers."""
    borders = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return [Span(begin, end) for begin, end in zip(borders, borders[1:])]


def balanced(config: ModelConfig, weights: Weights, stages: int) -> list[Span]:
    """Layers by stage such that the stages' bytes are as equal as they can be: the sum of their
    squares is the smallest. Each stage has a layer, and a Mamba2 layer if the model has one at all:
    states and journals count on all of them."""
    total = len(config.blocks)
    until = [0, *accumulate(weights.layers)]  # bytes of the layers before each

    @cache
    def best(stage: int, begin: int) -> tuple[int, tuple[Span, ...]] | None:
        """Of the stages from this one on, which hold the layers from ``begin`` on."""
        found: tuple[int, tuple[Span, ...]] | None = None
        is_last = stage + 1 == stages
        for end in range(total if is_last else begin + 1, total + 1):
            span = Span(begin, end)
            if not _is_whole(config.blocks, span):
                continue
            size = until[end] - until[begin]
            size += weights.first if stage == 0 else 0
            size += weights.last if is_last else 0
            rest = (0, ()) if is_last else best(stage + 1, end)
            if rest is not None and (found is None or size**2 + rest[0] < found[0]):
                found = (size**2 + rest[0], (span, *rest[1]))
        return found

    chosen = best(0, 0)
    assert chosen is not None, "size_problems comes first"
    return list(chosen[1])


def _is_whole(blocks: Sequence[str], span: Span) -> bool:
    """Whether these layers can be a stage."""
    own, needed = blocks[span.begin : span.end], any(kind in RECURRENT for kind in blocks)
    return any(kind in RECURRENT for kind in own) if needed else bool(own)


def staged(config: ModelConfig, span: Span, drafts: bool) -> ModelConfig:
    """The config of the model of a stage. drafts: whether the drafter reads the embedding, which
    the last stage then has too, as it does if lm_head is tied to it."""
    if span.size == len(config.blocks):
        return config
    is_last = span.end == len(config.blocks)
    copied = is_last and (drafts or config.tie_word_embeddings)
    return replace(config, stage=StagePart(span, span.begin == 0 or copied))
