"""Weights that become float8, with a scale per row or per block."""

import json
from pathlib import Path

import pytest
import torch
from tiny_model import write_model

from mamba_eagle.config import EngineConfig
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.weights import MatrixLayer
from mamba_eagle.quantization.matrix import Float8Matrix, quantized
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble


@pytest.mark.parametrize("shape", [(48, 80), (3, 200, 130)])
def test_each_block_has_a_scale_of_its_own(shape: tuple[int, ...]) -> None:
    """Those at the ends may be smaller."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[..., :64] *= 1000
    found = quantized(weight, 64)
    rows, columns = shape[-2:]
    assert found.scale.shape == (*shape[:-2], -(-rows // 64), -(-columns // 64))
    assert found.block == (64, 64) and found.rounding is not None and found.rounding.group == 64
    assert found.scale[..., 0].min() > 100 * found.scale[..., 1].max()
    for part in (found.dequantize()[..., 64:] / weight[..., 64:], found.dequantize() / weight):
        assert ((part - 1).abs().quantile(0.9)) < 1 / 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_of_float8_numbers_fit_into_the_models_dtype(dtype: torch.dtype) -> None:
    """They are scaled afterwards, and float16 ends at 65504."""
    x, ends = torch.full((2, 1024), 0.5, dtype=dtype), torch.tensor([1, 2])
    weight = torch.full((2, 8, 1024), 0.25)
    wanted = torch.full((2, 8), 128.0, dtype=dtype)
    ops = LayerOps()
    product = ops.pack_matrix(quantized(weight[0]), dtype)
    experts = ops.pack_experts(quantized(weight), dtype)
    assert experts is not None
    torch.testing.assert_close(product(x, None), wanted)
    torch.testing.assert_close(experts(x, ends), wanted)


def test_dummy_weights_have_the_checkpoints_blocks(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", hidden_size=160)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    given = {"device": "cpu", "load_format": "dummy", "quantization": "fp8"}
    runner = assemble(resolve(EngineConfig(str(folder), speculative_algorithm="NONE", **given)))
    layers = [layer for layer in runner.model.modules() if isinstance(layer, MatrixLayer)]
    held = [matrix for layer in layers for matrix in layer.matrices.values()]
    in_float8 = [matrix for matrix in held if isinstance(matrix, Float8Matrix)]
    assert in_float8 and {matrix.block for matrix in in_float8} == {(128, 128)}
    # gates with fewer rows are published in 16 bits
    assert min(matrix.shape[-2] for matrix in in_float8) >= 128
