"""config.json of block drafters, in the layouts of z-lab, NVIDIA, DeepSpec and speculators."""

from dataclasses import dataclass
from typing import Any

from mamba_eagle.model_config import ModelConfig, Span, UnsupportedModel
from mamba_eagle.models.parse import attention_config, model_config, only

MARKOV_KINDS = ("vanilla", "gated", "rnn")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
ALWAYS_FULL = 28  # layers before which Qwen3's use_sliding_window changes nothing by default


@dataclass(frozen=True)
class BlockConfig:
    """What a block drafter has beyond the sizes of its layers."""

    rows: int  # of a block at most, the anchor included
    mask_token: int
    taps: tuple[int, ...]  # layers of the target whose inputs are read, as CausalLM.tap takes them
    target_hidden_size: int
    sample_from_anchor: bool  # row i predicts the next token rather than the one at its place
    windows: tuple[int, ...]  # by layer: how far a row sees, its own position included; 0: all
    causal: tuple[bool, ...]  # by layer: whether a row sees no later row
    sinks: bool
    draft_vocab_size: int
    embedding_scale: float
    logit_scale: float
    markov_rank: int  # 0: no Markov head
    markov_kind: str
    confidence: bool | None  # whether there is a confidence head; None: config.json does not say
    confidence_reads_markov: bool  # its inputs include the embedding of the token before
    draft_topk: int  # how many tokens of each row the Markov head may choose among; 0: all

    @property
    def max_drafts(self) -> int:
        """Tokens that one pass can draft in a row."""
        return self.rows if self.sample_from_anchor else self.rows - 1

    def num_rows(self, drafts: int) -> int:
        """Rows of a pass that drafts this many tokens in a row. Where rows see later ones, as many
        as the drafter was trained with."""
        if not all(self.causal):
            return self.rows
        return drafts if self.sample_from_anchor else drafts + 1

    def own_weights(self, config: ModelConfig) -> set[str]:
        """The optional weights that config.json asks for."""
        names = set()
        if config.raw.get("has_embed_tokens"):
            names.add("embed_tokens.weight")
        if self.confidence:
            names.add("confidence_head.proj.weight")
        return names


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """``vocab_size`` is the target's.

    Raises: UnsupportedModel naming what differs from the published layouts.
    """
    layer = values.get("transformer_layer_config") or {}
    values = {**layer, **values}
    only(values, hidden_act="silu", is_neox_style=True)
    only(
        values.get("dflash_config") or {},
        use_aux_hidden_state=True,
        projector_type="dspark" if is_dspark(values) else "dflash",
    )
    # Drafters rotate whole heads, whatever their target does (vllm-project/speculators#613).
    rope_values = {name: value for name, value in values.items() if name != "partial_rotary_factor"}
    if given := values.get("rope_parameters"):
        rope_values["rope_parameters"] = {**given, "partial_rotary_factor": None}
    config = model_config(
        values,
        ("attention",) * values["num_hidden_layers"],
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention=attention_config(rope_values, rotated=1.0, head_norm=True),
    )
    block_config(config)
    return config


def is_dspark(values: dict[str, Any]) -> bool:
    return (values.get("architectures") or ["?"])[0] in DSPARK


def block_config(config: ModelConfig) -> BlockConfig:
    """Raises: UnsupportedModel, KeyError naming what config.json lacks."""
    values = config.raw
    values = {**(values.get("transformer_layer_config") or {}), **values}
    own = values.get("dflash_config") or {}
    both = {**values, **own}
    kind = both.get("markov_head_type") or "vanilla"
    if kind not in MARKOV_KINDS:
        raise UnsupportedModel(
            f"markov_head_type {kind!r:.200} is not supported; known: {', '.join(MARKOV_KINDS)}"
        )
    windows = _windows(both, len(config.blocks))
    rows, token = _whole(both, "block_size", 1), _whole(both, "mask_token_id", 0)
    if token >= config.vocab_size:
        raise UnsupportedModel(
            f"mask_token_id {token}: must be a token of the vocabulary of {config.vocab_size}"
        )
    return BlockConfig(
        rows=rows,
        mask_token=token,
        taps=_taps(both),
        target_hidden_size=both.get("target_hidden_size") or config.hidden_size,
        sample_from_anchor=_samples_from_anchor(values, own),
        windows=windows,
        causal=_causal(values, own, windows),
        sinks=bool(both.get("attention_sink_bias", False)),
        draft_vocab_size=both.get("draft_vocab_size") or config.vocab_size,
        embedding_scale=float(both.get("input_embedding_scale") or 1.0),
        logit_scale=float(both.get("logit_scale") or 1.0),
        markov_rank=_markov_rank(both),
        markov_kind=kind,
        confidence=both.get("enable_confidence_head"),
        confidence_reads_markov=bool(both.get("confidence_head_with_markov", True)),
        draft_topk=int(both.get("dspark_draft_topk") or 0),
    )


def held_tokens(config: ModelConfig) -> Span:
    """The tokens of its vocabulary that a rank has the logits of."""
    return config.head_tokens or Span(0, block_config(config).draft_vocab_size)


def _whole(values: dict[str, Any], name: str, least: int) -> int:
    value = values[name]
    if type(value) is not int or value < least:
        raise UnsupportedModel(f"{name} {value!r:.200}: must be a whole number from {least} on")
    return value


def _taps(values: dict[str, Any]) -> tuple[int, ...]:
    """``target_layer_ids`` counts outputs of layers from 0; the other two names count inputs, as
    ``CausalLM.tap`` does (vLLM's ``update_dflash``)."""
    for name, shift in (
        ("target_layer_ids", 1),
        ("layer_ids", 1),
        ("aux_hidden_state_layer_ids", 0),
        ("eagle_aux_hidden_state_layer_ids", 0),
    ):
        if not (ids := values.get(name)):
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UnsupportedModel(f"{name} {ids!r:.200}: must be a list of layer numbers")
        return tuple(i + shift for i in ids)
    raise KeyError("target_layer_ids")


def _samples_from_anchor(values: dict[str, Any], own: dict[str, Any]) -> bool:
    """False for DFlash and True for DSpark, if nothing says otherwise."""
    if values.get("dspark_bonus_anchor") is not None:
        return not values["dspark_bonus_anchor"]
    for place in (own, values):
        if place.get("sample_from_anchor") is not None:
            return bool(place["sample_from_anchor"])
    return is_dspark(values)


def _windows(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    size = values.get("swa_window_size") or values.get("sliding_window") or 0
    kinds = values.get("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers; there are {layers}")
    if kinds is None:
        slides = bool(values.get("use_swa"))
        first = 0
        if not slides and values.get("use_sliding_window"):
            slides, first = True, values.get("max_window_layers", ALWAYS_FULL)
        sliding = [slides and i >= first for i in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and (type(size) is not int or size < 1):
        raise UnsupportedModel(
            f"sliding_window {size!r:.200}: must be a whole number from 1 on, as "
            f"{sum(sliding)} layers use it"
        )
    return tuple(size if slides else 0 for slides in sliding)


def _causal(
    values: dict[str, Any], own: dict[str, Any], windows: tuple[int, ...]
) -> tuple[bool, ...]:
    """As vLLM resolves it; speculators say it of layers with a window alone."""
    for place, name in ((values, "is_causal"), (own, "causal")):
        if place.get(name) is not None:
            return (bool(place[name]),) * len(windows)
    if "transformer_layer_config" in values:
        slides = not values.get("sliding_window_non_causal", True)
        return tuple(bool(window) and slides for window in windows)
    return tuple(bool(window) for window in windows)


def _markov_rank(values: dict[str, Any]) -> int:
    rank = values.get("markov_rank", values.get("dspark_markov_rank"))
    if rank is None:
        rank = 256 if is_dspark(values) else 0
    if type(rank) is not int or rank < 0 or (rank == 0 and is_dspark(values)):
        raise UnsupportedModel(f"markov_rank {rank!r:.200}: must be a whole number from 1 on")
    return rank
