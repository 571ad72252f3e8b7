"""The EAGLE-3 draft head (arXiv 2503.01840), in the layout in which heads are published.

Names and shapes are those of SafeAILab/EAGLE (``eagle/model/cnets.py``), which SGLang and vLLM also
read (``llama_eagle3.py`` of each). vllm-project/speculators writes the same under other names.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models.base import Target
from mamba_eagle.models.draft_vocabulary import DraftVocabularyModel
from mamba_eagle.models.parse import attention_config, model_config, only

# optional weights that new heads have; for published heads, the files tell
OWN_WEIGHTS = ("lm_head.weight", "d2t")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Layer(Layer):
    """A Llama layer whose attention reads an embedding and a feature side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        assert config.attention is not None
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config.attention, size, 0, eps, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias)
        self.total = Total()
        self.norm_before_residual = bool(config.raw.get("norm_before_residual", False))

    def forward(self, embeddings: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        residual = normed if self.norm_before_residual else features
        hidden = residual + self.total(self.self_attn(both, ctx))
        return hidden + self.total(self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3Head(DraftVocabularyModel):
    """Entry p reads token p and three of the target's hidden states at p-1, and predicts token p+1.

    ``fuse`` makes one feature of the three. ``forward`` returns what replaces the feature of the
    next entry while drafting: the layer's output before ``norm``, or after it for some EAGLE 3.1
    heads.
    """

    def __init__(self, config: ModelConfig, stored: Container[str] = OWN_WEIGHTS) -> None:
        """stored: names in the checkpoint, as returned by ``published_name``. An embedding or
        ``lm_head`` that is not among them is the target's, if the sizes allow it."""
        super().__init__()
        size, given = config.hidden_size, target_hidden_size(config)
        self.config = config
        taps = len(_layer_ids(config)) or 3
        self.input_norm = self.fc_norm = None  # EAGLE 3.1: norms of the taps, joint or separate
        if enabled(config, "norm_before_fc"):
            self.input_norm = RMSNorm(taps * given, config.norm_eps)
        if enabled(config, "fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(given, config.norm_eps) for _ in range(taps))
        self.outputs_normed = outputs_normed(config)
        self.fc = Linear(taps * given, size)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.norm_eps)
        self.make_vocabulary(config, draft_vocab_size(config), size != given, stored)

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's hidden states side by side [n, 3 * its hidden_size] -> [n, hidden_size]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(taps)

    def forward(self, embeddings: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        """embeddings, features [n, hidden_size] -> [n, hidden_size]; ``ctx.rotation`` is set."""
        hidden = self.midlayer(embeddings, features, ctx)
        return self.norm(hidden) if self.outputs_normed else hidden

    def normed(self, outputs: Tensor) -> Tensor:
        """The results of ``forward``, as ``lm_head`` reads them."""
        return outputs if self.outputs_normed else self.norm(outputs)

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor goes; t2d is not needed beside d2t."""
        name = published_name(name)
        return None if name == "t2d" else Target(name)


def published_name(name: str) -> str:
    """SafeAILab's name of a weight; vLLM and speculators write ``layers.0`` for ``midlayer``."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


# ── config.json ──


def draft_vocab_size(config: ModelConfig) -> int:
    return config.raw.get("draft_vocab_size") or config.vocab_size


def target_hidden_size(config: ModelConfig) -> int:
    """The hidden size of the target that the head was made for."""
    return config.raw.get("target_hidden_size") or config.hidden_size


def enabled(config: ModelConfig, name: str) -> bool:
    """Whether config.json sets an option, at the top or in ``eagle_config``."""
    return bool((config.raw.get("eagle_config") or {}).get(name) or config.raw.get(name))


def outputs_normed(config: ModelConfig) -> bool:
    """Whether drafts are fed back after the norm: ``norm_output``, as speculators' heads are
    trained. SpecForge writes the same key, but trains with the output before the norm."""
    specforge = "norm_output" in config.raw and "transformer_layer_config" not in config.raw
    return enabled(config, "norm_output") and not specforge


def tap_layers(config: ModelConfig, layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads, ascending; ``layers`` stands for the input
    of the final norm.

    Heads that name no layers read the inputs of 2, n // 2 and n - 3. A list that begins with 1
    means outputs, any other list inputs (sgl-project/sglang#25454).

    Args: layers: number of layers of the target.
    """
    ids = _layer_ids(config)
    if not ids:
        return (2, layers // 2, layers - 3)
    shift = 1 if ids[0] == 1 else 0
    return tuple(sorted(i + shift for i in ids))


def layer_ids(taps: tuple[int, ...]) -> list[int]:
    """The list in a head's config.json from which ``tap_layers`` returns ``taps`` (ascending).

    Raises: ValueError if the first tap is 1, which would be read as 2.
    """
    if taps[0] == 1:
        raise ValueError(f"taps {taps} cannot be stored: the first one must be 0, or 2 or more")
    return list(taps)


def _layer_ids(config: ModelConfig) -> list[int]:
    own = config.raw.get("eagle_config") or {}
    return list(own.get(LAYER_IDS) or config.raw.get(LAYER_IDS) or [])


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """config.json of a head from SafeAILab, NVIDIA (``eagle_config``) or speculators
    (``transformer_layer_config``). ``vocab_size`` is the target's.

    Raises: UnsupportedModel naming what differs from these layouts.
    """
    layer = values.get("transformer_layer_config") or {}
    values = {**layer, **values}
    only(values, hidden_act="silu", num_hidden_layers=1, bias=False)
    only(
        values.get("eagle_config") or {},
        use_aux_hidden_state=True,
        use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True,
        use_mtp_layernorm=False,
        parallel_draft_step=1,
    )
    config = model_config(
        values,
        ("attention",),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention=attention_config(
            values, rotated=1.0, head_norm=layer.get("model_type") == "qwen3"
        ),
    )
    if not all(isinstance(i, int) for i in _layer_ids(config)):
        raise UnsupportedModel(f"{LAYER_IDS} {_layer_ids(config)}: must be whole numbers")
    return config
