"""Which lines of benchmark/results answer a question."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.bench import results
from mamba_eagle.bench.results import Line

MODEL = "nemotron-nano-9b-v2"
TREE = "3x5x8"
INPUT_LEN = 256


class Series(NamedTuple):
    """Lines that differ in one number only."""

    label: str
    points: dict[int, float]  # that number: value


class Lines:
    """Result lines of one GPU. Of several that answer a question, the last one written counts."""

    def __init__(self, lines: Iterable[Line], gpu: str) -> None:
        self.all = [line for line in lines if line.get("gpu") == gpu]

    @classmethod
    def read(cls, files: Iterable[Path], gpu: str) -> Lines:
        return cls([line for file in files for line in results.read(file)], gpu)

    def find(self, name: str, **wanted: Any) -> list[Line]:
        """Lines of that name with the given fields, in the order they were written. Without
        ``engine`` they are our own, without ``quantization`` nothing was quantized, without
        ``ranks`` there was one GPU, and without ``drafter`` it is the tables'."""
        wanted = {"engine": None, "quantization": None, "ranks": None, "drafter": None, **wanted}
        return [
            line
            for line in self.all
            if line["name"] == name and all(line.get(k) == v for k, v in wanted.items())
        ]

    def series(self, label: str, by: str, name: str, **wanted: Any) -> Series:
        """Values against the field ``by``; no points without such lines."""
        points = {line[by]: line["value"] for line in self.find(name, **wanted)}
        return Series(label, dict(sorted(points.items())))

    def steps(self, label: str, name: str, **wanted: Any) -> Series:
        """A figure of bench_one_batch, or of a peer on the same geometry, against the batch."""
        wanted = {"model": MODEL, "input_len": INPUT_LEN, **wanted}
        return self.series(label, "batch", name, **wanted)
