"""Parts of a training loop: precision, optimizer, a timer, an orderly end on signals."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


def set_precision() -> None:
    """Uses TF32 for float32 matrix products (those of the recurrence) on GPUs that have it.

    Attention by cuDNN is disabled: it plans anew for every new length, which takes longer than a
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


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases, A, D, convolutions and
    embeddings."""
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
