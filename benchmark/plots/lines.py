"""Reads benchmark/results: which line is the figure of a question."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

MODEL = "nemotron-nano-9b-v2"
TREE = "3x5x8"
INPUT_LEN = 256


class Series(NamedTuple):
    """Lines that differ in one number only."""

    label: str
    points: dict[int, float]  # that number: value


class Lines:
    """Result lines of one GPU; of several that answer a question, the last written counts."""

    def __init__(self, lines: Iterable[Line], gpu: str) -> None:
        self.all = [line for line in lines if line.get("gpu") == gpu]

    @classmethod
    def read(cls, files: Iterable[Path], gpu: str) -> Lines:
        lines = []
        for file in files:
            lines += [json.loads(text) for text in file.read_text().splitlines() if text.strip()]
        return cls(lines, gpu)

    def find(self, name: str, **wanted: Any) -> list[Line]:
        """Lines of that name whose fields are as wanted, in the order they were written.

        engine: ours unless it is wanted otherwise."""
        wanted = {"engine": None, **wanted}
        return [
            line
            for line in self.all
            if line["name"] == name and all(line.get(k) == v for k, v in wanted.items())
        ]

    def series(self, label: str, by: str, name: str, **wanted: Any) -> Series:
        """Value against the field ``by``; without such lines, no points."""
        points = {line[by]: line["value"] for line in self.find(name, **wanted)}
        return Series(label, dict(sorted(points.items())))

    def steps(self, label: str, name: str, **wanted: Any) -> Series:
        """A figure of bench_one_batch or of a peer on the compared geometry, against the batch."""
        wanted = {"model": MODEL, "input_len": INPUT_LEN, **wanted}
        return self.series(label, "batch", name, **wanted)
