"""Runs the few PTX instructions of kernels' inline assembly on a CPU, for all numbers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WHOLE = 0xFFFF_FFFF
KINDS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def pair(numbers: Sequence[Tensor]) -> Tensor:
    """Two 16-bit floats each in one register, the first in its low half."""
    low, high = (each.contiguous().view(torch.int16).long() & 0xFFFF for each in numbers)
    return low | high << 16


def floats(register: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A register's two 16-bit floats, as float64."""
    halves = register & 0xFFFF, register >> 16 & 0xFFFF
    return [half.to(torch.int16).view(dtype).double() for half in halves]


def run(code: str, outputs: int, given: Sequence[Tensor]) -> list[Tensor]:
    """$0 … $(outputs - 1), int64 of 32 bits. given: the registers after these."""
    registers = {f"${outputs + i}": value.long() & WHOLE for i, value in enumerate(given)}
    for line in code.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        to, *texts = (text.strip() for text in rest.split(","))
        args = [registers[t] if t in registers else torch.tensor(int(t, 0)) for t in texts]
        match name.partition(".")[0]:
            case "mov":
                made = args[0]
            case "shl":
                made = args[0] << args[1] & WHOLE
            case "shr":
                made = args[0] >> args[1]
            case "and":
                made = args[0] & args[1]
            case "lop3":
                assert int(args[3]) == 0xEA
                made = args[0] & args[1] | args[2]
            case "fma":
                dtype = KINDS[name.rpartition(".")[2]]
                factors = zip(*(floats(arg, dtype) for arg in args), strict=True)
                made = pair([(a * b + c).to(dtype) for a, b, c in factors])
            case _:
                raise AssertionError(line)
        registers[to] = made
    return [registers[f"${i}"] for i in range(outputs)]
