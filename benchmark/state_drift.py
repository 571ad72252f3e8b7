"""How far 16-bit recurrent states drift from float64 in 10,000 tokens, by how they are rounded.

    python -m benchmark.state_drift

One layer on the CPU, whose heads forget within 10 to 100,000 tokens. The state is rounded to the
dtype of the state slots each time it is written: after each token, as plain decoding with snapshots
does, after every 4 (snapshots, trees) or every 16 (folds). Prints a table and writes
benchmark/results/state_drift.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.rounding import StateRounding, Stochastic
from mamba_eagle.bench import facts, results
from mamba_eagle.kernels.tree_verify.torch import Rows, fold

RESULTS = Path(__file__).parent / "results" / "state_drift.jsonl"
MEMORY = (10, 100, 1_000, 10_000, 100_000)  # tokens in which a head forgets all but 1/e
SPREADS = {"varied": 1.0, "steady": 0.05}
HEAD_DIM, STATE_SIZE, STEP = 16, 32, 0.1
CHOICES = [
    ("float32", "nearest"),
    ("float16", "nearest"),
    ("float16", "stochastic"),
    ("bfloat16", "nearest"),
    ("bfloat16", "stochastic"),
]


class Sequence64(NamedTuple):
    """What tokens feed into the recurrence, and the state after them in float64."""

    rows: Rows  # [1, tokens, …]
    A: Tensor  # [H]
    state: Tensor  # [H, P, N] float64


def random_sequence(tokens: int, seed: int, spread: float) -> Sequence64:
    """Inputs of mean 0.3. spread: their standard deviation. If it is small, a token adds about the
    same as the one before, and rounding to nearest loses the same part each time; if it is large,
    the inputs themselves act as noise."""
    generator = torch.Generator().manual_seed(seed)
    heads = len(MEMORY)
    x = spread * torch.randn(1, tokens, heads, HEAD_DIM, generator=generator) + 0.3
    B = spread * torch.randn(1, tokens, 1, STATE_SIZE, generator=generator) + 0.3
    dt = STEP * (0.5 + torch.rand(1, tokens, heads, generator=generator))
    A = -1.0 / (STEP * torch.tensor(MEMORY, dtype=torch.float64))
    state = torch.zeros(1, heads, HEAD_DIM, STATE_SIZE, dtype=torch.float64)
    for t in range(tokens):
        decay = (dt[:, t].double() * A).exp()[..., None, None]
        dtx = (dt[:, t, :, None].double() * x[:, t].double())[..., None]
        state = decay * state + dtx * B[:, t, :, None].double()
    return Sequence64(Rows(x, B, dt, dt), A.float(), state[0])


def state_after(sequence: Sequence64, every: int, rounding: StateRounding) -> Tensor:
    """The state that is written every ``every`` tokens: [H, P, N]."""
    (x, B, dt, _), A, _ = sequence
    tokens = x.shape[1]
    state = torch.zeros(1, *sequence.state.shape)
    slots = torch.zeros(1, dtype=torch.int64)
    for first in range(0, tokens, every):
        span = slice(first, min(first + every, tokens))
        L = (dt[:, span] * A).cumsum(1)
        rows = Rows(x[:, span], B[:, span], dt[:, span], L)
        seen = torch.ones(1, L.shape[1], dtype=torch.bool)
        after = fold(rows, seen, L[:, -1], state)
        keys = rounding.keys(slots, torch.tensor([span.stop]))
        state = rounding.round(after, keys, layer=0).float()
    return state[0]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def measure(sequences: Sequence[Sequence64], every: int, dtype: str, mode: str) -> results.Line:
    """Mean errors over the sequences, of the whole state and of the head that forgets last."""
    whole, slowest = 0.0, 0.0
    for seed, sequence in enumerate(sequences):
        stored: torch.dtype = getattr(torch, dtype)
        rounding = StateRounding(stored)
        if mode == "stochastic" and stored != torch.float32:
            rounding = Stochastic(stored, torch.tensor([seed]))
        state = state_after(sequence, every, rounding)
        whole += error(state, sequence.state) / len(sequences)
        slowest += error(state[-1], sequence.state[-1]) / len(sequences)
    return {
        "dtype": dtype,
        "rounding": mode,
        "tokens_per_write": every,
        "relative_error": float(f"{whole:.3g}"),
        "slowest_head": float(f"{slowest:.3g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--tokens-per-write", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sequences", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    writes = " | ".join(f"every {n}" for n in args.tokens_per_write)
    print(f"| inputs | states | rounded | {writes} |")
    print("|---|---|---|" + "---|" * len(args.tokens_per_write))
    for inputs, spread in SPREADS.items():
        sequences = [random_sequence(args.tokens, seed, spread) for seed in range(args.sequences)]
        for dtype, mode in CHOICES:
            made = [measure(sequences, every, dtype, mode) for every in args.tokens_per_write]
            cells = [f"{line['relative_error']:.1e} ({line['slowest_head']:.1e})" for line in made]
            print(f"| {inputs} | {dtype} | {mode} | " + " | ".join(cells) + " |", flush=True)
            lines += [{"inputs": inputs, **line} for line in made]
    where = {"machine": facts.cpu_model(), "commit": facts.commit(), "date": facts.today()}
    about = {"tokens": args.tokens, "sequences": args.sequences}
    results.write(args.results, [{**line, **about, **where} for line in lines])


if __name__ == "__main__":
    main()
