"""What a checkpoint's config.json says, in the names the layers use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_OF_LETTER = {"M": "mamba", "*": "attention", "-": "mlp"}
BLOCK_OF_NAME = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
}
ACTIVATIONS = {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}  # another loads all the same


class UnsupportedModel(ValueError):
    """The checkpoint asks for something this build does not have; the text says what."""


@dataclass(frozen=True)
class Mamba2Config:
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    time_step_limit: tuple[float, float]
    chunk_size: int

    @property
    def inner_size(self) -> int:
        """Width of x and of the gate: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C side by side."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """One decoder model. ``blocks`` names the mixer of each layer: mamba, attention or mlp."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[str, ...]
    norm_eps: float
    mamba: Mamba2Config | None
    attention: AttentionConfig | None
    intermediate_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "float32"
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_mamba_layers(self) -> int:
        return self.blocks.count("mamba")

    @property
    def num_attention_layers(self) -> int:
        return self.blocks.count("attention")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """Read ``folder/config.json`` (and the stop tokens of generation_config.json)."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: --model-path needs a checkpoint folder"
            )
        values = json.loads(path.read_text())
        generation = path.with_name("generation_config.json")
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            if eos is not None:
                values["eos_token_id"] = eos
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """``values`` is config.json of a ``nemotron_h`` checkpoint, pattern string or list form."""
        blocks = _blocks(values)
        for name, known in ACTIVATIONS.items():
            if values.get(name, known) != known:
                raise UnsupportedModel(f"{name} {values[name]!r} is not supported; known: {known}")
        hidden = int(values["hidden_size"])
        limit = values.get("time_step_limit") or (0.0, float("inf"))
        mamba = None
        if "mamba" in blocks:
            mamba = Mamba2Config(
                num_heads=values["mamba_num_heads"],
                head_dim=values["mamba_head_dim"],
                state_size=values["ssm_state_size"],
                num_groups=values["n_groups"],
                conv_kernel=values.get("conv_kernel", 4),
                conv_bias=values.get("use_conv_bias", True),
                time_step_limit=(_number(limit[0]), _number(limit[1])),
                chunk_size=values.get("chunk_size", 128),
            )
        attention = None
        if "attention" in blocks:
            heads = values["num_attention_heads"]
            attention = AttentionConfig(
                num_heads=heads,
                num_kv_heads=values.get("num_key_value_heads") or heads,
                head_dim=values.get("head_dim") or hidden // heads,
            )
        eos = values.get("eos_token_id")
        eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        return cls(
            architecture=(values.get("architectures") or ["?"])[0],
            model_type=values.get("model_type", "?"),
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden,
            blocks=blocks,
            norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
            mamba=mamba,
            attention=attention,
            intermediate_size=int(values.get("intermediate_size", 0)),
            max_position_embeddings=int(values.get("max_position_embeddings", 4096)),
            eos_token_ids=eos_ids,
            dtype=str(values.get("torch_dtype") or values.get("dtype") or "float32"),
            raw=values,
        )


def _number(value: Any) -> float:
    """JSON has no infinity; transformers writes ``{"__float__": "Infinity"}``."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _blocks(values: dict[str, Any]) -> tuple[str, ...]:
    names = values.get("layers_block_type") or values.get("layer_types")
    pattern = values.get("hybrid_override_pattern")
    if names:
        unknown = sorted({name for name in names if name not in BLOCK_OF_NAME})
        blocks = tuple(BLOCK_OF_NAME.get(name, name) for name in names)
    elif pattern:
        unknown = sorted({letter for letter in pattern if letter not in BLOCK_OF_LETTER})
        blocks = tuple(BLOCK_OF_LETTER.get(letter, letter) for letter in pattern)
    else:
        raise UnsupportedModel(
            "config.json has neither layers_block_type nor hybrid_override_pattern, "
            "so the order of Mamba2, attention and MLP layers is unknown"
        )
    if unknown:
        raise UnsupportedModel(
            f"layer kinds {unknown} are not supported; known: {sorted(set(BLOCK_OF_NAME))} "
            f"and the letters {sorted(BLOCK_OF_LETTER)}"
        )
    return blocks
