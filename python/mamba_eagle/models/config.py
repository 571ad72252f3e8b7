"""What a checkpoint's config.json says, in the names the layers use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    in_bias: bool = False
    out_bias: bool = False
    norm: str = "gate_first"  # or norm_first, or gate_only: y * silu(gate), no weight

    @property
    def inner_size(self) -> int:
        """Width of x and of the gate: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C side by side."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True)
class LinearScaling:
    """All positions are divided by ``factor`` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Waves that turn fewer than ``low_turns`` times in the trained context are stretched by
    ``factor``, those that turn more than ``high_turns`` times stay; a ramp over the number of
    turns in between (arXiv 2407.21783)."""

    factor: float
    low_turns: float
    high_turns: float
    trained_length: int


@dataclass(frozen=True)
class YarnScaling:
    """As ``Llama3Scaling``, with a ramp over channels instead of turns, and angles' cosine and sine
    multiplied with ``magnitude`` (YaRN: arXiv 2309.00071)."""

    factor: float
    low_turns: float
    high_turns: float
    trained_length: int
    magnitude: float
    whole_channels: bool  # the ramp begins and ends at whole channel numbers


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding of the first ``dim`` channels of a head."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    rope: RopeConfig | None = None  # None: no position encoding
    head_norm: bool = False  # RMS norms of each head's query and key (Qwen3)


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of the expert all tokens go through; 0: none
    latent_size: int = 0  # width the routed experts work in; 0: hidden_size
    num_groups: int = 1  # experts stand in groups, of which only the best top_groups are looked at
    top_groups: int = 1
    normalize: bool = True  # chosen scores sum to 1
    scaling: float = 1.0  # of the routed experts' sum


@dataclass(frozen=True)
class ModelConfig:
    """One decoder model. ``blocks`` names the mixer of each layer: mamba, attention, mlp or moe;
    hybrid is a layer with both attention and Mamba2. What only one family has stays in ``raw``."""

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
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_mamba_layers(self) -> int:
        return self.blocks.count("mamba") + self.blocks.count("hybrid")

    @property
    def num_attention_layers(self) -> int:
        return self.blocks.count("attention") + self.blocks.count("hybrid")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """What ``read_values`` finds in the folder.

        Raises: FileNotFoundError, UnsupportedModel, which name the folder.
        """
        values = read_values(folder)
        with naming(folder):
            return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """``values`` is config.json of a checkpoint of any family of models/registry.py."""
        from mamba_eagle.models.registry import parse_config  # families import this module

        return parse_config(values)


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Whatever is unsupported inside is said of ``folder``."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from None


def read_values(folder: str | Path) -> dict[str, Any]:
    """config.json, with what its neighbours add: the stop tokens of generation_config.json, and
    the quantization that ModelOpt describes in hf_quant_config.json, where config.json has none.

    Raises: FileNotFoundError where there is no config.json; UnsupportedModel.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a checkpoint")
    values = read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        generation_values = read_json(generation)
        if generation_values.get("eos_token_id") is not None:
            try:
                values["eos_token_id"] = list(eos_tokens(generation_values))
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{generation}: {error}") from None
    modelopt = folder / "hf_quant_config.json"
    if modelopt.is_file() and not values.get("quantization_config"):
        values["quantization_config"] = {"quant_method": "modelopt", **read_json(modelopt)}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Raises: UnsupportedModel where there is something else than a JSON object."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is no JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{path} has no JSON object but a {type(values).__name__}")
    return values


def eos_tokens(values: dict[str, Any]) -> tuple[int, ...]:
    """The model's stop tokens: config.json has one, a list, or none.

    Raises: UnsupportedModel where there is something else.
    """
    eos = values.get("eos_token_id")
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in tokens):
        raise UnsupportedModel(
            f"eos_token_id = {json.dumps(eos)[:200]}: must be a token id or a list of token ids"
        )
    return tuple(tokens)


def dtype_name(values: dict[str, Any]) -> str:
    name = str(values.get("torch_dtype") or values.get("dtype") or "float32")
    return name.removeprefix("torch.")


def number(value: Any) -> float:
    """JSON has no infinity; transformers writes ``{"__float__": "Infinity"}``."""
    return float(value["__float__"] if isinstance(value, dict) else value)
