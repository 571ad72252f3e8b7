"""Which backend a runner will choose, which can be known without torch, which the server process
does not load: it fills in the settings' open ends. A wrong guess costs speed and nothing else."""

from pathlib import Path

from mamba_eagle.config import ModelSettings

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's on Linux, and Windows' within it


def on_cpu(config: ModelSettings) -> bool:
    """Whether the model will run on a CPU: with ``--device auto``, where no GPU has a driver."""
    if config.device != "auto":
        return config.device == "cpu"
    return not any(Path(driver).exists() for driver in GPU_DRIVERS)


def multiplies_integers(config: ModelSettings) -> bool:
    """Whether the backend on a CPU will have products of int8 groups."""
    return config.dtype in ("auto", "float32")
