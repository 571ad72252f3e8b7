"""Folders that PEFT's ``save_pretrained`` writes: adapter_config.json and a safetensors file."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mamba_eagle.core import shown
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.config_json import read_json
from mamba_eagle.models.loader import CheckpointError, read_header, shortened
from mamba_eagle.models.stored import Stored

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MATRIX = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
OWN = r"(.*\.)?({})$"  # a module that a pattern means
MATCH_SECONDS = 0.05  # of processor time, for one name: a pattern can be made to take for ever
DTYPES = ("F32", "F16", "BF16")
MAX_CONFIG_BYTES = 1 << 20
# What changes more than W + scale · BA, with what to do instead.
MERGE = "merge the adapter into the model's weights and serve those"
REFUSED = {
    "use_dora": "DoRA scales the weights' columns: " + MERGE,
    "modules_to_save": "whole modules cannot be kept apart by request: " + MERGE,
    "lora_bias": "biases cannot be kept apart by request: train without",
    "use_qalora": "QALoRA pools its inputs: " + MERGE,
    "use_bdlora": "its matrices are block-diagonal: " + MERGE,
    "fan_in_fan_out": "no layer of these models stores its weight transposed",
    "layer_replication": "layers cannot be repeated by request: " + MERGE,
    "target_parameters": "routed experts take no adapter: train without them, or " + MERGE,
    "trainable_token_indices": "embeddings take no adapter: train without, or " + MERGE,
    "alora_invocation_tokens": "aLoRA begins within a prompt: train a plain one",
}


class AdapterError(ValueError):
    """A folder that cannot be served; the text names it and lists all that is wrong."""


class Pair(NamedTuple):
    """What is added to the matrix of a module: ``up (down x)``."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r], with the scale in it


@dataclass(frozen=True)
class PeftConfig:
    rank: int
    alpha: float
    ranks: Mapping[str, int]  # of modules that have another, by pattern
    alphas: Mapping[str, float]
    by_root: bool  # rsLoRA: the scale is alpha / √r

    def scale(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = _own(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def rank_of(self, module: str) -> int:
        return _own(self.ranks, module, self.rank)


def _own(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """A pattern is the end of a module's name, or a regular expression for it, as PEFT has it.

    Raises: TimeoutError
    """
    for pattern, value in patterns.items():
        if regex.match(OWN.format(pattern), module, timeout=MATCH_SECONDS):
            return value
    return otherwise


class PeftFolder:
    """A folder whose config and headers have been read: nothing of it but names and shapes."""

    def __init__(self, path: str) -> None:
        """Raises: AdapterError for what no model could serve."""
        self.path = Path(path)
        file = self.path / CONFIG
        if not file.is_file():
            raise AdapterError(f"{shown(path)} has no {CONFIG}: give the folder of a PEFT adapter")
        self.config = self._config(file)
        if not (weights := self.path / WEIGHTS).is_file():
            also = ", and files of pickled objects are not read" * any(self.path.glob("*.bin"))
            raise AdapterError(f"{path} has no {WEIGHTS}{also}: save it with safetensors")
        try:
            with safe_open(weights, framework="pt"):  # checks that tensors fill the file
                self.stored = read_header(weights)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{weights}: {error}; copy or download it again") from None
        self.modules = self._modules()

    def refuse(self, wrong: list[str]) -> None:
        """Raises: AdapterError if anything is wrong."""
        if wrong:
            raise AdapterError(f"{self.path}:\n  " + "\n  ".join(shortened(wrong)))

    def _config(self, file: Path) -> PeftConfig:
        try:
            if file.stat().st_size > MAX_CONFIG_BYTES:
                raise AdapterError(f"{file} has more than {MAX_CONFIG_BYTES} bytes")
            values = read_json(file)
        except (OSError, UnsupportedModel, CheckpointError) as error:
            raise AdapterError(str(error)) from None
        wrong = [f"{name} = {shown(values[name])}: {remedy}" for name, remedy in REFUSED.items()
                 if values.get(name)]  # fmt: skip
        if values.get("peft_type") != "LORA":
            wrong.append(f"peft_type = {shown(values.get('peft_type'))}: must be LORA")
        if values.get("bias") not in (None, "none"):
            wrong.append(f"bias = {shown(values['bias'])}: {REFUSED['lora_bias']}")
        for name in ("r", "lora_alpha"):
            if not _is_positive(values.get(name)):
                wrong.append(f"{name} = {shown(values.get(name))}: must be a number above 0")
        for name in ("rank_pattern", "alpha_pattern"):
            if not _is_pattern(values.get(name) or {}):
                wrong.append(f"{name} = {shown(values[name])}: must have a number for each pattern")
        self.refuse(wrong)
        patterns = (values.get("rank_pattern") or {}, values.get("alpha_pattern") or {})
        stable = bool(values.get("use_rslora"))
        return PeftConfig(values["r"], values["lora_alpha"], *patterns, stable)

    def _modules(self) -> dict[str, dict[str, str]]:
        """By module the names of its two matrices, A and B.

        Raises: AdapterError
        """
        found: dict[str, dict[str, str]] = {}
        wrong = []
        for name, stored in self.stored.items():
            matched = MATRIX.fullmatch(name)
            if matched is None:
                wrong.append(f"{name}: must be {PREFIX}MODULE.lora_A.weight, or lora_B")
            elif stored.dtype not in DTYPES:
                wrong.append(f"dtype of {name}: {stored.dtype} is not one of {', '.join(DTYPES)}")
            elif len(stored.shape) != 2:
                wrong.append(f"shape of {name}: {list(stored.shape)} is not that of a matrix")
            else:
                found.setdefault(matched["module"], {})[matched["side"]] = name
        for module, sides in found.items():
            if len(sides) < 2:
                wrong.append(f"missing: lora_{'AB'.strip(*sides)} of {module}")
            else:
                wrong += self._rank_problems(module, *(self.stored[sides[side]] for side in "AB"))
        if not self.stored:
            wrong.append(f"{WEIGHTS} has no tensor")
        self.refuse(wrong)
        return found

    def _rank_problems(self, module: str, down: Stored, up: Stored) -> list[str]:
        try:
            rank, _ = self.config.rank_of(module), self.config.scale(module)
        except TimeoutError:
            problem = f"a pattern of {CONFIG} takes too long to match: name modules"
            raise AdapterError(f"{self.path}: {module}: {problem}") from None
        return [
            f"rank of {module}: {size} in {side} {list(stored.shape)}, {rank} by {CONFIG}"
            for side, stored, size in (("A", down, down.shape[0]), ("B", up, up.shape[1]))
            if size != rank
        ]

    def rank(self) -> int:
        """The highest."""
        return max(self.stored[sides["A"]].shape[0] for sides in self.modules.values())

    def size_of(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of the module's matrix."""
        sides = self.modules[module]
        return self.stored[sides["B"]].shape[0], self.stored[sides["A"]].shape[1]

    def read(self) -> dict[str, Pair]:
        """The matrices in float32, by module. Raises: AdapterError"""
        found = {}
        try:
            with safe_open(self.path / WEIGHTS, framework="pt") as file:
                for module, sides in self.modules.items():
                    down, up = (file.get_tensor(sides[side]).float() for side in "AB")
                    found[module] = Pair(down, up * self.config.scale(module))
        except (SafetensorError, OSError, ValueError) as error:
            raise AdapterError(f"{self.path}: {error}; it has changed while it was read") from None
        self.refuse(
            [f"{module}: not all numbers are finite" for module, pair in found.items()
             if not all(bool(torch.isfinite(part).all()) for part in pair)]
        )  # fmt: skip
        return found


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, dict) or not all(map(_is_positive, value.values())):
        return False
    try:
        forms = [OWN.format(pattern) for pattern in value]
        return all(re.compile(form) and regex.compile(form) for form in forms)
    except (re.error, regex.error):
        return False
