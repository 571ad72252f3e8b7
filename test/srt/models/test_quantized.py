"""FP8 and NVFP4 checkpoints in each published layout give what their dequantized weights give."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peer_models import make_peer
from safetensors.torch import load_file, save_file
from test_loading import edit, logits
from tiny_model import load_model
from torch import Tensor

from mamba_eagle.kernels.four_bit.torch import E2M1, dequantize
from mamba_eagle.message import TensorInfo
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.models.received import add_part, complete, transfer_problems
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.quantization.nvfp4 import nvfp4_groups

BLOCK = (16, 32)


class Scales(NamedTuple):
    """Of one weight: what the file has, and the same as large as the weight."""

    stored: Tensor
    whole: Tensor


def random_scales(form: str, rows: int, columns: int) -> Scales:
    def draw(*shape: int) -> Tensor:
        return torch.rand(shape) * 0.01 + 0.01

    if form == "tensor":
        scale = draw(1, 1)
        return Scales(scale.reshape(()), scale)
    if form in ("channel", "flat channel"):
        scale = draw(rows, 1)
        return Scales(scale if form == "channel" else scale[:, 0].contiguous(), scale)
    height, width = BLOCK if form == "block" else (128, 128)
    scale = draw(-(-rows // height), -(-columns // width))
    whole = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return Scales(scale if form == "block" else scale[:, None, :, None].contiguous(), whole)


class Written(NamedTuple):
    folder: Path  # FP8 weights and their scales
    exact: dict[str, Tensor]  # what they stand for


def write_float8(folder: Path, form: str, suffix: str = "_scale") -> Written:
    """A checkpoint whose layers' matrices are float8, with scales of the form."""
    torch.manual_seed(0)
    make_peer("nemotron-3-nano").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    exact, stored = dict(weights), dict(weights)
    for name, value in weights.items():
        if not name.endswith("_proj.weight"):
            continue
        scales = random_scales(form, *value.shape)
        stored[name] = (value / scales.whole).to(torch.float8_e4m3fn)
        stored[name + suffix] = scales.stored
        exact[name] = stored[name].float() * scales.whole
        if form == "tensor":
            stored[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            leaf = name[-len("k_proj.weight")] + "_scale"
            stored[name.replace("weight", leaf)] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors")
    return Written(folder, exact)


def check(written: Written) -> None:
    read = logits(load_model(written.folder))
    save_file(written.exact, written.folder / "model.safetensors")
    assert torch.equal(read, logits(load_model(written.folder)))


@pytest.mark.parametrize("form", ["block", "tensor"])
def test_a_trainer_sends_numbers_and_scales_as_they_are_published(
    form: str, tmp_path: Path
) -> None:
    suffix, config = (
        ("_scale_inv", {"weight_block_size": BLOCK}) if form == "block" else ("_scale", {})
    )
    served, sent = (write_float8(tmp_path / at, form, suffix).folder for at in ("served", "sent"))
    for folder in (served, sent):
        edit(folder, quantization_config={"quant_method": "fp8", **config})
    weights = {
        n: w if w.dtype.itemsize > 1 else (-w.float()).to(w.dtype)
        for n, w in load_file(sent / "model.safetensors").items()
    }
    save_file(weights, sent / "model.safetensors")
    told = {n: TensorInfo(n, str(w.dtype)[6:], list(w.shape)) for n, w in weights.items()}
    assert not transfer_problems(str(served), list(told.values()), lambda name: False)
    name = next(n for n, w in weights.items() if w.dtype == torch.float8_e4m3fn)
    told[name].dtype = "bfloat16"
    (wrong,) = transfer_problems(str(served), list(told.values()), lambda name: False)
    assert name in wrong and "F8_E4M3" in wrong and "--quantization" in wrong
    joined = tmp_path / "joined"
    add_part(str(joined), weights)
    complete(str(joined), str(served))
    read = logits(load_model(joined))
    assert torch.equal(read, logits(load_model(sent)))
    assert not torch.equal(read, logits(load_model(served)))


def write_modelopt(folder: Path, **quantization: Any) -> None:
    """The file beside config.json, which then says nothing about it."""
    content = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    described = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": described}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("form", "suffix", "described"),
    [
        ("tensor", "_scale", {"quant_method": "fp8"}),
        ("channel", "_scale", {"quant_method": "fp8"}),
        ("block", "_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
        ("tensor", "_scale", compressed("tensor")),
        ("channel", "_scale", compressed("channel")),
        ("block", "_scale", compressed("block", block_structure=list(BLOCK))),
        ("tensor", "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ],
    ids=[
        "fp8-tensor",
        "fp8-channel",
        "fp8-block",
        "compressed-tensor",
        "compressed-channel",
        "compressed-block",
        "modelopt-in-config-json",
    ],
)
def test_float8_weights_are_read_with_their_scales(
    form: str, suffix: str, described: dict[str, Any], tmp_path: Path
) -> None:
    written = write_float8(tmp_path, form, suffix)
    edit(tmp_path, quantization_config=described)
    check(written)


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        ("FP8", "tensor"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "flat channel"),
        ("FP8_PB_WO", "modelopt block"),
        ("fp8_pb_wo", "modelopt block"),
    ],
)
def test_modelopts_own_file_is_read(algorithm: str, form: str, tmp_path: Path) -> None:
    written = write_float8(tmp_path, form)
    write_modelopt(tmp_path, quant_algo=algorithm, exclude_modules=["lm_head"])
    check(written)


def test_modelopts_layers_may_have_float8_schemes_of_their_own(tmp_path: Path) -> None:
    written = write_float8(tmp_path, "tensor")
    layers = {"backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8"}}
    write_modelopt(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    check(written)


@pytest.mark.parametrize("algorithm", ["FP8", None], ids=["fp8", "weights-unquantized"])
def test_a_quantized_kv_cache_is_said_to_stay_as_it_is(
    algorithm: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_peer("nemotron-h").save_pretrained(tmp_path)
    plain = logits(load_model(tmp_path))
    write_modelopt(tmp_path, quant_algo=algorithm, kv_cache_quant_algo="NVFP4")
    with caplog.at_level(logging.INFO, logger="mamba_eagle.models"):
        assert torch.equal(logits(load_model(tmp_path)), plain)
    assert "the KV cache uses the dtype of --kv-cache-dtype, not NVFP4" in caplog.text
    assert ("weights are modelopt (FP8)" in caplog.text) == (algorithm == "FP8")


# ── NVFP4 ──


def write_nvfp4(folder: Path) -> Written:
    """A checkpoint whose layers' matrices are NVFP4 where their width allows it."""
    make_peer("nemotron-3-nano").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    exact, stored = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if not name.endswith("_proj.weight") or value.shape[1] % 16:
            continue
        rows, columns = value.shape
        shape = (rows, columns // 2)
        packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scale = (torch.rand(rows, columns // 16, generator=generator) + 1).to(torch.float8_e4m3fn)
        stored |= {name: packed, f"{name}_scale": scale, f"{name}_scale_2": torch.tensor(0.01)}
        exact[name] = dequantize(packed, scale, None, torch.full((1, 1), 0.01))
    save_file(stored, folder / "model.safetensors")
    write_modelopt(folder, quant_algo="W4A16_NVFP4")
    assert len(stored) >= len(exact) + 8
    return Written(folder, exact)


def test_nvfp4_weights_are_read_with_both_scales(tmp_path: Path) -> None:
    check(write_nvfp4(tmp_path))


def test_weights_are_rounded_to_the_nearest_nvfp4() -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[3] = 0.0
    matrix = nvfp4_groups(weight)
    found, grid = matrix.dequantize(), torch.tensor([*E2M1, *(-x for x in E2M1)])
    scale = (matrix.scale.float() * matrix.factor).repeat_interleave(16, 1)
    nearest = (weight.float()[..., None] - scale[..., None] * grid).abs().amin(-1)
    torch.testing.assert_close((found - weight.float()).abs(), nearest, rtol=0, atol=1e-6)
    assert (found - weight.float()).norm() / weight.float().norm() < 0.12
    assert found[3].abs().max() == 0.0
    assert torch.equal(nvfp4_groups(found).dequantize(), found)


def test_nvfp4_scales_that_are_missing_or_do_not_fit_are_all_named(tmp_path: Path) -> None:
    folder, exact = write_nvfp4(tmp_path)
    weights = load_file(folder / "model.safetensors")
    first, second, third = [name[:-8] for name in weights if name.endswith("_scale_2")][:3]
    del weights[f"{first}_scale"]
    weights[f"{second}_scale"] = weights[f"{second}_scale"][:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load_model(folder)
    text = str(refused.value)
    assert f"scale of {first}: there is no {first}_scale" in text
    assert f"scale of {second}: scales" in text and "in groups of 16" in text
    assert third not in text


# ── what is refused ──


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"quantization gptq \(bits 3\) is not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"awq \(bits 4, version 'gemv'\)"),
        ({"quant_method": "hqq"}, "quantization hqq is not supported; known: fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, r"modelopt \(NVFP4_AWQ\)"),
        (compressed("tensor", num_bits=4), r"compressed-tensors \(4-bit float per tensor\)"),
        (compressed("group", group_size=32), r"compressed-tensors \(8-bit float per group\)"),
        (compressed("channel", type="int"), r"compressed-tensors \(8-bit int per channel\)"),
    ],
    ids=["gptq", "awq", "other-tool", "nvfp4-awq", "fp4", "mxfp8", "int8"],
)
def test_other_schemes_are_refused_by_name(
    described: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_peer("bamba").save_pretrained(tmp_path)
    edit(tmp_path, quantization_config=described)
    with pytest.raises(UnsupportedModel, match=words):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"quant_algo": "W4A16_AWQ"}, r"modelopt \(W4A16_AWQ\)"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8"}},
            },
            r"modelopt \(FP8, W4A8\)",
        ),
        ({"quant_algo": "MIXED_PRECISION"}, r"modelopt \(MIXED_PRECISION\)"),
    ],
    ids=["awq", "mixed", "mixed-and-unnamed"],
)
def test_other_schemes_in_modelopts_own_file_are_refused_by_name(
    described: dict[str, Any], name: str, tmp_path: Path
) -> None:
    make_peer("nemotron-h").save_pretrained(tmp_path)
    write_modelopt(tmp_path, **described)
    with pytest.raises(UnsupportedModel, match=f"quantization {name} is not supported"):
        read_model_config(tmp_path)


def test_scales_that_are_missing_or_do_not_fit_are_all_named(tmp_path: Path) -> None:
    folder, _ = write_float8(tmp_path, "block", "_scale_inv")
    edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    weights = load_file(folder / "model.safetensors")
    mixer = "backbone.layers.0.mixer"
    del weights[f"{mixer}.out_proj.weight_scale_inv"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load_model(folder)
    text = str(refused.value)
    assert (
        f"scale of {mixer}.out_proj.weight: the weight is torch.float8_e4m3fn, but there is" in text
    )
    assert "up_proj.weight: scales [3, 2] do not fit [40, 64] in blocks of [16, 16]" in text
    assert "missing:" not in text
