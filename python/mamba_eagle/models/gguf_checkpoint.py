"""The tensors of a GGUF file, as the checkpoint had them that it was made from.

llama.cpp's converter renames tensors, and changes some (``conversion/`` in its repository); here
both are undone:

- A is stored in place of its logarithm, as ``-exp(A_log)``, and with D as a column;
- the convolution's weight lacks its middle dimension, and the gated norm's has one per group;
- Granite's and Nemotron-H's query and key rows are in the order that interleaved RoPE needs;
- Granite's joined gate and up projections are apart, and experts lie in one tensor;
- Falcon-H1's multipliers are in the weights, and stay there;
- Qwen's norms have their 1 added; Qwen3-Next's joined projection is apart, its heads side by side;
  Qwen3.5's value heads are in an order by which a repeated key head meets its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from mamba_eagle.gguf_files.config import num_layers
from mamba_eagle.gguf_files.file import GgufFile, TensorInfo, open_gguf
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.base import Names
from mamba_eagle.models.staging import Staging
from mamba_eagle.models.stored import Opened, Part, Stored
from mamba_eagle.quantization.gguf_blocks import BLOCKS, grouped
from mamba_eagle.quantization.matrix import Matrix

log = logging.getLogger("mamba_eagle.models")


def unchanged(value: Tensor) -> Tensor:
    return value


def a_log(value: Tensor) -> Tensor:
    return value.float().neg().log().reshape(-1)


def depthwise(value: Tensor) -> Tensor:
    """[channels, width] -> [channels, 1, width]."""
    return value.unsqueeze(1)


def centred(value: Tensor) -> Tensor:
    """A norm's weight as what it differs from 1 by."""
    return value.float() - 1


def one_row(value: Tensor) -> Tensor:
    return value.reshape(1, -1)


# a number of rows or columns -> where those of the checkpoint are in the file
Order = Callable[[GgufFile, int], NDArray[np.int64]]


class Recipe(NamedTuple):
    """How one tensor of a checkpoint is made from those of a file."""

    sources: tuple[str, ...]  # names behind ``blk.N.``; more than one: joined along their rows
    undo: Callable[[Tensor], Tensor] = unchanged
    alternative: tuple[str, ...] = ()  # other names for the same
    order: Order | None = None  # of all rows
    columns: Order | None = None


def order_of_halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Of a query or key projection: the two channels that RoPE rotates together are half a head
    apart in the checkpoint and neighbours in the file."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def halves(key: str) -> Order:
    """key: with the number of heads."""

    def order(file: GgufFile, rows: int) -> NDArray[np.int64]:
        value = file.need(f"attention.{key}")
        return order_of_halves(rows, max(value) if isinstance(value, list) else int(value))

    return order


def value_heads_last(file: GgufFile, count: int) -> NDArray[np.int64]:
    """Qwen3.5's value heads, behind queries and keys where there are any. In the checkpoint those
    of one key head are side by side; in the file the first of each key head come first."""
    groups, heads = int(file.need("ssm.group_count")), int(file.need("ssm.time_step_rank"))
    inner = int(file.need("ssm.inner_size"))
    first = max(0, count - inner)
    tiled = np.arange(first, count).reshape(heads // groups, groups, -1)
    return np.concatenate([np.arange(first), tiled.swapaxes(0, 1).reshape(-1)])


def key_heads_together(file: GgufFile, count: int) -> NDArray[np.int64]:
    """Qwen3-Next's joined projection: per key head its query, key, values and their gates. In the
    file all queries come first, then keys, values and gates."""
    groups, inner = int(file.need("ssm.group_count")), int(file.need("ssm.inner_size"))
    keys = count // 2 - inner
    parts = np.split(np.arange(count), np.cumsum([keys, keys, inner]))
    return np.concatenate([part.reshape(groups, -1) for part in parts], axis=1).reshape(-1)


MIXER = {
    "in_proj.weight": Recipe(("ssm_in.weight",)),
    "in_proj.bias": Recipe(("ssm_in.bias",)),
    "conv1d.weight": Recipe(("ssm_conv1d.weight",), depthwise),
    "conv1d.bias": Recipe(("ssm_conv1d.bias",)),
    "dt_bias": Recipe(("ssm_dt.bias",)),
    "A_log": Recipe(("ssm_a",), a_log),
    "D": Recipe(("ssm_d",), torch.flatten),
    "norm.weight": Recipe(("ssm_norm.weight",), torch.flatten),
    "out_proj.weight": Recipe(("ssm_out.weight",)),
    "out_proj.bias": Recipe(("ssm_out.bias",)),
}
ATTENTION = {
    f"{ours}_proj.{leaf}": Recipe((f"attn_{theirs}.{leaf}",))
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
    for leaf in ("weight", "bias")
}
HALVES = {"q": halves("head_count"), "k": halves("head_count_kv")}
INTERLEAVED_ATTENTION = {
    name: recipe._replace(order=HALVES.get(name[0])) for name, recipe in ATTENTION.items()
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

    names: Names
    layer: dict[str, Recipe]  # all that any of its layers may have
    norm_undo: Callable[[Tensor], Tensor] = unchanged


BACKBONE = Names("backbone", "embeddings", "norm_f")
NEMOTRON_H = Family(
    BACKBONE,
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
QWEN = Family(
    Names(),
    {
        "input_layernorm.weight": Recipe(("attn_norm.weight",), centred),
        "post_attention_layernorm.weight": Recipe(("post_attention_norm.weight",), centred),
        **under("self_attn", ATTENTION),
        "self_attn.q_norm.weight": Recipe(("attn_q_norm.weight",), centred),
        "self_attn.k_norm.weight": Recipe(("attn_k_norm.weight",), centred),
        "linear_attn.conv1d.weight": Recipe(("ssm_conv1d.weight",), depthwise),
        "linear_attn.dt_bias": Recipe(("ssm_dt.bias",)),
        "linear_attn.A_log": Recipe(("ssm_a",), a_log),
        "linear_attn.norm.weight": Recipe(("ssm_norm.weight",), torch.flatten),
        "linear_attn.out_proj.weight": Recipe(("ssm_out.weight",)),
        **under("mlp", projections(("gate", "up", "down"), "ffn_{}")),
        "mlp.gate.weight": Recipe(("ffn_gate_inp.weight",)),
        "mlp.experts.gate_up_proj": Recipe(("ffn_gate_exps.weight", "ffn_up_exps.weight")),
        "mlp.experts.down_proj": Recipe(("ffn_down_exps.weight",)),
        **under("mlp.shared_expert", projections(("gate", "up", "down"), "ffn_{}_shexp")),
        "mlp.shared_expert_gate.weight": Recipe(("ffn_gate_inp_shexp.weight",), one_row),
    },
    norm_undo=centred,
)
QWEN_NEXT = QWEN._replace(
    layer={
        **QWEN.layer,
        "linear_attn.in_proj_qkvz.weight": Recipe(
            ("attn_qkv.weight", "attn_gate.weight"), order=key_heads_together
        ),
        "linear_attn.in_proj_ba.weight": Recipe(("ssm_ba.weight",)),
    }
)
_PROJECTIONS = {"qkv": "attn_qkv", "z": "attn_gate", "b": "ssm_beta", "a": "ssm_alpha"}
QWEN_3_5 = QWEN._replace(
    layer={
        **QWEN.layer,
        **{
            name: QWEN.layer[name]._replace(order=value_heads_last)
            for name in ("linear_attn.conv1d.weight", "linear_attn.dt_bias", "linear_attn.A_log")
        },
        **{
            f"linear_attn.in_proj_{ours}.weight": Recipe(
                (f"{theirs}.weight",), order=value_heads_last
            )
            for ours, theirs in _PROJECTIONS.items()
        },
        "linear_attn.out_proj.weight": Recipe(("ssm_out.weight",), columns=value_heads_last),
    }
)
# general.architecture -> its tensors
FAMILIES = {
    "mamba2": Family(
        BACKBONE, {"norm.weight": Recipe(("attn_norm.weight",)), **under("mixer", MIXER)}
    ),
    "granitehybrid": Family(
        Names(),
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
        Names(norm="final_layernorm"),
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
    "qwen3next": QWEN_NEXT,
    **dict.fromkeys(("qwen35", "qwen35moe"), QWEN_3_5),
}


class Made(NamedTuple):
    """A tensor of the checkpoint, with what it is made from."""

    sources: tuple[TensorInfo, ...]
    undo: Callable[[Tensor], Tensor]
    order: NDArray[np.int64] | None = None  # where its rows are; None: in order
    columns: NDArray[np.int64] | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether it is a matrix that is kept in the file's few bits: with columns in another
        order only if they move in whole blocks."""
        dtypes = {info.dtype for info in self.sources}
        is_matrix = len(self.sources[0].shape) > 1 and self.undo is unchanged
        if not is_matrix or len(dtypes) > 1 or not dtypes <= set(BLOCKS):
            return False
        return self.columns is None or self.block_order() is not None

    def block_order(self) -> NDArray[np.int64] | None:
        """``columns`` in blocks of the file's type; None if they are not whole."""
        assert self.columns is not None
        size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[self.sources[0].dtype]]
        blocks = self.columns.reshape(-1, size)
        whole = (blocks == blocks[:, :1] + np.arange(size)).all() and not (
            blocks[:, 0] % size
        ).any()
        return blocks[:, 0] // size if whole else None


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

    def tensors(
        self, parts: Mapping[str, Part], mapped_bytes: int, staging: Staging | None
    ) -> Iterator[Opened]:
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
        parts = [self._rows(info) for info in made.sources]
        if name in self.packed:
            return torch.from_numpy(in_order(made, np.concatenate(parts, axis=-2)))
        values = [dequantized(part, info.dtype) for part, info in zip(parts, made.sources)]
        value = values[0] if len(values) == 1 else torch.cat(values, dim=-2)
        if made.order is not None:
            value = value[torch.from_numpy(made.order)]
        if made.columns is not None:
            value = value[:, torch.from_numpy(made.columns)]
        return made.undo(value)

    def _rows(self, info: TensorInfo) -> NDArray[np.uint8]:
        """[..., rows, bytes of a row]"""
        return self.file.bytes_of(info).reshape(*info.shape[:-1], info.row_bytes)

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
            infos = tuple(found[one] for one in sources)
            count = sum(info.shape[0] for info in infos)
            order = recipe.order(file, count) if recipe.order else None
            columns = recipe.columns(file, infos[0].shape[-1]) if recipe.columns else None
            made[name] = Made(infos, recipe.undo, order, columns)
            used.update(sources)

    plain, (backbone, embedding, norm) = Recipe(()), family.names
    make(f"{backbone}.{embedding}.weight", ("token_embd.weight",), plain)
    make(f"{backbone}.{norm}.weight", ("output_norm.weight",), Recipe((), family.norm_undo))
    make("lm_head.weight", ("output.weight",), plain)
    for layer in range(num_layers(file)):
        for name, recipe in family.layer.items():
            for names in filter(None, (recipe.sources, recipe.alternative)):
                sources = tuple(f"blk.{layer}.{source}" for source in names)
                make(f"{backbone}.layers.{layer}.{name}", sources, recipe)
    drafting = tuple(f"blk.{n}." for n in range(num_layers(file), int(file.need("block_count"))))
    for name, info in found.items():
        if name not in used and not name.startswith(drafting):
            made[name] = Made((info,), unchanged)
    return made


def in_order(made: Made, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of few bits [..., rows, bytes of a row], in the checkpoint's order."""
    if made.order is not None:
        rows = rows[made.order]
    blocks = None if made.columns is None else made.block_order()
    if blocks is None:
        return rows
    return rows.reshape(len(rows), len(blocks), -1)[:, blocks].reshape(rows.shape)


def dequantized(rows: NDArray[np.uint8], dtype: str) -> Tensor:
    """[..., bytes of a row] -> [..., columns]; where the numbers are not of few bits, a view."""
    if dtype not in VIEWS:
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[dtype]))
    aligned = rows if rows.ctypes.data % 4 == 0 else rows.copy()
    return torch.from_numpy(aligned).view(VIEWS[dtype])


VIEWS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
