"""GRPO on a CPU: the embedded model learns to write digits, with drafts on.

    python -m benchmark.grpo --steps 14

Each step samples groups of outputs from an engine, scores them by a rule, takes one step of
gradient ascent on a copy of the model in torch, and gives the engine the new weights: bfloat16, in
a folder that never leaves memory. The copy is used with the same rounded weights, so its logprobs
are those that the engine has sampled with. docs/rollouts.md has what came of it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from mamba_eagle import Engine
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.target import load_target

PROMPTS = ["Tom had", "In the garden there are", "The price of", "She went to"]
GROUP, LENGTH = 16, 24  # outputs of each prompt, tokens of each
SAMPLING = {"n": GROUP, "max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}
LEARNING_RATE = 2e-4


class Rollouts(NamedTuple):
    """B outputs of one prompt's length P and LENGTH tokens each."""

    tokens: Tensor  # [B, P + LENGTH] int64
    logprobs: Tensor  # [B, LENGTH] float32, as the engine has sampled them
    rewards: Tensor  # [B] float32
    drafts: float  # accepted tokens per step of the engine


def reward(text: str) -> float:
    """The share of digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def sample(engine: Engine, prompt: str, seed: int) -> Rollouts:
    ids = engine.tokenizer.encode(prompt)
    replies = engine.generate(
        input_ids=ids, sampling_params={**SAMPLING, "sampling_seed": seed}, return_logprob=True
    )
    metas = [reply["meta_info"] for reply in replies]
    return Rollouts(
        torch.tensor([ids + reply["output_ids"] for reply in replies]),
        torch.tensor([[item[0] for item in meta["output_token_logprobs"]] for meta in metas]),
        torch.tensor([reward(reply["text"]) for reply in replies]),
        sum(meta["spec_accept_length"] for meta in metas) / len(metas),
    )


def output_logprobs(model: CausalLM, tokens: Tensor) -> Tensor:
    """[B, P + LENGTH] -> [B, LENGTH], with gradient."""
    batch, length = tokens.shape
    context = FullSequenceContext(batch, length, tokens.device)
    logits = model.compute_logits(model(tokens.flatten(), context)).view(batch, length, -1)
    chosen = logits[:, -LENGTH - 1 : -1].log_softmax(-1)
    return chosen.gather(-1, tokens[:, -LENGTH:, None])[..., 0]


def loss_of(model: CausalLM, group: Rollouts) -> Tensor:
    """Each token's ratio to the distribution that it was sampled from, times how much better its
    output is than the others of its group."""
    better = (group.rewards - group.rewards.mean()) / (group.rewards.std() + 1e-4)
    ratio = (output_logprobs(model, group.tokens) - group.logprobs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * better[:, None], clipped * better[:, None]).mean()


def publish(engine: Engine, model: CausalLM, folder: Path, version: int) -> None:
    weights = {name: part.detach().bfloat16() for name, part in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    engine.update_weights_from_disk(str(folder), weight_version=str(version))


def train(engine: Engine, steps: int, folder: Path) -> None:
    model = load_target(EMBEDDED_MODEL, torch.device("cpu")).requires_grad_(True)
    exact = [part.detach().clone() for part in model.parameters()]  # float32; rounded to be used
    optimizer = torch.optim.Adam(exact, LEARNING_RATE)
    print("step  reward  accepted  difference of logprobs  seconds")
    for step in range(steps):
        began = time.process_time()
        groups = [sample(engine, prompt, step) for prompt in PROMPTS]
        model.zero_grad()
        for group in groups:
            (loss_of(model, group) / len(groups)).backward()
        with torch.no_grad():
            off = (output_logprobs(model, groups[0].tokens) - groups[0].logprobs).abs().max()
        for part, used in zip(exact, model.parameters()):
            part.grad = used.grad
        optimizer.step()
        with torch.no_grad():
            for part, used in zip(exact, model.parameters()):
                used.copy_(part.bfloat16())
        publish(engine, model, folder, step + 1)
        rewards, drafts = (
            sum(values) / len(groups)
            for values in zip(*((float(g.rewards.mean()), g.drafts) for g in groups))
        )
        spent = time.process_time() - began
        print(f"{step:4}  {rewards:6.3f}  {drafts:8.2f}  {off:22.4f}  {spent:7.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    settings: dict[str, Any] = {"device": "cpu", "in_process": True, "max_running_requests": 16}
    settings["speculative_adaptive"] = False  # drafts in every step, whatever they are worth
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name, Engine(**settings) as engine:
        folder = Path(name) / "weights"
        shutil.copytree(EMBEDDED_MODEL, folder)
        train(engine, steps, folder)


if __name__ == "__main__":
    main()
