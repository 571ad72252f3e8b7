"""Markdown tables of result lines, and the marked block of a page that holds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.lib.lines import MODEL, TREE, Lines, Series

BLOCK = re.compile(r"(<!-- made by make_plots\.py -->\n).*?(<!-- end -->)", re.DOTALL)
BATCHES = (1, 8, 32)


class Question(NamedTuple):
    """One row per batch size: our figure, the goal and the peer's."""

    what: str
    ours: Series
    peer: Series
    goal: dict[int, float]
    unit: str
    higher_is_better: bool = False


def step_questions(lines: Lines) -> list[Question]:
    def ours(name: str, mode: str, tree: str) -> Series:
        return lines.steps("", name, mode=mode, tree=tree)

    def peers(name: str, tree: str) -> Series:
        return lines.steps("", name, engine="sglang", tree=tree)

    plain, deferred, snapshot = ("deferred", "plain"), ("deferred", TREE), ("snapshot", TREE)
    tree_goal = {1: 8.0, 8: 9.0, 32: 13.5}
    tree_step, tree_rate = peers("tree_step_ms", TREE), peers("tokens_per_s", TREE)
    return [
        Question(
            "plain step",
            ours("decode_step_ms", *plain),
            peers("decode_step_ms", "plain"),
            {1: 6.4, 8: 6.8, 32: 8.6},
            "ms",
        ),
        Question(
            "tree step, deferred", ours("tree_step_ms", *deferred), tree_step, tree_goal, "ms"
        ),
        Question("tree step, snapshot", ours("tree_step_ms", *snapshot), tree_step, {}, "ms"),
        Question(
            "plain decoding",
            ours("tokens_per_s", *plain),
            peers("tokens_per_s", "plain"),
            {},
            "token/s",
            higher_is_better=True,
        ),
        Question(
            "tree, deferred",
            ours("tokens_per_s", *deferred),
            tree_rate,
            {},
            "token/s",
            higher_is_better=True,
        ),
        Question(
            "tree, snapshot",
            ours("tokens_per_s", *snapshot),
            tree_rate,
            {},
            "token/s",
            higher_is_better=True,
        ),
        Question(
            "prompts of 256 tokens",
            ours("prefill_s", *plain),
            peers("prefill_s", "plain"),
            {32: 0.26},
            "s",
        ),
    ]


def kernel_questions(lines: Lines) -> list[Question]:
    def ours(name: str, nodes: int) -> Series:
        return lines.series("", "batch", name, nodes=nodes)

    def peers(name: str, nodes: int) -> Series:
        return lines.series("", "batch", name, nodes=nodes, engine="sglang")

    tree, decode = peers("kernel_snapshot_us", 16), peers("kernel_decode_us", 1)
    no_peer = Series("", {})
    return [
        Question(
            "tree of 16 nodes, no fold",
            ours("kernel_tree_us", 16),
            tree,
            {1: 6, 8: 22, 32: 72},
            "µs",
        ),
        Question(
            "tree of 16 nodes, with a fold",
            ours("kernel_tree_fold_us", 16),
            no_peer,
            {1: 9, 8: 40, 32: 140},
            "µs",
        ),
        Question("one node", ours("kernel_decode_us", 1), decode, {1: 4, 8: 19, 32: 66}, "µs"),
        Question("16 node states (snapshot)", ours("kernel_snapshot_us", 16), tree, {}, "µs"),
        Question(
            "8 node states (snapshot)",
            ours("kernel_snapshot_us", 8),
            peers("kernel_snapshot_us", 8),
            {},
            "µs",
        ),
    ]


def number(value: float | None) -> str:
    """Three digits, which is as far as runs agree; all of those before the point."""
    if value is None:
        return "–"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


class Verdict(NamedTuple):
    ratio: float | None  # how many times as good as the peer's figure; None: it has none
    missed: float  # share by which the goal is missed; 0 if it is met, or there is none

    @property
    def is_lost(self) -> bool:
        return self.missed > 0 or (self.ratio is not None and self.ratio < 1)


def verdict(question: Question, batch: int) -> Verdict:
    ours, peer = question.ours.points[batch], question.peer.points.get(batch)
    ratio = None
    if peer is not None:
        ratio = ours / peer if question.higher_is_better else peer / ours
    goal = question.goal.get(batch)
    return Verdict(ratio, 0.0 if goal is None else max(0.0, ours / goal - 1))


def table(questions: Sequence[Question]) -> str:
    """A question has rows for the batch sizes that we measured."""
    rows = [
        "| | batch | ours | goal | SGLang 0.5.17 | times as good |",
        "|---|---|---|---|---|---|",
    ]
    for q in questions:
        for batch in BATCHES:
            if batch not in q.ours.points:
                continue
            found, goal, ours = verdict(q, batch), q.goal.get(batch), number(q.ours.points[batch])
            ratio = "" if found.ratio is None else f"{found.ratio:.2f}"
            rows.append(
                f"| {q.what}, {q.unit} | {batch} | {bold(ours, found.missed > 0)} | "
                f"{'' if goal is None else f'≤ {goal:g}'} | {number(q.peer.points.get(batch))} | "
                f"{bold(ratio, found.ratio is not None and found.ratio < 1)} |"
            )
    return "\n".join(rows) if len(rows) > 2 else ""


def bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def memory_table(lines: Lines) -> str:
    rows = [
        "| | nodes | MB per running request | of which the state slot |",
        "|---|---|---|---|",
    ]
    for label, wanted in (
        ("deferred (rows)", {"mode": "deferred", "model": MODEL}),
        ("snapshot (a state per node)", {"mode": "snapshot", "model": MODEL}),
        ("SGLang 0.5.17, computed", {"engine": "sglang"}),
    ):
        for line in last_of_each(lines.find("state_mb_per_request", **wanted), "nodes"):
            if line["nodes"] > 1:
                values = f"{line['value']:.1f} | {line['checkpoint_mb']:.1f}"
                rows.append(f"| {label} | {line['nodes']} | {values} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def last_of_each(found: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    return list({line[field]: line for line in found}.values())


def losses(questions: Sequence[Question]) -> str:
    """Every figure that misses its goal or is behind the peer's."""
    lost = []
    for q in questions:
        for batch in BATCHES:
            if batch not in q.ours.points or not (found := verdict(q, batch)).is_lost:
                continue
            words = []
            if found.missed:
                words.append(f"{found.missed:.0%} above the goal of {q.goal[batch]:g}")
            if found.ratio is not None and found.ratio < 1:
                words.append(f"SGLang's {number(q.peer.points[batch])} is better")
            figure = f"{number(q.ours.points[batch])} {q.unit}"
            lost.append(f"- {q.what}, batch {batch}: {figure}, {' and '.join(words)}")
    return "\n".join(lost)


def versions(lines: Lines) -> str:
    """Of the hardware and software behind the figures."""
    rates: dict[str, list[float]] = {}
    for line in lines.all:
        if "engine" not in line and line.get("copy_tb_s"):
            made = f"torch {line['torch']}, triton {line['triton']}, {line['date']}"
            rates.setdefault(f"{line['gpu']}, {made}", []).append(line["copy_tb_s"])
    return "\n".join(
        f"- {made}; the GPU's own copies: {min(copied):.2f} to {max(copied):.2f} TB/s"
        for made, copied in rates.items()
    )


def page(lines: Lines) -> str:
    """The content of the marked block."""
    steps, kernels = step_questions(lines), kernel_questions(lines)
    parts = [
        ("Decode steps, tokens and prompts", table(steps)),
        ("Verify kernels, one layer", table(kernels)),
        ("State memory", memory_table(lines)),
        ("Where we lose", losses([*steps, *kernels])),
        ("Made with", versions(lines)),
    ]
    return "\n\n".join(f"### {head}\n\n{text}" for head, text in parts if text)


def rewrite(readme: Path, text: str) -> None:
    """Puts ``text`` into the marked block of ``readme``.

    Raises: ValueError if there is not exactly one.
    """
    before = readme.read_text()
    after, count = BLOCK.subn(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before)
    if count != 1:
        raise ValueError(f"{readme}: {count} blocks between the marks of make_plots.py, not one")
    readme.write_text(after)
