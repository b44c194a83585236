"""Draw which single matrix gives the text away, from the tables of exact_decoding.py's groups of one matrix.

pip install 'gradaudit[figures]'; python benchmarks/matrices_figure.py docs/one-matrix.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from grid import options

try:
    import matplotlib
except ImportError:
    sys.exit("drawing needs matplotlib: pip install 'gradaudit[figures]'")
matplotlib.use("svg")
from matplotlib import pyplot

RESULTS = Path("benchmarks/results/exact-decoding")
TABLES = ("matrices.md", "matrices-p.md", "matrices-o.md")
"""A later table, of a later draw, takes the place of what an earlier one has of the same matrix."""
ROLES = {"q": "query", "k": "key", "v": "value", "o": "attention out", "f": "feed-forward in", "p": "feed-forward out"}


def exact(table: str) -> dict[tuple[int, str], float | None]:
    """Return the share of sentences read exactly by (block, role), percent; None where the matrix was refused."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line[:1] == "|"]
    at = {name: lines[0].index(name) for name in ("tensors", "exact %", "proven")}
    found: dict[tuple[int, str], float | None] = {}
    for line in lines[2:]:
        block, role = line[at["tensors"]].split(":")
        refused = line[at["proven"]] == "0/0"
        found[int(block), role] = None if refused else float(line[at["exact %"]])
    return found


def draw(cells: dict[tuple[int, str], float | None], path: Path) -> None:
    """Write the map, blocks from left to right."""
    blocks = sorted({block for block, _ in cells})
    figure, axes = pyplot.subplots(figsize=(6.4, 3.0), layout="constrained")
    colors = pyplot.get_cmap("Blues")
    for row, role in enumerate(ROLES):
        for block in blocks:
            share = cells[block, role]
            color = "#eeeeee" if share is None else colors(0.15 + 0.75 * share / 100)
            axes.add_patch(pyplot.Rectangle((block - 0.48, row - 0.46), 0.96, 0.92, color=color, lw=0))
            dark = share is not None and share > 50
            said = "not read" if share is None else f"{share:.0f}"
            axes.text(block, row, said, ha="center", va="center", color="white" if dark else "#333333", fontsize=9)
    axes.set(xlim=(-0.5, max(blocks) + 0.5), ylim=(len(ROLES) - 0.5, -0.5), xlabel="block")
    axes.set_xticks(blocks)
    axes.set_yticks(range(len(ROLES)), [f"{name} ({role})" for role, name in ROLES.items()])
    axes.set_title("One matrix shared: sentences read exactly, %", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draw the map."""
    parser = options(__doc__)
    parser.add_argument("target", type=Path, help="file for the figure")
    given = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gradaudit"  # the same numbers make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    cells: dict[tuple[int, str], float | None] = {}
    for table in TABLES:
        cells |= exact((RESULTS / table).read_text(encoding="utf8"))
    draw(cells, given.target)


if __name__ == "__main__":
    main()
