"""Draws benchmark/plots/*.svg from benchmark/results, and rewrites the tables of the README.

    pip install -e '.[bench]'
    python -m benchmark.plots.make_plots          # --png too, to look at

Series without lines are left out, and a plot without series is not drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from benchmark.lib import tables
from benchmark.lib.lines import MODEL, TREE, Lines, Series

HERE = Path(__file__).parent
RESULTS = (HERE.parent / "results/peers.jsonl", HERE.parent / "results/h100.jsonl")
GPU = "NVIDIA H100 80GB HBM3"
GPU_GB = 80
WEIGHTS_GB = 17.8  # of the target; what is left holds states, KV, the drafter and graphs

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers and dashes differ too.
STYLES = {
    "plain": {"color": "#000000", "marker": "o"},
    "deferred": {"color": "#0072B2", "marker": "s"},
    "fold": {"color": "#56B4E9", "marker": "D"},
    "snapshot": {"color": "#D55E00", "marker": "^"},
    "peer": {"color": "#009E73", "marker": "v", "linestyle": "--"},
    "peer plain": {"color": "#7F7F7F", "marker": "x", "linestyle": "--"},
}
plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
        "lines.linewidth": 2,
        "lines.markersize": 6,
        "legend.frameon": False,
        "svg.hashsalt": "mamba-eagle",  # the same lines make the same file
    }
)


def draw(ax: Axes, style: str, series: Series, **others: object) -> bool:
    """Returns: False if there is nothing to draw."""
    if series.points:
        x, y = list(series.points), list(series.points.values())
        ax.plot(x, y, label=series.label, **STYLES[style], **others)
    return bool(series.points)


def logarithmic_values(ax: Axes) -> None:
    """Equal distances are equal ratios; 1, 2 and 5 times each power of ten are named."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def doubling_axis(ax: Axes, series: list[Series]) -> None:
    """Batch sizes and node counts double: equal steps, each named."""
    ticks = sorted({x for one in series for x in one.points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()


def throughput(lines: Lines) -> Figure | None:
    """Tokens per second against the batch size."""
    rate = "tokens_per_s"
    peer = {"engine": "sglang"}
    wanted = {
        "deferred": lines.steps("tree, deferred", rate, mode="deferred", tree=TREE),
        "snapshot": lines.steps("tree, snapshot", rate, mode="snapshot", tree=TREE),
        "plain": lines.steps("plain", rate, mode="deferred", tree="plain"),
        "peer": lines.steps("SGLang, tree", rate, tree=TREE, **peer),
        "peer plain": lines.steps("SGLang, plain", rate, tree="plain", **peer),
    }
    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drawn = [series for style, series in wanted.items() if draw(ax, style, series)]
    if not drawn:
        return None
    doubling_axis(ax, drawn)
    logarithmic_values(ax)
    ax.set(xlabel="requests in the batch", ylabel="tokens per second")
    ax.set_title("Decoding, tree of 8 nodes, 3 tokens accepted per step", loc="left", fontsize=12)
    ax.legend()
    return figure


def verify_time(lines: Lines) -> Figure | None:
    """Microseconds per layer against the nodes of a tree, one panel per batch size."""

    def trees(label: str, kind: str, batch: int) -> Series:
        """One node has a kernel of its own, under another name."""
        points: dict[int, float] = {}
        for name in (f"kernel_decode{kind}_us", f"kernel_tree{kind}_us"):
            points |= lines.series(label, "nodes", name, batch=batch).points
        return Series(label, dict(sorted(points.items())))

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
    drawn = []
    for ax, batch in zip(panels, tables.BATCHES):
        peer = {"engine": "sglang", "batch": batch}
        one = lines.series("", "nodes", "kernel_decode_us", **peer).points
        more = lines.series("", "nodes", "kernel_snapshot_us", **peer).points
        wanted = {
            "peer": Series("SGLang, a state per node", one | more),
            "snapshot": lines.series(
                "snapshot, a state per node", "nodes", "kernel_snapshot_us", batch=batch
            ),
            "fold": trees("deferred, step that folds", "_fold", batch),
            "deferred": trees("deferred, step that does not", "", batch),
        }
        here = [series for style, series in wanted.items() if draw(ax, style, series)]
        if here:
            doubling_axis(ax, here)
        ax.set_title(f"batch {batch}", loc="left", fontsize=12)
        logarithmic_values(ax)
        ax.set_xlabel("nodes of the tree")
        drawn += here
    if not drawn:
        return None
    panels[0].set_ylabel("µs per layer")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def state_memory(lines: Lines) -> Figure | None:
    """Gigabytes of recurrent state against running requests."""
    kinds = {
        "deferred": ("deferred", {"mode": "deferred", "model": MODEL}),
        "snapshot": ("snapshot", {"mode": "snapshot", "model": MODEL}),
        "peer": (
            "SGLang, computed",
            {"engine": "sglang"},
        ),  # last, dashed: both keep a state per node
    }
    requests = [1, 16, 32, 48, 64]
    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drawn = False
    for style, (label, wanted) in kinds.items():
        by_nodes = lines.series("", "nodes", "state_mb_per_request", **wanted).points
        trees = {nodes: size for nodes, size in by_nodes.items() if nodes > 1}
        for (nodes, size), fill in zip(trees.items(), (None, "white", "white")):
            points = {n: n * size / 1e3 for n in requests}
            name = f"{label}, {nodes} nodes: {size:.0f} MB per request"
            drawn |= draw(ax, style, Series(name, points), markerfacecolor=fill)
    if not drawn:
        return None
    ax.axhline(GPU_GB - WEIGHTS_GB, color="#7F7F7F", linewidth=1)
    ax.annotate("left of 80 GB beside the weights", (1, GPU_GB - WEIGHTS_GB + 1), color="#595959")
    ax.set(xlabel="running requests", ylabel="GB of recurrent state", xticks=requests)
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center")
    return figure


PLOTS = {"throughput": throughput, "verify_time": verify_time, "state_memory": state_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", default=RESULTS, help="result files")
    parser.add_argument("--gpu", default=GPU, help="whose lines are drawn")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the plots")
    parser.add_argument("--png", action="store_true", help="write PNG files beside them")
    args = parser.parse_args()
    lines = Lines.read(args.results, args.gpu)
    for name, plot in PLOTS.items():
        figure = plot(lines)
        if figure is None:
            print(f"{name}: no lines of {args.gpu}")
            continue
        # without a date, so that nothing changes where no figure does
        figure.savefig(args.output / f"{name}.svg", metadata={"Date": None})
        if args.png:
            figure.savefig(args.output / f"{name}.png", dpi=120)
    text = tables.page(lines)
    print(text)
    tables.rewrite(HERE.parent / "README.md", text)


if __name__ == "__main__":
    main()
