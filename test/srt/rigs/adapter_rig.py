"""Random adapters, the same merged into the weights, and engines that serve both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mamba_eagle.lora.peft import AdapterError
from mamba_eagle.message import AdapterRead, DropAdapter, LoadAdapter, UnloadAdapter
from mamba_eagle.offline import OfflineEngine

PREFIX = "base_model.model."
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "up_proj", "down_proj")
LEAVES += ("gate_proj", "input_linear", "output_linear")
STRENGTH = 2.0  # of what is added, beside the weight's own


def module_names(model: Path, leaves: Sequence[str] = LEAVES, without: str = "?") -> list[str]:
    names = load_file(model / "model.safetensors")
    found = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [name for name in found if name.rpartition(".")[2] in leaves and without not in name]


def write_adapter(
    folder: Path,
    model: Path,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] | None = None,
    **config: Any,
) -> Path:
    """For ``modules``, or all of the model's. The scale is 2, unless ``config`` says otherwise."""
    weights, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(seed)
    tensors = {}
    for module in module_names(model) if modules is None else modules:
        weight = weights[f"{module}.weight"].float()
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) * weight.std() * STRENGTH / 2
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down
        tensors[f"{PREFIX}{module}.lora_B.weight"] = up
    return write_tensors(folder, tensors, **{"r": rank, "lora_alpha": 2 * rank, **config})


def write_tensors(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "bias": "none", "target_modules": list(LEAVES), **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merge(folder: Path, model: Path, adapter: Path, scale: float = 2.0) -> Path:
    """A checkpoint with ``scale · B A`` added to its weights, in float32."""
    shutil.copytree(model, folder)
    weights = {k: v.float() for k, v in load_file(model / "model.safetensors").items()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] += scale * (up.double() @ down.double()).float()
    save_file(weights, folder / "model.safetensors")
    return folder


class Served:
    """The adapters of an engine: what scheduler and runners of a server do between them."""

    def __init__(self, engine: OfflineEngine, runners: Sequence[Any]) -> None:
        """runners: of all ranks."""
        self.scheduler, self.runners = engine.scheduler.adapters, runners

    def load(self, name: str, folder: Path) -> str:
        """Returns what is wrong with it."""
        reply = self.scheduler.load(LoadAdapter(call_id=1, name=name, path=str(folder)))
        return self.settle() if reply is None else reply.problem

    def unload(self, name: str) -> str:
        return self.scheduler.unload(UnloadAdapter(call_id=2, name=name)).problem

    def settle(self) -> str:
        """The runners do what the scheduler asks them to."""
        reply = None
        for asked in self.scheduler.take_unsent():
            for runner in self.runners:
                if isinstance(asked, DropAdapter):
                    runner.adapters.drop(asked.number)
                    continue
                problem = ""
                try:
                    runner.adapters.keep(asked.number, runner.adapters.read(asked.path))
                except AdapterError as error:
                    problem = str(error)
                reply = self.scheduler.read(AdapterRead(number=asked.number, problem=problem))
        return "" if reply is None else reply.problem
