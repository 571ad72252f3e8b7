"""A target whose text a small head can learn, and ``train-drafter`` on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from tiny_model import VOCAB, write_model
from torch import Tensor

from mamba_eagle.train import command
from mamba_eagle.train.answers import AnswerFile
from mamba_eagle.train.prompts import Example

PROMPTS, HELD_OUT, NEW_TOKENS, DEPTH = 40, 8, 24, 3
ALGORITHMS = {
    "eagle": [],
    "eagle-mamba": ["--head-pattern", "M-"],
    "eagle3": ["--draft-vocab-size", "60"],
    "mtp": [],
    "dflash": ["--draft-layers", "2", "--max-anchors", "16"],
    "dspark": ["--draft-layers", "1", "--max-anchors", "16", "--markov-rank", "16"],
    "mtp-modules": ["--mtp-modules", str(DEPTH)],
    "mtp-mamba": ["--head-pattern", "M*"],
}


class Rig(NamedTuple):
    target: Path
    data: Path  # token_ids
    answers: Path  # answers.jsonl, complete

    def arguments(self, output: Path, name: str, *others: str) -> list[str]:
        """Of a run in ``output``; ``name`` is of ALGORITHMS."""
        values = {
            "target": self.target,
            "data": self.data,
            "output": output,
            "algorithm": algorithm(name),
            "device": "cpu",
            "held-out": HELD_OUT,
            "max-new-tokens": NEW_TOKENS,
            "depth": DEPTH,
            "batch-size": 8,
            "log-every": 1,
        }
        flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        return [*flags, *ALGORITHMS[name], *others]

    def folder(self, output: Path) -> Path:
        """``output``, with the answers in it."""
        output.mkdir(exist_ok=True)
        (output / "answers.jsonl").write_bytes(self.answers.read_bytes())
        return output

    def train(self, output: Path, name: str, *others: str) -> dict[str, Any]:
        """Runs on the answers that are there; gives training.json."""
        assert command.main(self.arguments(self.folder(output), name, *others)) == 0
        return read_record(output)

    def answered(self) -> list[Example]:
        done = AnswerFile(self.answers.parent, 0).read()
        return [done[line] for line in sorted(done)]


def make_rig(folder: Path) -> Rig:
    """The target's layers say little beside the embedding, which makes its text easy."""
    target = write_model(folder / "target")
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.2)
    save_file(tensors, target / "model.safetensors")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(3, 9))] for _ in range(PROMPTS)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    rig = Rig(target, data, folder / "answered" / "answers.jsonl")
    assert command.main(rig.arguments(rig.answers.parent, "eagle", "--steps", "1")) == 0
    return rig


def algorithm(name: str) -> str:
    return name.partition("-")[0]


def read_record(output: Path) -> dict[str, Any]:
    return json.loads((output / "training.json").read_text())


def read_weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "model.safetensors")


def losses(text: str) -> list[float]:
    """What the lines of progress say."""
    words = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return [float(line[line.index("loss") + 1]) for line in words if "loss" in line]
