"""Draws LTI's ablations from their tables: by public windows, by public images, by the share of images of a kind.

    pip install 'gradaudit[figures]'; python benchmarks/curves.py

Reads `rows.md` of benchmarks/results/lti, `sizes.md` and `shift.md` of benchmarks/results/vision, and writes an SVG of
the same name beside each.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from grid import options

try:
    import matplotlib
except ImportError:
    sys.exit("drawing needs matplotlib: pip install 'gradaudit[figures]'")
matplotlib.use("svg")
from matplotlib import pyplot, ticker

RESULTS = Path(__file__).parent / "results"
MARKS = ("o-", "s--", "^-.", "D:", "k-")
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Curve:
    """One line of a drawing: value, and interval where there is one, at each place."""

    name: str
    at: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


def table(path: Path) -> Rows:
    """Return the first table of a page, a row each, by column."""
    lines = [line for line in path.read_text(encoding="utf8").splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")]
    return [
        dict(zip(heads, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in lines[2:]
        if line.count("|") == lines[0].count("|")
    ]


def curve(rows: Rows, at: str, column: str) -> Curve:
    """Return a column of numbers, with intervals in brackets or without."""
    cells = [[float(n) for n in re.findall(r"\d+\.?\d*", row[column])] for row in rows]
    places = tuple(float(row[at]) for row in rows)
    if all(len(cell) == 3 for cell in cells):
        values, low, high = zip(*cells, strict=True)
        return Curve(column, places, values, low, high)
    return Curve(column, places, tuple(cell[0] for cell in cells))


def draw(curves: list[Curve], about: str, below: str, beside: str, path: Path, logarithmic: tuple[bool, bool]) -> None:
    """Write a drawing of some curves; a place at 0 of a logarithmic axis is drawn at its left end."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for one, mark in zip(curves, MARKS, strict=False):
        axes.plot(one.at, one.values, mark, label=one.name, markersize=5)
        if one.low is not None and one.high is not None:
            axes.fill_between(one.at, one.low, one.high, alpha=0.15)
    if logarithmic[0]:
        least = min(place for place in curves[0].at if place > 0)
        axes.set_xscale("symlog", linthresh=least) if min(curves[0].at) == 0 else axes.set_xscale("log")
    axes.set_xticks(curves[0].at, [f"{place:g}" for place in curves[0].at])
    axes.minorticks_off()
    if logarithmic[1]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set(title=about, xlabel=below, ylabel=beside)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    """Draw all three."""
    options(__doc__).parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gradaudit"  # the same numbers make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    windows = table(RESULTS / "lti/rows.md")
    at = "public windows"
    read = [curve(windows, at, name) for name in ("accuracy", "R-L", "blind R-L")]
    draw(read, "LTI by layers under signs, WikiText windows of 16", at, "%", RESULTS / "lti/rows.svg", (True, False))
    defenses = ("none", "sign", "pruning 0.99", "Gaussian 0.1", "blind MSE")
    for name, at, about in (
        ("sizes", "public images", "LTI of CIFAR-10 by the number of public images"),
        ("shift", "beta", "LTI of CIFAR-10 by the share of public images of the private classes"),
    ):
        rows = table(RESULTS / f"vision/{name}.md")
        found = [curve(rows, at, column) for column in defenses]
        draw(found, about, at, "MSE: lower is more leakage", RESULTS / f"vision/{name}.svg", (True, True))


if __name__ == "__main__":
    main()
