"""Tables of the benchmark page: which line counts, and what is said to be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.lib import tables
from benchmark.lib.lines import Lines, Series
from mamba_eagle.bench import results

BENCHMARK = Path(__file__).parents[4] / "benchmark"
GPU = {"gpu": "a GPU", "copy_tb_s": 3.0, "torch": "2", "triton": "3", "date": "2026-11-21"}
COMPARED = {"model": "nemotron-nano-9b-v2", "input_len": 256, **GPU}


def plain_step(batch: int, value: float, **fields) -> dict:
    line = {"name": "decode_step_ms", "mode": "deferred", "tree": "plain", "nodes": 1}
    return {**line, "batch": batch, "value": value, **COMPARED, **fields}


def test_the_last_line_of_ours_counts() -> None:
    lines = Lines(
        [
            plain_step(8, 9.0),
            plain_step(1, 7.0),
            plain_step(8, 6.5),
            plain_step(8, 1.0, gpu="another GPU"),
            plain_step(8, 2.0, engine="sglang"),
            plain_step(8, 3.0, model="another model"),
            plain_step(8, 4.0, input_len=4096),
        ],
        "a GPU",
    )
    found = lines.steps("", "decode_step_ms", mode="deferred", tree="plain")
    assert found.points == {1: 7.0, 8: 6.5}


def test_what_misses_its_goal_or_is_behind_is_said_to_be_lost() -> None:
    lines = Lines(
        [
            *(plain_step(batch, ms) for batch, ms in ((1, 6.4), (8, 7.14), (32, 8.0))),
            *(plain_step(batch, 7.0, engine="sglang") for batch in (1, 8, 32)),
        ],
        "a GPU",
    )
    page = tables.page(lines)
    rows = [row for row in page.splitlines() if row.startswith("| plain step")]
    assert rows == [
        "| plain step, ms | 1 | 6.40 | ≤ 6.4 | 7.00 | 1.09 |",
        "| plain step, ms | 8 | **7.14** | ≤ 6.8 | 7.00 | **0.98** |",
        "| plain step, ms | 32 | 8.00 | ≤ 8.6 | 7.00 | **0.88** |",
    ]
    lost = page.partition("### Where we lose")[2].partition("###")[0].strip().splitlines()
    assert lost == [
        "- plain step, batch 8: 7.14 ms, 5% above the goal of 6.8 and SGLang's 7.00 is better",
        "- plain step, batch 32: 8.00 ms, SGLang's 7.00 is better",
    ]


def test_more_tokens_a_second_are_better() -> None:
    question = tables.Question("", Series("", {1: 300.0}), Series("", {1: 200.0}), {}, "", True)
    assert tables.verdict(question, 1) == tables.Verdict(ratio=1.5, missed=0.0)


def test_without_lines_nothing_is_claimed() -> None:
    assert tables.page(Lines([], "a GPU")).strip() == ""
    peers = Lines([plain_step(1, 7.0, engine="sglang")], "a GPU")
    assert tables.page(peers).strip() == ""


def test_only_the_marked_block_is_rewritten(tmp_path) -> None:
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- made by make_plots.py -->\nold\n<!-- end -->\nbelow\n")
    for _ in range(2):
        tables.rewrite(page, r"new \1")
        assert page.read_text() == (
            "above\n<!-- made by make_plots.py -->\n\nnew \\1\n\n<!-- end -->\nbelow\n"
        )
    page.write_text("no block")
    with pytest.raises(ValueError, match="0 blocks"):
        tables.rewrite(page, "new")


def test_every_kept_line_can_be_read() -> None:
    for file in BENCHMARK.glob("results/*.jsonl"):
        assert results.read(file)
    files = [BENCHMARK / "results" / name for name in ("peers.jsonl", "h100.jsonl")]
    lines = Lines.read(files, "NVIDIA H100 80GB HBM3")
    for line in lines.all:
        assert line["name"] and isinstance(line["value"], (int, float))
        assert line.get("engine") or {"torch", "triton", "date"} <= line.keys()
    # the peer's figures that tables and plots compare with
    for name in ("decode_step_ms", "tree_step_ms", "prefill_s"):
        assert set(lines.steps("", name, engine="sglang").points) == {1, 8, 32}
    assert "<!-- made by make_plots.py -->" in (BENCHMARK / "README.md").read_text()
