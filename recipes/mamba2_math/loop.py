"""The embedded model's training loop: flags, schedule, recovery from a non-finite loss."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mamba2_math.data import SequenceStream
from mamba_eagle.train.trainer import autocast, make_optimizer, stop_on_signals

WARM_UP = 0.02  # fraction of the run in which the learning rate rises
LR_FLOOR = 0.005  # learning rate at the end, relative to its peak


def add_arguments(parser: argparse.ArgumentParser, minutes: float, lr: float) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=minutes, help="length of the run")
    parser.add_argument("--steps", type=int, help="length of the run in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate of AdamW")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument(
        "--batch-rows", type=int, help="sequences per step; default: 64 on a GPU, 2 on a CPU"
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that generate the data; default: all cores but two, at most 12",
    )
    parser.add_argument("--extra-data", type=Path, help="a GSM8K train.jsonl to mix in (optional)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--log-every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--eval-seconds", type=float, default=60.0)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--eval-count", type=int, default=100, help="validation problems")


def fill_defaults(args: argparse.Namespace) -> None:
    """The defaults that depend on the machine."""
    cores = len(os.sched_getaffinity(0))
    if args.workers is None:
        args.workers = max(1, min(12, cores - 2))
    if args.batch_rows is None:
        args.batch_rows = 64 if args.device.startswith("cuda") else 2


class Progress:
    """How far a run is, from 0 to 1: by steps when given, else by elapsed time."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self._seconds, self._steps = minutes * 60, steps
        self._start = time.monotonic()
        self.step = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        done = self.step / self._steps if self._steps else self.elapsed / self._seconds
        return min(done, 1.0)

    @property
    def done(self) -> bool:
        return self.fraction >= 1.0

    def restart_clock(self) -> None:
        """The first step compiles and allocates; time counts from after it."""
        self._start = time.monotonic()


def learning_rate(peak: float, fraction: float) -> float:
    """Linear warm-up, then linear decay to nearly nothing (arXiv 2502.15938)."""
    if fraction < WARM_UP:
        return peak * max(fraction, 1e-4) / WARM_UP
    return peak * max(LR_FLOOR, (1 - fraction) / (1 - WARM_UP))


class Every:
    """Returns True at most once per ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Rescue:
    """A copy of the weights to return to when the loss is no longer finite."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.lr_scale = 1.0
        self.keep()

    def keep(self) -> None:
        self._copy = {k: v.detach().clone() for k, v in self._model.state_dict().items()}

    def restore_if_broken(self, loss: float, optimizer: torch.optim.Optimizer) -> bool:
        if math.isfinite(loss):
            return False
        self._model.load_state_dict(self._copy)
        optimizer.state.clear()
        self.lr_scale *= 0.5
        print(f"loss is {loss}: back to the last good weights, lr halved", flush=True)
        return True


def run(
    args: argparse.Namespace,
    model: nn.Module,
    data: SequenceStream,
    compute_loss: Callable[[], Tensor],
    evaluate: Callable[[], str],
    save: Callable[[], None],
) -> None:
    """Trains ``model`` until the minutes or steps of ``args`` have passed, or SIGTERM or Ctrl-C.

    Args:
        compute_loss: fetches a batch and returns its loss; called under autocast.
        evaluate: what to print every ``--eval-seconds``; called under autocast, without gradient.
        save: writes the checkpoint every ``--save-seconds``; after the run it is up to the caller.
    """
    optimizer = make_optimizer(model, args.lr)
    progress = Progress(args.minutes, args.steps)
    rescue = Rescue(model)
    time_to_evaluate, time_to_save = Every(args.eval_seconds), Every(args.save_seconds)
    logged_at, logged_step = time.monotonic(), 0

    with stop_on_signals() as stop:
        while not (progress.done or stop.received):
            lr = learning_rate(args.lr, progress.fraction) * rescue.lr_scale
            for group in optimizer.param_groups:
                group["lr"] = lr
            with autocast(args.device):
                loss = compute_loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            if progress.step == 1:
                print(f"step 1 loss {loss.item():.3f}, {progress.elapsed:.1f} s", flush=True)
                progress.restart_clock()
                logged_at, logged_step = time.monotonic(), 1
            elif progress.step % args.log_every == 0:
                value = loss.item()  # waits for the GPU, so the speed below is true
                now = time.monotonic()
                tokens = (progress.step - logged_step) * args.batch_rows * args.length
                print(
                    f"step {progress.step} {progress.elapsed:.0f} s loss {value:.4f} lr {lr:.2e} "
                    f"{tokens / (now - logged_at) / 1e3:.0f} k tok/s, "
                    f"waited for data {data.waited}",
                    flush=True,
                )
                rescue.restore_if_broken(value, optimizer)
                if time_to_evaluate():
                    with autocast(args.device), torch.no_grad():
                        print("validation:", evaluate(), flush=True)
                    rescue.keep()
                if time_to_save():
                    save()
                logged_at, logged_step = time.monotonic(), progress.step
