"""Checkpoints of few bits, written as each tool publishes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peer_models import make_peer
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 32  # rows and columns that share a scale
GROUP = 16  # columns of a group of four bits
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # E2M1, without the sign


class Form(NamedTuple):
    """How one matrix is written."""

    config: dict[str, Any]  # quantization_config
    write: Callable[[str, Tensor], dict[str, Tensor]]  # module, weight -> stored tensors


def static_scale(module: str) -> float:
    """Of a module's inputs, which q, k, v and gate, up have in common."""
    leaf = module.rpartition(".")[2]
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return 0.02 if leaf in names else 0.015


def per_tensor(module: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {
        f"{module}.weight": (weight / scale).to(E4M3),
        f"{module}.weight_scale": scale,
        f"{module}.input_scale": torch.tensor(static_scale(module)),
    }


def per_channel(module: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{module}.weight": (weight / scale).to(E4M3), f"{module}.weight_scale": scale}


def per_block(module: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    scale = torch.full(shape, float(weight.abs().max()) / 448) * (1 + torch.rand(shape))
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    stored = (weight / whole).to(E4M3)
    return {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}


def integers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups]: 0 to 15 between the extremes."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scale, zero.int()


def packed(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Eight numbers of four bits per int32, the lowest bits for number ``order[0]``: codes [n, m]
    -> [n, m / 8]."""
    eight = codes.unflatten(1, (-1, 8)).long()
    bits = sum(eight[..., which] << 4 * place for place, which in enumerate(order))
    return bits.to(torch.int64).sub(bits.ge(2**31) * 2**32).int()


def awq(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, zero = integers(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{module}.qweight": packed(codes.t(), order),
        f"{module}.qzeros": packed(zero.t(), order),
        f"{module}.scales": scale.t().contiguous(),
    }


def gptq(module: str, weight: Tensor, added: int = 1) -> dict[str, Tensor]:
    codes, scale, zero = integers(weight)
    order = tuple(range(8))
    return {
        f"{module}.qweight": packed(codes, order).t().contiguous(),
        f"{module}.qzeros": packed(zero.t() - added, order),
        f"{module}.scales": scale.t().contiguous(),
        f"{module}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [out, in / 2], scales [out, in / 16] and the scale of all."""
    whole = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
    number = groups / (scale.float() * whole).clamp(min=1e-20)[..., None]
    codes = (number.abs()[..., None] - FLOATS).abs().argmin(-1) + 8 * (number < 0)
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, whole


def dequantized_nvfp4(stored: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """The weights [out, in] that nvfp4's bytes and scales stand for."""
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1).long()
    numbers = FLOATS[codes & 7] * (1 - 2 * (codes >> 3))
    return (numbers.unflatten(1, (-1, 16)) * (scale.float() * whole)[..., None]).flatten(1)


def modelopt_nvfp4(module: str, weight: Tensor) -> dict[str, Tensor]:
    stored, scale, whole = nvfp4(weight)
    return {
        f"{module}.weight": stored,
        f"{module}.weight_scale": scale,
        f"{module}.weight_scale_2": whole,
        f"{module}.input_scale": torch.tensor(1.0),
    }


def compressed_nvfp4(module: str, weight: Tensor) -> dict[str, Tensor]:
    stored, scale, whole = nvfp4(weight)
    return {
        f"{module}.weight_packed": stored,
        f"{module}.weight_scale": scale,
        f"{module}.weight_global_scale": (1 / whole).reshape(1),
    }


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


FLOAT = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FORMS = {
    "modelopt-fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor),
    "compressed-token": Form(
        compressed(
            {**FLOAT, "strategy": "channel"}, {**FLOAT, "strategy": "token", "dynamic": True}
        ),
        per_channel,
    ),
    "compressed-static": Form(
        compressed({**FLOAT, "strategy": "tensor"}, {**FLOAT, "strategy": "tensor"}), per_tensor
    ),
    "fp8-block": Form({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, per_block),
    "modelopt-nvfp4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "compressed-nvfp4": Form(compressed(FP4, None), compressed_nvfp4),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": Form({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-v2": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda module, weight: gptq(module, weight, added=0),
    ),
}


FLOAT8 = ("modelopt-fp8", "compressed-token", "compressed-static", "fp8-block")


def is_matrix(name: str, value: Tensor, form: str) -> bool:
    """Whether tools write it in few bits: what multiplies, but for lm_head and routers, and of a
    size that they pack."""
    others = ("lm_head", "embed", "conv1d", "gate.weight", "router", "norm")
    fits = form in FLOAT8 or all(size % GROUP == 0 for size in value.shape)
    is_weight = name.endswith(".weight") and value.ndim == 2
    return is_weight and fits and not any(part in name for part in others)


def write_published(folder: Path, family: str, form: str, **changes: Any) -> dict[str, Tensor]:
    """A random model of the family, with ``changes`` of its config and its matrices in this form.
    Returns what they were before, by module."""
    torch.manual_seed(0)
    make_peer(family, **changes).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    stored, modules = {}, {}
    for name, value in weights.items():
        if is_matrix(name, value, form):
            module = name.removesuffix(".weight")
            stored |= FORMS[form].write(module, value.float())
            modules[module] = value
        else:
            stored[name] = value
    contiguous = {name: part.contiguous() for name, part in stored.items()}
    save_file(contiguous, folder / "model.safetensors")
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), "quantization_config": FORMS[form].config}
    path.write_text(json.dumps(values))
    return modules
