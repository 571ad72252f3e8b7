"""What runs where is decided in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mamba_eagle
from mamba_eagle.backend import choose
from mamba_eagle.backend.choose import choose_backend, reason, resolve_device, resolve_dtype
from mamba_eagle.config import ConfigError
from mamba_eagle.kernels import numba_math

PACKAGE = Path(mamba_eagle.__file__).parent
QUESTIONS = re.compile(
    r"\busable\(|_usable\(|device\.type|\.is_cuda|find_spec\(|isinstance\([^)]*[Ss]cheme"
)
# kernels/gpu.py answers launchers; train/ runs on whatever torchrun gives it; benchmarks print;
# parallel/distributed.py takes NCCL or gloo, parallel/sums/ what GPUs share
MAY_ASK = ("backend/", "kernels/gpu.py", "train/", "bench", "parallel/distributed.py")
MAY_ASK += ("parallel/sums/",)


def test_only_backends_ask_for_a_device() -> None:
    asked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if QUESTIONS.search(line) and not name.startswith(MAY_ASK):
                asked.append(f"{name}:{number}: {line.strip()}")
    assert not asked


@pytest.mark.skipif(numba_math.numba is None, reason="numba is not installed")
@pytest.mark.parametrize(
    "dtype, name", [(torch.float32, "cpu"), (torch.bfloat16, "torch"), (torch.float16, "torch")]
)
def test_a_cpu_takes_numba_for_float32_and_says_why(dtype: torch.dtype, name: str) -> None:
    backend = choose_backend(torch.device("cpu"), dtype)
    assert (backend.name, backend.dtype) == (name, dtype)
    assert str(dtype).removeprefix("torch.") in reason(backend)


def test_without_numba_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_math, "numba", None)
    backend = choose_backend(torch.device("cpu"), torch.float32)
    assert backend.name == "torch" and "numba is not installed" in reason(backend)


def test_a_missing_gpu_is_refused_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_dtype_on_a_gpu() -> None:
    assert resolve_dtype("auto", "bfloat16", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", "bfloat16", torch.device("cuda")) == torch.float16
