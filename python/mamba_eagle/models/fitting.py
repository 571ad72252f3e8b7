"""Whether a model's weights fit in memory, known before the first of them is read."""

from torch import nn

from mamba_eagle.config import ConfigError
from mamba_eagle.layers.weights import matrix_layers
from mamba_eagle.quantization.policy import Policy

ON_HOST, ON_GPU = ("int8", "int4"), ("fp8", "nvfp4")  # --quantization, by what multiplies them


def least_bytes(model: nn.Module, policy: Policy, stored: float) -> int:
    """What the weights take at least: a matrix that is rounded its bits, without scales; all else
    the shorter of the model's dtype and the file's.

    model: on any device. stored: bytes of an element in the files, on average.
    """
    holds = {
        f"{name}.{leaf}" if name else leaf
        for name, layer in matrix_layers(model)
        if layer.may_hold
        for leaf in layer.matrix_names
    }
    total = 0.0
    for name, weight in model.named_parameters():
        size = min(stored, weight.element_size())
        if name in holds and weight.ndim > 1 and (bits := policy.bits(name, weight)):
            size = min(size, bits / 8)
        total += weight.numel() * size
    return int(total)


def refuse_too_large(
    model: nn.Module, path: str, policy: Policy, stored: float, free: int, on_host: bool
) -> None:
    """free: bytes that may be taken.

    Raises: ConfigError with what would fit, if the weights cannot.
    """
    needed = least_bytes(model, policy, stored)
    if needed <= free:
        return
    sizes = {
        mode: least_bytes(model, Policy(mode), stored) for mode in (ON_HOST if on_host else ON_GPU)
    }
    shorter = [
        f"--quantization {mode} takes {size / 1e9:.1f} GB"
        for mode, size in sizes.items()
        if size <= free
    ]
    remedy = " or ".join(shorter) or "no --quantization makes it small enough: take a smaller model"
    where = "memory" if on_host else "GPU memory"
    raise ConfigError(
        [
            f"{path}: its weights take at least {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
            f"{where} are free; {remedy}, or divide it by --tp-size over more devices"
        ]
    )
