"""Chooses the backend; the only module that asks for a device, a dtype or an installed package.

where            weights       needs                           backend
CPU              float32                                       cpu
CUDA GPU ≥ 8.0   any           triton; flashinfer if 16 bits   triton
anything else                                                  torch
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda, Host, Place
from mamba_eagle.config import ON_A_CPU, ON_A_GPU, ConfigError, EngineConfig
from mamba_eagle.kernels.gpu import TENSOR_CORES, capability

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU_DTYPES = (torch.float32,)
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


def resolve_device(name: str) -> torch.device:
    """The device for ``--device``: auto, cpu or cuda.

    Raises: ConfigError if cuda is requested and torch sees no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device cuda: torch sees no CUDA device; use --device cpu"])
    return torch.device(name)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank on its node: on GPUs each has its own.

    Raises: ConfigError as ``resolve_device``, and if there are fewer GPUs than ranks.
    """
    device = resolve_device(config.device)
    needed = config.ranks_per_node
    if device.type == "cpu" or config.num_ranks == 1:
        return device
    if (count := torch.cuda.device_count()) < needed:
        asked = f"--tp-size {config.tp_size}"
        if config.pp_size > 1:
            asked += f" --pp-size {config.pp_size}"
        if config.nnodes > 1:
            asked += f" --nnodes {config.nnodes}"
        raise ConfigError(
            [f"{asked}: each machine needs {needed} GPUs, and torch sees {count}; set it to less"]
        )
    return torch.device("cuda", rank % needed)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype for ``--dtype``. auto: float32 on a CPU, and on a GPU ``checkpoint``, the dtype in
    config.json."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    return getattr(torch, name)


def set_threads(count: int, device: torch.device) -> None:
    """Compute with ``count`` threads on a CPU, with torch and with the CPU engine. Call it before
    the first operation that may start threads. On a GPU the engine is not loaded."""
    if device.type != "cpu":
        torch.set_num_threads(count)
        return
    from mamba_eagle.cpu.threads import set_threads

    set_threads(count)


def choose_backend(
    device: torch.device, dtype: torch.dtype, prompt_dtype: str = "float32", exact: bool = False
) -> Backend:
    """The fastest backend for weights and activations of this dtype on this device. prompt_dtype:
    --cpu-prompt-dtype; exact: --exact, which the backend may still refuse for a model."""
    place: Place = Host() if device.type == "cpu" else Cuda(device)
    if place.on_host:
        return _host_backend(place, dtype, prompt_dtype)
    if not triton_usable(place.device, dtype):
        return Backend(place, dtype)
    # both need triton
    if exact:
        from mamba_eagle.backend.triton.exact_backend import ExactBackend

        return ExactBackend(place, dtype)
    from mamba_eagle.backend.triton.backend import TritonBackend

    return TritonBackend(place, dtype, flashinfer_usable(dtype))


def quantization_problems(quantizations: Mapping[str, str], backend: Backend) -> list[str]:
    """Why weights of few bits cannot be used with a backend. quantizations: values by flag."""
    wrong, here = [], f"the backend is {backend.name} ({reason(backend)})"
    for flag, kind in quantizations.items():
        if kind in ON_A_GPU and backend.name != "triton":
            wrong.append(
                f"{flag} {kind}: {here}, and only triton multiplies such weights, in 16 bits on a "
                f"GPU; use --device cuda, or {flag} int4 on a CPU"
            )
        if kind in ON_A_CPU and backend.name != "cpu":
            wrong.append(
                f"{flag} {kind}: {here}, and only numba multiplies such weights, in float32 on a "
                f"CPU; use --device cpu, or {flag} fp8"
            )
    return wrong


def _host_backend(place: Place, dtype: torch.dtype, prompt_dtype: str) -> Backend:
    if dtype not in CPU_DTYPES:
        return Backend(place, dtype)
    # numba takes half a second, which a start on a GPU does without
    from mamba_eagle.cpu.backend import CpuBackend
    from mamba_eagle.cpu.products.packed import PromptProduct, float_product, has_bfloat16_products

    short = prompt_dtype == "bfloat16" and has_bfloat16_products()
    return CpuBackend(place, PromptProduct if short else float_product)


def triton_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels support tensors of this dtype on this GPU."""
    capable = capability(device) >= TENSOR_CORES
    return dtype in TRITON_DTYPES and capable and find_spec("triton") is not None


def flashinfer_usable(dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and supports tensors of this dtype.

    It compiles each kernel on first use, which takes minutes for prefill attention, once per
    machine.
    """
    return dtype in FLASHINFER_DTYPES and find_spec("flashinfer") is not None


def reason(backend: Backend) -> str:
    """Why this backend was chosen, for the start-up log."""
    place, dtype = backend.place, str(backend.dtype).removeprefix("torch.")
    if backend.name == "cpu":
        return "float32 on a CPU"
    if backend.name == "triton":
        prompts = "with" if find_spec("flashinfer") else "without"
        return f"{dtype} on a GPU, triton is installed, {prompts} flashinfer"
    if place.on_host:
        return f"on a CPU, weights are {dtype}"
    if find_spec("triton") is None:
        return "on a GPU, triton is not installed"
    return f"{dtype} on a GPU of compute capability {capability(place.device)}"
