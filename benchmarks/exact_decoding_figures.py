"""Draw the figures of docs/exact-decoding.md from the records of exact_decoding.py, and count the proofs over all.

    pip install 'gradaudit[figures]'; python benchmarks/exact_decoding_figures.py out/benchmarks docs

Writes benchmarks/results/exact-decoding/totals.md beside the figures.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from grid import made, options

try:
    import matplotlib
except ImportError:
    sys.exit("drawing needs matplotlib: pip install 'gradaudit[figures]'")
matplotlib.use("svg")
from matplotlib import pyplot

MODELS = {
    "minilm": ("MiniLM", "o", "#0072B2"),
    "mpnet": ("MPNet", "s", "#D55E00"),
    "random-gpt2": ("GPT-2, random weights", "^", "#009E73"),
}
"""Name, shape and color, of Okabe and Ito's palette."""


def points(folder: Path, pattern: str) -> dict[str, list[tuple[float, float]]]:
    """Return (load, share of sentences exact) of every batch, by model."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob(f"{pattern}/records.jsonl")):
        if not re.search(r"-(on|off)(-p[\d.]+)?$", path.parent.name):
            continue  # a partial view or a defense: its load says little
        model = next(m for m in (*MODELS, "other") if path.parent.name.startswith(f"decode-{m}") or m == "other")
        for line in path.read_text(encoding="utf8").splitlines():
            record = json.loads(line)
            exact = [bool(s["exact"]) for s in record["sentences"]]
            found.setdefault(model, []).append((record["load"], sum(exact) / len(exact)))
    return found


def totals(folder: Path) -> str:
    """Return a table of how many sentences of all records were proven, and how many of these are wrong."""
    lines = []
    sums = [0, 0, 0, 0, 0]
    settings = {"dropout on": "decode-*-on*", "dropout off": "decode-*-off*"}
    for name, pattern in settings.items():
        rows = [
            json.loads(r) for p in folder.glob(f"{pattern}/records.jsonl") for r in p.read_text("utf8").splitlines()
        ]
        sentences = [s for row in rows for s in row["sentences"]]
        proven = [s for s in sentences if s["certificate"] == "proven"]
        exact = [s for s in sentences if s["exact"]]
        counts = [len(rows), len(sentences), len(exact), len(proven), sum(not s["exact"] for s in proven)]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    lines.append("| all | " + " | ".join(map(str, sums)) + " |")
    head = "| setting | batches | sentences | exact | proven | proven, wrong |\n|---|---|---|---|---|---|\n"
    return f"{made()} From the records of all the tables here.\n\n{head}" + "\n".join(lines) + "\n"


def draw(series: dict[str, list[tuple[float, float]]], title: str, path: Path) -> None:
    """Write a scatter of exact sentences against load, a shape and a color a model; one dot a batch.

    Dots are half transparent: most lie on one another.
    """
    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for model, some in series.items():
        name, shape, color = MODELS.get(model, (model, "x", "#555555"))
        loads, shares = zip(*some, strict=True)
        axes.scatter(
            loads, [100 * share for share in shares], marker=shape, color=color, s=30, alpha=0.45, lw=0, label=name
        )
    axes.set(xlim=(0, None), ylim=(-4, 104), xlabel="load: tokens of the batch over width, b/d")
    axes.set(ylabel="sentences read exactly, %", title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="center left")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draw one figure with dropout on and one with it off."""
    parser = options(__doc__)
    parser.add_argument("records", type=Path, help="folder of exact_decoding.py's records")
    parser.add_argument("target", type=Path, help="folder for the figures")
    given = parser.parse_args()
    records, target = given.records, given.target
    matplotlib.rcParams["svg.hashsalt"] = "gradaudit"  # the same numbers make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    figures = {
        "exact-decoding-on": ("decode-*-b*-on*", "Sentences exact, dropout on, three data sets"),
        "exact-decoding-off": ("decode-m*-b*-off", "Sentences exact, encoders, dropout off, three data sets"),
    }
    for name, (pattern, title) in figures.items():
        draw(points(records, pattern), title, target / f"{name}.svg")
    Path("benchmarks/results/exact-decoding/totals.md").write_text(totals(records), encoding="utf8")


if __name__ == "__main__":
    main()
