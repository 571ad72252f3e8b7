"""The embedded model's training loop, and what the draft heads' loop has of it: the optimizer, the
clock, the stop signal, the device."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mamba_eagle.train.data import RowStream

DEFAULT_TOKENIZER = Path(__file__).resolve().parent.parent / "assets" / "mamba2-math-6m"
WARM_UP = 0.02  # of the run
LR_FLOOR = 0.005  # of the peak, at the end


def add_arguments(parser: argparse.ArgumentParser, minutes: float, lr: float) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=minutes, help="length of the run")
    parser.add_argument("--steps", type=int, help="length of the run in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate of AdamW")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch-rows", type=int, help="rows of a step (GPU 64, CPU 2)")
    parser.add_argument("--workers", type=int, help="processes that make the data")
    parser.add_argument("--extra-data", type=Path, help="a GSM8K train.jsonl to mix in (optional)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--log-every", type=int, default=50, help="steps between lines")
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


def set_precision() -> None:
    """Products of float32 matrices, the recurrence's, in TF32 where the GPU has it. No attention
    by cuDNN, which plans anew, for longer than a step takes, when it meets another length."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)


def autocast(device: str) -> torch.autocast:
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


@dataclass
class StopSignal:
    wanted: bool = False  # the run is to end after the current step


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Inside, SIGTERM or Ctrl-C asks for an end and does nothing else, so that the model can be
    saved. A second Ctrl-C is not waited for."""
    stop = StopSignal()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: object) -> None:
        print(f"stopping: {signal.Signals(number).name}", flush=True)
        stop.wanted = True
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


class Every:
    """True once per ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


def learning_rate(peak: float, fraction: float) -> float:
    """Linear warm-up, then linear decay to nearly nothing (arXiv 2502.15938)."""
    if fraction < WARM_UP:
        return peak * max(fraction, 1e-4) / WARM_UP
    return peak * max(LR_FLOOR, (1 - fraction) / (1 - WARM_UP))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Weight decay on matrices only: not on norms, biases, A, D and the convolutions."""
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


class Rescue:
    """A copy of the weights to fall back on when the loss stops being a number."""

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
    data: RowStream,
    compute_loss: Callable[[], Tensor],
    evaluate: Callable[[], str],
    save: Callable[[], None],
) -> None:
    """Trains ``model`` until the time or the steps of ``args`` are over, SIGTERM or Ctrl-C.

    Args:
        compute_loss: fetches a batch and returns its loss; called under autocast.
        evaluate: what to print every ``--eval-seconds``; called under autocast, without gradient.
        save: writes the checkpoint, every ``--save-seconds``. The last save is the caller's.
    """
    optimizer = make_optimizer(model, args.lr)
    progress = Progress(args.minutes, args.steps)
    rescue = Rescue(model)
    time_to_evaluate, time_to_save = Every(args.eval_seconds), Every(args.save_seconds)
    logged_at, logged_step = time.monotonic(), 0

    with stop_on_signals() as stop:
        while not (progress.done or stop.wanted):
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
