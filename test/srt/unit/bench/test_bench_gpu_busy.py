"""How busy a GPU was, from a trace."""

from __future__ import annotations

import pytest

from benchmark.lib.gpu_trace import busy


def test_work_counts_once_where_it_overlaps() -> None:
    steps = [(10.0 * i, 10.0 * i + 8) for i in range(10)]  # 8 of every 10
    beside = [(begin + 1, begin + 3) for begin, _ in steps]
    found = busy(beside + steps)  # in any order; the window is [19.6, 78.4)
    assert found.share == pytest.approx((58.8 - 5 * 2 - 2 * 0.4) / 58.8)
    assert found.longest_gap == pytest.approx(2.0)


def test_a_gap_at_the_end_is_seen() -> None:
    assert busy([(0.0, 60.0), (99.0, 100.0)]).longest_gap == pytest.approx(20.0)
    assert busy([(0.0, 100.0)]) == (pytest.approx(1.0), 0.0, 1)
