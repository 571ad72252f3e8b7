"""The loop: steps, checkpoints, progress. What it computes is a function of settings and data, so a
run that was stopped and went on gives the weights of one that was not."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.models.base import CausalLM
from mamba_eagle.train import loop
from mamba_eagle.train.checkpoint import save_weights
from mamba_eagle.train.drafter.acceptance import Acceptance, measure_acceptance
from mamba_eagle.train.drafter.batches import Answer, Batches, Split, to_rows
from mamba_eagle.train.drafter.recipe import Recipe, draft_loss
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.target import ask_target
from mamba_eagle.train.drafter.world import World

WARM_UP = 0.03  # of the run
LR_FLOOR = 0.01  # of the peak, at the end
MEASUREMENTS = 10
MAX_BROKEN_STEPS = 20


class Diverged(RuntimeError):
    """The loss stays no number."""


def cosine(fraction: float) -> float:
    """Share of the peak learning rate at ``fraction`` of the run: linear warm-up, then half a
    cosine (arXiv 1608.03983)."""
    if fraction < WARM_UP:
        return fraction / WARM_UP
    done = (fraction - WARM_UP) / (1 - WARM_UP)
    return LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Trains ``recipe.module`` on the answers of one ``Split``; a checkpoint in the output folder
    is where it begins."""

    def __init__(
        self, settings: TrainSettings, recipe: Recipe, target: CausalLM, data: Split, world: World
    ) -> None:
        self.settings, self.recipe, self.target, self.world = settings, recipe, target, world
        self.folder, self.data = Path(settings.output), data
        self.batches = Batches(
            data.training,
            settings.batch_size,
            settings.micro_tokens,
            settings.depth,
            settings.seed,
        )
        epochs = settings.epochs * self.batches.steps_per_epoch
        self.steps = settings.steps or max(1, math.ceil(epochs))
        self.eval_every = settings.eval_every or max(1, self.steps // MEASUREMENTS)
        self.lr = settings.lr or 0.5 / target.config.hidden_size
        self.parameters = list(recipe.module.parameters())
        self.optimizer = loop.make_optimizer(recipe.module, self.lr)
        self.number = self.trained_tokens = 0
        # steps whose gradient was no number: of the run, and in a row up to now
        self.broken = torch.zeros(2, device=world.device)
        for parameter in self.parameters:  # so that all processes have all gradients
            parameter.grad = torch.zeros_like(parameter)
        self.seconds = 0.0  # of all runs together

    def run(self) -> bool:
        """Returns: False when SIGTERM or Ctrl-C has ended it before its last step. Either way the
        checkpoint is written.

        Raises: Diverged
        """
        self._resume()
        self._log_begin()
        time_to_save = loop.Every(self.settings.save_seconds)
        began = time.monotonic() - self.seconds
        with loop.stop_on_signals() as stop:
            while self.number < self.steps and not self._anywhere(stop.wanted):
                loss = self._step()
                self.seconds = time.monotonic() - began
                if self.number % self.settings.log_every == 0 or self.number in (1, self.steps):
                    self._log(loss)
                if self.number % self.eval_every == 0 and self.number < self.steps:
                    self.world.say(f"step {self.number} held out: {self.measure()}")
                if time_to_save():
                    self.save()
        self.save()
        return self.number >= self.steps

    def _anywhere(self, wanted: bool) -> bool:
        """Whether any process was told to stop: then all stop after the same step."""
        if self.world.size == 1:
            return wanted
        told = torch.tensor(float(wanted), device=self.world.device)
        return bool(self.world.add_up(told) > 0)

    def _step(self) -> Tensor:
        """One optimizer step; gives its loss. On a GPU the host does not wait for it, so it makes
        the next batch meanwhile."""
        world, step = self.world, self.batches.step(self.number, self.world.rank, self.world.size)
        lr = self.lr * cosine((self.number + 1) / self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros((), device=world.device)
        for group in step.passes:
            total += self._backward(group, step.guesses)
        world.add_up_gradients(self.parameters)
        self.number += 1
        self._update(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0))
        self.trained_tokens += step.guesses[0]
        return world.add_up(total)

    def _backward(self, group: Sequence[Answer], guesses: list[int]) -> Tensor:
        rows = to_rows(group, self.settings.depth, self.world.device)
        taught = ask_target(self.target, rows)
        with loop.autocast(self.world.device.type):
            loss = draft_loss(self.recipe, rows, taught, guesses)
        loss.backward()
        return loss.detach()

    def _update(self, norm: Tensor) -> None:
        """A step whose gradient is no number changes nothing."""
        is_broken = norm.isfinite().logical_not().float()
        # how GradScaler tells a fused optimizer, and the host need not know
        self.optimizer.found_inf = is_broken  # type: ignore[attr-defined]
        self.optimizer.step()
        self.broken = (self.broken + is_broken) * torch.stack([torch.ones_like(norm), is_broken])

    def _check_gradients(self) -> None:
        """Raises: Diverged when too many steps in a row were left out."""
        left_out, in_a_row = map(int, self.broken.tolist())
        if left_out:
            self.world.say(f"{left_out} steps left out: their gradient was no number")
        if in_a_row >= MAX_BROKEN_STEPS:
            raise Diverged(
                f"the gradient was no number for {in_a_row} steps in a row at a learning rate "
                f"of {self.lr:.1e}: start again with a lower --lr and another --output"
            )

    def measure(self) -> Acceptance:
        """On the held-out answers."""
        with loop.autocast(self.world.device.type):
            return measure_acceptance(
                self.recipe,
                self.target,
                self.data.held_out,
                self.settings.depth,
                self.settings.micro_tokens,
                self.world,
            )

    # ── progress ──

    def _log_begin(self) -> None:
        count = sum(parameter.numel() for parameter in self.parameters)
        self.world.say(
            f"{self.settings.algorithm} head of {count / 1e6:.2f} M parameters; "
            f"{len(self.data.training)} answers to train on, {len(self.data.held_out)} held out; "
            f"{self.steps} steps of {self.settings.batch_size}, lr {self.lr:.1e}"
        )
        self._logged = (time.monotonic(), self.trained_tokens)

    def _log(self, loss: Tensor) -> None:
        shown = loss.item()  # waits for the GPU, so the speed below is true
        now, (then, tokens) = time.monotonic(), self._logged
        speed = (self.trained_tokens - tokens) / max(now - then, 1e-9)
        lr = self.optimizer.param_groups[0]["lr"]
        self.world.say(
            f"step {self.number}/{self.steps} loss {shown:.4f} lr {lr:.2e} {speed:.0f} tokens/s"
        )
        self._logged = (now, self.trained_tokens)
        self._check_gradients()

    # ── checkpoints ──

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "training.pt"

    def save(self) -> None:
        """What a later run needs to go on, and the head as it is now, ready to be served. Nothing
        is random but the order of the data, and that follows from the step."""
        if not self.world.is_first:
            return
        state: dict[str, Any] = {
            "step": self.number,
            "trained_tokens": self.trained_tokens,
            "seconds": self.seconds,
            "module": self.recipe.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)
        save_weights(self.recipe.weights(), self.folder, self.recipe.config)

    def _resume(self) -> None:
        if not self._checkpoint.is_file():
            return
        state = torch.load(self._checkpoint, map_location=self.world.device, weights_only=True)
        self.recipe.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.number, self.trained_tokens = state["step"], state["trained_tokens"]
        self.seconds = state["seconds"]
        self.world.say(f"going on from {self._checkpoint}, step {self.number}")
