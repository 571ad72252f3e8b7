"""The training loop: steps, progress, saving and resuming. Its computations depend only on settings
and data, so a run that was stopped and resumed ends with the same weights as one that was not."""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.acceptance import Acceptance, measure_acceptance
from mamba_eagle.train.batches import Answer, Batches, Split, pad_answers
from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import run_target
from mamba_eagle.train.world import World


def set_precision() -> None:
    """Uses TF32 for float32 matrix products (those of the recurrence) on GPUs that have it.

    Attention by cuDNN is disabled: it plans again for every new length, which takes longer than a
    training step.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)


def autocast(device: str) -> torch.autocast:
    """bfloat16 matrix products on a GPU, nothing on a CPU."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


@dataclass
class StopSignal:
    received: bool = False  # the run should end after the current step


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Within this context SIGTERM and Ctrl-C only set ``received``, so that the caller can save the
    model. A second Ctrl-C interrupts at once."""
    stop = StopSignal()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(number: int, frame: object) -> None:
        print(f"stopping: {signal.Signals(number).name}", flush=True)
        stop.received = True
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, receive)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases, A, D, convolutions and
    embeddings."""
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def save_weights(weights: dict[str, Tensor], folder: Path, config: dict[str, Any]) -> None:
    """Writes weights and config, creating ``folder`` if needed. Floating-point tensors are stored
    as bfloat16. The weights file is replaced atomically, so readers never see a partial one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in weights.items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


WARM_UP = 0.03  # fraction of the run in which the learning rate rises
LR_FLOOR = 0.01  # learning rate at the end, relative to its peak
MEASUREMENTS_PER_RUN = 10  # of acceptance, unless --eval-every is given
MAX_SKIPPED_STEPS = 20  # consecutive steps with a non-finite gradient before the run is given up
CLIP_NORM = 1.0


class Diverged(RuntimeError):
    """Too many consecutive steps had a non-finite gradient."""


def cosine(fraction: float) -> float:
    """Learning rate relative to its peak after ``fraction`` of the run: linear warm-up, then a
    cosine from 1 down to LR_FLOOR (arXiv 1608.03983)."""
    if fraction < WARM_UP:
        return fraction / WARM_UP
    done = (fraction - WARM_UP) / (1 - WARM_UP)
    return LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Trains ``head.module`` on the answers of a ``Split``. If the output folder holds the state of
    a stopped run, training resumes from there."""

    def __init__(
        self,
        settings: TrainSettings,
        head: TrainableHead,
        target: CausalLM,
        data: Split,
        world: World,
    ) -> None:
        self.settings, self.head, self.target, self.world = settings, head, target, world
        self.folder, self.data = Path(settings.output), data
        self.state_path = self.folder / "training.pt"
        sizes = (settings.batch_size, settings.micro_tokens, settings.depth)
        self.batches = Batches(data.training, *sizes, settings.seed, head.max_anchors)
        epochs = settings.epochs * self.batches.steps_per_epoch
        self.steps = settings.steps or max(1, math.ceil(epochs))
        self.eval_every = settings.eval_every or max(1, self.steps // MEASUREMENTS_PER_RUN)
        self.lr = settings.lr or 0.5 / target.config.hidden_size
        self.parameters = list(head.module.parameters())
        self.optimizer = make_optimizer(head.module, self.lr)
        self.number = self.trained_tokens = 0
        # steps skipped for a non-finite gradient: in total, and consecutively up to now
        self.skipped = torch.zeros(2, device=world.device)
        for parameter in self.parameters:  # so that every process has a gradient for each of them
            parameter.grad = torch.zeros_like(parameter)
        self.seconds = 0.0  # including the runs that this one resumes

    def run(self) -> bool:
        """Trains to the last step and saves.

        Returns: False if SIGTERM or Ctrl-C ended it earlier; the state is saved in that case too.

        Raises: Diverged
        """
        self._resume()
        self._log_start()
        saved = time.monotonic()
        start = saved - self.seconds
        with stop_on_signals() as stop:
            while self.number < self.steps and not self._stop_anywhere(stop.received):
                loss = self._step()
                self.seconds = time.monotonic() - start
                if self.number % self.settings.log_every == 0 or self.number in (1, self.steps):
                    self._log_step(loss)
                if self.number % self.eval_every == 0 and self.number < self.steps:
                    self.world.log(f"step {self.number} held out: {self.measure()}")
                if (now := time.monotonic()) - saved >= self.settings.save_seconds:
                    saved = now
                    self.save()
        self.save()
        return self.number >= self.steps

    def _stop_anywhere(self, received: bool) -> bool:
        """Whether any process has received a signal, so that all stop after the same step."""
        if self.world.size == 1:
            return received
        total = self.world.sum(torch.tensor(float(received), device=self.world.device))
        return bool(total > 0)

    def _step(self) -> Tensor:
        """Takes one optimizer step and returns its loss. The host does not wait for a GPU, so it
        prepares the next batch in the meantime."""
        world, share = self.world, self.batches.step(self.number, self.world.rank, self.world.size)
        lr = self.lr * cosine((self.number + 1) / self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros((), device=world.device)
        for answers in share.passes:
            total += self._backward(answers, share.num_drafts)
        world.sum_gradients(self.parameters)
        self.number += 1
        self._update(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM))
        self.trained_tokens += share.num_drafts[0]
        return world.sum(total)

    def _backward(self, answers: Sequence[Answer], num_drafts: list[int]) -> Tensor:
        padded = pad_answers(answers, self.settings.depth, self.world.device)
        target = run_target(self.target, padded)
        with autocast(self.world.device.type):
            loss = self.head.loss(padded, target, num_drafts)
        loss.backward()
        return loss.detach()

    def _update(self, norm: Tensor) -> None:
        """Updates the weights. Steps with a non-finite gradient are skipped."""
        skip = norm.isfinite().logical_not().float()
        # A fused optimizer reads this flag (GradScaler's) on the GPU, so the host does not wait.
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()
        self.skipped = (self.skipped + skip) * torch.stack([torch.ones_like(norm), skip])

    def _check_gradients(self) -> None:
        """Raises: Diverged after too many consecutive skipped steps."""
        skipped, consecutive = map(int, self.skipped.tolist())
        if skipped:
            self.world.log(f"{skipped} steps skipped so far: their gradients were not finite")
        if consecutive >= MAX_SKIPPED_STEPS:
            raise Diverged(
                f"the gradients of the last {consecutive} steps were not finite (peak learning "
                f"rate {self.lr:.1e}): start again with a lower --lr and another --output"
            )

    def measure(self) -> Acceptance:
        """Acceptance on the held-out answers."""
        measured = (self.head, self.target, self.data.held_out)
        sizes = (self.settings.depth, self.settings.micro_tokens)
        with autocast(self.world.device.type):
            return measure_acceptance(*measured, *sizes, self.world)

    # ── progress ──

    def _log_start(self) -> None:
        count = sum(parameter.numel() for parameter in self.parameters)
        self.world.log(
            f"{self.settings.algorithm} head with {count / 1e6:.2f} M parameters; "
            f"{len(self.data.training)} answers to train on, {len(self.data.held_out)} held out; "
            f"{self.steps} steps of {self.settings.batch_size} answers, peak lr {self.lr:.1e}"
        )
        self._logged = (time.monotonic(), self.trained_tokens)

    def _log_step(self, loss: Tensor) -> None:
        value = loss.item()  # waits for the GPU, so the speed below is true
        now, (before, tokens) = time.monotonic(), self._logged
        speed = (self.trained_tokens - tokens) / max(now - before, 1e-9)
        lr = self.optimizer.param_groups[0]["lr"]
        self.world.log(
            f"step {self.number}/{self.steps} loss {value:.4f} lr {lr:.2e} {speed:.0f} tokens/s"
        )
        self._logged = (now, self.trained_tokens)
        self._check_gradients()

    # ── saving and resuming ──

    def save(self) -> None:
        """Writes the state from which a run resumes, and the head as it is now, ready to be served.
        No random state is needed: the order of the data follows from the step number."""
        if not self.world.is_first:
            return
        state: dict[str, Any] = {
            "step": self.number,
            "trained_tokens": self.trained_tokens,
            "seconds": self.seconds,
            "module": self.head.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = self.state_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_path)
        save_weights(self.head.weights(), self.folder, self.head.config)

    def _resume(self) -> None:
        if not self.state_path.is_file():
            return
        state = torch.load(self.state_path, map_location=self.world.device, weights_only=True)
        self.head.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.number, self.trained_tokens = state["step"], state["trained_tokens"]
        self.seconds = state["seconds"]
        self.world.log(f"resuming from {self.state_path}, step {self.number}")
