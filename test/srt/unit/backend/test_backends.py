"""What runs where is decided in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mamba_eagle
from mamba_eagle import devices
from mamba_eagle.config import ConfigError
from mamba_eagle.devices import choose_backend, reason, resolve_device, resolve_dtype

PACKAGE = Path(mamba_eagle.__file__).parent
QUESTIONS = re.compile(
    r"\busable\(|_usable\(|device\.type|\.is_cuda|find_spec\(|isinstance\([^)]*[Ss]cheme"
)
# kernels/gpu.py answers launchers; train/ runs on whatever torchrun gives it; benchmarks print;
# parallel/distributed.py takes NCCL or gloo, parallel/sums/ what GPUs share
MAY_ASK = ("devices.py", "cpu/", "backend/", "kernels/gpu.py", "train/", "bench")
MAY_ASK += ("parallel/distributed.py", "parallel/sums/")


def test_only_backends_ask_for_a_device() -> None:
    asked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if QUESTIONS.search(line) and not name.startswith(MAY_ASK):
                asked.append(f"{name}:{number}: {line.strip()}")
    assert not asked


@pytest.mark.parametrize(
    "dtype, name", [(torch.float32, "cpu"), (torch.bfloat16, "torch"), (torch.float16, "torch")]
)
def test_a_cpu_takes_its_engine_for_float32_and_says_why(dtype: torch.dtype, name: str) -> None:
    backend = choose_backend(torch.device("cpu"), dtype)
    assert (backend.name, backend.dtype) == (name, dtype)
    assert str(dtype).removeprefix("torch.") in reason(backend)


def test_a_missing_gpu_is_refused_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_dtype_on_a_gpu() -> None:
    assert resolve_dtype("auto", "bfloat16", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", "bfloat16", torch.device("cuda")) == torch.float16
