"""Times the choice of tokens: the target's at every node, and the drafter's guesses of them.

    PYTHONPATH=python python -m benchmark.kernels.bench_sampling --output FILE.jsonl
    … --against FILE.py      # beside the ``sample_nodes`` of another version of kernels/sampling

Trees of 8 nodes and 3 lanes per request, vocabulary 131,072. Each launch is timed within a captured
graph. normal: logits are normal with a standard deviation of 2, so that top-p keeps most of the
vocabulary. peaked: 20 tokens of each row are 12 higher, as in text. torch: the drafter's guesses as
torch and the noise's own kernel make them.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmark.lib.launches import Report, graph_us
from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.sampling.tables import SampledNodes
from mamba_eagle.kernels.sampling.triton import sample_nodes
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.runner.sampling_state import SamplingState

VOCAB, NODES, LANES, TOPK = 131_072, 8, 3, 3
BATCHES = (1, 8, 32)
KINDS = {
    "T1": SamplingParams(temperature=1.0, seed=7),
    "T1 p.95 k50": SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=7),
    "T1 p.95": SamplingParams(temperature=1.0, top_p=0.95, seed=7),
    "T1 p.5": SamplingParams(temperature=1.0, top_p=0.5, seed=7),
    "penalties": SamplingParams(
        temperature=1.0, seed=7, repetition_penalty=1.1, frequency_penalty=0.1, top_k=50
    ),
}


def logits_of(shape: tuple[int, ...], peaked: bool) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(len(shape))
    logits = 2 * torch.randn(shape, generator=generator, device="cuda")
    if peaked:
        best = torch.randint(VOCAB, (*shape[:-1], 20), generator=generator, device="cuda")
        logits.scatter_add_(-1, best, torch.full(best.shape, 12.0, device="cuda"))
    return logits


def nodes_of(batch: int) -> SampledNodes:
    shape = (batch, NODES)
    above = torch.ones(NODES, NODES, dtype=torch.bool, device="cuda").tril().repeat(batch, 1, 1)
    tokens = torch.randint(VOCAB, shape, device="cuda")
    positions = torch.arange(NODES, device="cuda").repeat(batch, 1) + 256
    return SampledNodes(torch.arange(batch, device="cuda"), positions, tokens, above)


def state_of(batch: int, params: SamplingParams, backend: TritonBackend) -> SamplingState:
    state = SamplingState(batch, VOCAB, (), backend)
    for slot in range(batch):
        state.set(slot, params, 256, [])
    return state


def target(report: Report, backend: TritonBackend, forms: dict[str, Callable]) -> None:
    for batch in BATCHES:
        nodes = nodes_of(batch)
        for peaked in (False, True):
            logits = logits_of((batch, NODES, VOCAB), peaked)
            about = "peaked" if peaked else "normal"
            add = partial(report.add, num_bytes=logits.nbytes, batch=batch, logits=about)
            us = graph_us([lambda: backend.best_of(logits)])  # noqa: B023
            add(f"greedy {about} {batch * NODES}", "kernel_sampling_us", us, mode="greedy")
            for name, params in KINDS.items():
                state = state_of(batch, params, backend)
                for form, run in forms.items():
                    us = graph_us([partial(run, logits, nodes, state.tables)])
                    label = f"{name} {about} {form} {batch * NODES}"
                    add(label, "kernel_sampling_us", us, mode=name, path=form)


def drafts(report: Report, backend: TritonBackend) -> None:
    for batch in BATCHES:
        state = state_of(batch, KINDS["T1"], backend)
        slots, seeds = torch.arange(batch, device="cuda"), state.integer("seed")
        noise = NoiseKeys(slots, slots + 256, state.number("temperature"), seeds, VOCAB)
        for peaked in (False, True):
            logits = logits_of((batch, LANES, VOCAB), peaked).bfloat16()
            forms = {
                "without noise": lambda: backend.top_log_probs(logits.flatten(0, 1), TOPK),  # noqa: B023
                "triton": lambda: backend.top_noisy(logits, None, noise, TOPK),  # noqa: B023
                "torch": lambda: Backend.top_noisy(backend, logits, None, noise, TOPK),  # noqa: B023
            }
            about = "peaked" if peaked else "normal"
            for form, run in forms.items():
                label = f"drafts {about} {form} {batch * LANES}"
                fields = {"mode": "drafts", "path": form, "batch": batch, "logits": about}
                report.add(label, "kernel_sampling_us", graph_us([run]), logits.nbytes, **fields)


def other_version(path: str) -> Callable:
    spec = importlib.util.spec_from_file_location("other_sampling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sample_nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--against", help="another version of kernels/sampling/triton.py")
    args = parser.parse_args()
    backend = TritonBackend(Cuda(torch.device("cuda")), torch.bfloat16, False)
    forms = {"triton": sample_nodes}
    if args.against:
        forms["against"] = other_version(args.against)
    report = Report(args.output)
    drafts(report, backend)
    target(report, backend, forms)


if __name__ == "__main__":
    main()
