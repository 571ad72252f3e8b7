"""The tensors of a GGUF file, as the checkpoint had them that it was made from.

llama.cpp's converter renames tensors, and changes some (``conversion/`` in its repository); here
both are undone:

- A is stored in place of its logarithm, as ``-exp(A_log)``, and with D as a column;
- the convolution's weight lacks its middle dimension, and the gated norm's has one per group;
- Granite's and Nemotron-H's query and key rows are in the order that interleaved RoPE needs;
- Granite's joined gate and up projections are apart, and experts lie in one tensor;
- Falcon-H1's multipliers are in the weights, and stay there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from mamba_eagle.gguf_files.config import num_layers
from mamba_eagle.gguf_files.file import GgufFile, TensorInfo, open_gguf
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.stored import Opened, Stored
from mamba_eagle.parallel.cut import Cut
from mamba_eagle.quantization.gguf_blocks import BLOCKS, grouped
from mamba_eagle.quantization.matrix import Matrix

log = logging.getLogger("mamba_eagle.models")


def unchanged(value: Tensor) -> Tensor:
    return value


def flat(value: Tensor) -> Tensor:
    return value.reshape(-1)


def a_log(value: Tensor) -> Tensor:
    return value.float().neg().log().reshape(-1)


def depthwise(value: Tensor) -> Tensor:
    """[channels, width] -> [channels, 1, width]."""
    return value.unsqueeze(1)


class Recipe(NamedTuple):
    """How one tensor of a checkpoint is made from those of a file."""

    sources: tuple[str, ...]  # names behind ``blk.N.``; more than one: joined along their rows
    undo: Callable[[Tensor], Tensor] = unchanged
    alternative: tuple[str, ...] = ()  # other names for the same
    heads: str = ""  # the key with the number of heads whose rows are interleaved


MIXER = {
    "in_proj.weight": Recipe(("ssm_in.weight",)),
    "in_proj.bias": Recipe(("ssm_in.bias",)),
    "conv1d.weight": Recipe(("ssm_conv1d.weight",), depthwise),
    "conv1d.bias": Recipe(("ssm_conv1d.bias",)),
    "dt_bias": Recipe(("ssm_dt.bias",)),
    "A_log": Recipe(("ssm_a",), a_log),
    "D": Recipe(("ssm_d",), flat),
    "norm.weight": Recipe(("ssm_norm.weight",), flat),
    "out_proj.weight": Recipe(("ssm_out.weight",)),
    "out_proj.bias": Recipe(("ssm_out.bias",)),
}
ATTENTION = {
    f"{ours}_proj.{leaf}": Recipe((f"attn_{theirs}.{leaf}",))
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
    for leaf in ("weight", "bias")
}
INTERLEAVED_ATTENTION = {
    name: recipe._replace(heads={"q": "head_count", "k": "head_count_kv"}.get(name[0], ""))
    for name, recipe in ATTENTION.items()
}


def under(prefix: str, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    return {f"{prefix}.{name}": recipe for name, recipe in recipes.items()}


def projections(names: tuple[str, ...], source: str) -> dict[str, Recipe]:
    """source: with a {} for the name."""
    return {
        f"{name}_proj.{leaf}": Recipe((f"{source.format(name)}.{leaf}",))
        for name in names
        for leaf in ("weight", "bias")
    }


class Family(NamedTuple):
    """Where a family's tensors are in its own checkpoints."""

    backbone: str
    embedding: str
    norm: str
    layer: dict[str, Recipe]  # all that any of its layers may have


NEMOTRON_H = Family(
    "backbone",
    "embeddings",
    "norm_f",
    {
        "norm.weight": Recipe(("attn_norm.weight",)),
        **under("mixer", MIXER),
        **under("mixer", INTERLEAVED_ATTENTION),
        **under("mixer", projections(("up", "down"), "ffn_{}")),
        "mixer.gate.weight": Recipe(("ffn_gate_inp.weight",)),
        "mixer.gate.e_score_correction_bias": Recipe(("exp_probs_b.bias",)),
        "mixer.experts.up_proj": Recipe(("ffn_up_exps.weight",)),
        "mixer.experts.down_proj": Recipe(("ffn_down_exps.weight",)),
        **under("mixer.shared_experts", projections(("up", "down"), "ffn_{}_shexp")),
        "mixer.fc1_latent_proj.weight": Recipe(("ffn_latent_down.weight",)),
        "mixer.fc2_latent_proj.weight": Recipe(("ffn_latent_up.weight",)),
    },
)
# general.architecture -> its tensors
FAMILIES = {
    "mamba2": Family(
        "backbone",
        "embeddings",
        "norm_f",
        {"norm.weight": Recipe(("attn_norm.weight",)), **under("mixer", MIXER)},
    ),
    "granitehybrid": Family(
        "model",
        "embed_tokens",
        "norm",
        {
            "input_layernorm.weight": Recipe(("attn_norm.weight",)),
            "post_attention_layernorm.weight": Recipe(("ffn_norm.weight",)),
            **under("mamba", MIXER),
            **under("self_attn", INTERLEAVED_ATTENTION),
            # with experts beside it, it has names of its own
            "shared_mlp.input_linear.weight": Recipe(
                ("ffn_gate.weight", "ffn_up.weight"),
                alternative=("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
            ),
            "shared_mlp.output_linear.weight": Recipe(
                ("ffn_down.weight",), alternative=("ffn_down_shexp.weight",)
            ),
            "block_sparse_moe.input_linear.weight": Recipe(
                ("ffn_gate_exps.weight", "ffn_up_exps.weight")
            ),
            "block_sparse_moe.output_linear.weight": Recipe(("ffn_down_exps.weight",)),
            "block_sparse_moe.router.layer.weight": Recipe(("ffn_gate_inp.weight",)),
        },
    ),
    "falcon-h1": Family(
        "model",
        "embed_tokens",
        "final_layernorm",
        {
            "input_layernorm.weight": Recipe(("attn_norm.weight",)),
            # the converter writes this one without ".weight"
            "pre_ff_layernorm.weight": Recipe(("ffn_norm",), alternative=("ffn_norm.weight",)),
            **under("mamba", MIXER),
            **under("self_attn", ATTENTION),
            **under("feed_forward", projections(("gate", "up", "down"), "ffn_{}")),
        },
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
}


class Made(NamedTuple):
    """A tensor of the checkpoint, with what it is made from."""

    sources: tuple[TensorInfo, ...]
    undo: Callable[[Tensor], Tensor]
    heads: int  # whose rows are interleaved; 0: they are in order

    @property
    def is_grouped(self) -> bool:
        """Whether it is a matrix that is kept in the file's few bits."""
        dtypes = {info.dtype for info in self.sources}
        is_matrix = len(self.sources[0].shape) > 1 and self.undo is unchanged
        return is_matrix and len(dtypes) == 1 and dtypes <= set(BLOCKS)


class Part(Protocol):
    """What a rank needs of a tensor."""

    @property
    def cut(self) -> Cut | None: ...


class GgufCheckpoint:
    """The tensors of a GGUF file under the names of the checkpoint that it was made from. What has
    no such name keeps its own, so that it is reported."""

    def __init__(self, path: Path) -> None:
        """Raises: UnsupportedModel, OSError"""
        self.folder = path
        self.file = open_gguf(path)
        self.made = made_tensors(self.file)
        self.contents = {name: self._stored(made) for name, made in self.made.items()}
        self.packed = {name for name, made in self.made.items() if made.is_grouped}

    def log_quantization(self) -> None:
        counts = Counter(info.dtype for info in self.file.tensors.values())
        types = ", ".join(f"{count} × {name}" for name, count in counts.most_common())
        log.info("%s: tensors of %s", self.folder, types)

    def value(self, name: str, stored: Tensor) -> Tensor | Matrix:
        """The tensor of ``contents``, from what ``tensors`` gives."""
        if name not in self.packed:
            return stored
        return grouped(stored, self.made[name].sources[0].dtype)

    def tensors(self, parts: Mapping[str, Part], mapped_bytes: int) -> Iterator[Opened]:
        """The named tensors, on the CPU: what ``parts`` says of them. Those of ``packed`` are the
        file's bytes and whole, as they are cut with their scales."""
        for name, part in parts.items():
            value = self._read(name)
            if part.cut is not None and name not in self.packed:
                value = part.cut.of(value)
            yield Opened(name, value)
            del value

    def _read(self, name: str) -> Tensor:
        """float32, the file's own 16 bits, or bytes."""
        made = self.made[name]
        rows = [self._rows(info, made.heads) for info in made.sources]
        if name in self.packed:
            return torch.from_numpy(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=-2))
        values = [dequantized(part, info.dtype) for part, info in zip(rows, made.sources)]
        return made.undo(values[0] if len(values) == 1 else torch.cat(values, dim=-2))

    def _rows(self, info: TensorInfo, heads: int) -> NDArray[np.uint8]:
        """[..., rows, bytes of a row], in the checkpoint's order."""
        rows = self.file.bytes_of(info)
        if heads and len(info.shape) > 1:
            rows = rows[order_of_halves(info.shape[0], heads)]
        elif heads:  # a bias
            size = info.row_bytes // info.shape[0]
            rows = rows.reshape(-1, size)[order_of_halves(info.shape[0], heads)]
            return rows.reshape(-1)
        return rows.reshape(*info.shape[:-1], info.row_bytes)

    def _stored(self, made: Made) -> Stored:
        shapes = [torch.empty(info.shape, device="meta") for info in made.sources]
        if len({(*info.shape[:-2], info.shape[-1]) for info in made.sources}) > 1:
            described = ", ".join(f"{info.name} {list(info.shape)}" for info in made.sources)
            raise UnsupportedModel(f"{self.folder}: these do not fit each other: {described}")
        whole = made.undo(shapes[0] if len(shapes) == 1 else torch.cat(shapes, dim=-2))
        nbytes = sum(info.nbytes for info in made.sources)
        return Stored(self.folder, tuple(whole.shape), "F32", nbytes)


def made_tensors(file: GgufFile) -> dict[str, Made]:
    """All tensors that the file has anything for."""
    family, found = FAMILIES[file.architecture], file.tensors
    used: set[str] = set()
    made: dict[str, Made] = {}

    def make(name: str, sources: tuple[str, ...], recipe: Recipe) -> None:
        if all(source in found for source in sources):
            heads = _number(file, recipe.heads) if recipe.heads else 0
            made[name] = Made(tuple(found[one] for one in sources), recipe.undo, heads)
            used.update(sources)

    plain, backbone = Recipe(()), family.backbone
    make(f"{backbone}.{family.embedding}.weight", ("token_embd.weight",), plain)
    make(f"{backbone}.{family.norm}.weight", ("output_norm.weight",), plain)
    make("lm_head.weight", ("output.weight",), plain)
    for layer in range(num_layers(file)):
        for name, recipe in family.layer.items():
            for names in filter(None, (recipe.sources, recipe.alternative)):
                sources = tuple(f"blk.{layer}.{source}" for source in names)
                make(f"{backbone}.layers.{layer}.{name}", sources, recipe)
    drafting = tuple(f"blk.{n}." for n in range(num_layers(file), int(file.need("block_count"))))
    for name, info in found.items():
        if name not in used and not name.startswith(drafting):
            made[name] = Made((info,), unchanged, 0)
    return made


def _number(file: GgufFile, key: str) -> int:
    value = file.need(f"attention.{key}")
    return max(value) if isinstance(value, list) else int(value)


def order_of_halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Where the rows of a checkpoint's query or key projection are in the file: the two channels
    that RoPE rotates together are half a head apart in the one and neighbours in the other."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def dequantized(rows: NDArray[np.uint8], dtype: str) -> Tensor:
    """[..., bytes of a row] -> [..., columns]; where the numbers are not of few bits, a view."""
    if dtype not in VIEWS:
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[dtype]))
    aligned = rows if rows.ctypes.data % 4 == 0 else rows.copy()
    return torch.from_numpy(aligned).view(VIEWS[dtype])


VIEWS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
