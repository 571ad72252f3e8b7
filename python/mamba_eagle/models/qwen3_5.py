"""Qwen3.5 and its successors, dense and with experts: Qwen3-Next with other projections. Of the
multimodal checkpoints only the text part is read: prompts have no images."""

from typing import Any

from mamba_eagle.layers.linear import Linear
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models import qwen3_next
from mamba_eagle.models.qwen3_next import Qwen3NextForCausalLM, QwenDeltaNet, QwenLayer
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads

TEXT_PREFIX = "model.language_model."


class Qwen35DeltaNet(QwenDeltaNet):
    """A matrix for each projection."""

    def make_projections(self, hidden_size: int) -> None:
        c = self.config
        self.in_proj_qkv = Linear(hidden_size, c.conv_dim)
        self.in_proj_z = Linear(hidden_size, c.inner_size)
        self.in_proj_b = Linear(hidden_size, c.num_heads)
        self.in_proj_a = Linear(hidden_size, c.num_heads)

    def projections(self) -> dict[str, list[Linear]]:
        return {
            "channels": [self.in_proj_qkv, self.in_proj_z],
            "gates": [self.in_proj_a, self.in_proj_b],
        }

    def input_cuts(self, shard: Shard) -> dict[str, Cut]:
        own = recurrent_heads(shard, self.config)
        return {
            "in_proj_qkv.weight": rows(*self.channel_spans(own)),
            "in_proj_z.weight": rows(own.channels(self.config.head_dim)),
            **dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight"), rows(own.heads)),
        }


class Qwen35Layer(QwenLayer):
    recurrent = Qwen35DeltaNet


class Qwen35ForCausalLM(Qwen3NextForCausalLM):
    layer_class = Qwen35Layer
    renamed = {TEXT_PREFIX: "model."}
    skipped = ("mtp.", "model.visual.")


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of the text part, with those of the whole that are not about images."""
    text = values.get("text_config")
    if text is None:
        return values
    whole = {key: value for key, value in values.items() if not key.endswith("_config")}
    kept = ("architectures", "eos_token_id", "tie_word_embeddings", "quantization_config")
    return {**whole, **text, **{key: values[key] for key in kept if key in values}}


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Raises: UnsupportedModel, KeyError naming what config.json lacks."""
    return qwen3_next.parse_config(text_values(values))
