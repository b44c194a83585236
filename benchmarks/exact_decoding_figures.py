"""Draw the figures of docs/exact-decoding.md from the records of exact_decoding.py, and count the proofs over all.

    python benchmarks/exact_decoding_figures.py out/benchmarks docs

Writes benchmarks/results/exact-decoding/totals.md beside the figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from grid import made, options

COLORS = {"minilm": "#1f6f8b", "mpnet": "#c8553d", "random-gpt2": "#588157"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 60, 45, 20


def points(folder: Path, pattern: str) -> dict[str, list[tuple[float, float]]]:
    """Return (load, share of sentences exact) of every batch, by model."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob(f"{pattern}/records.jsonl")):
        if not re.search(r"-(on|off)(-p[\d.]+)?$", path.parent.name):
            continue  # a partial view or a defense: its load says little
        model = next(m for m in (*COLORS, "other") if path.parent.name.startswith(f"decode-{m}") or m == "other")
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


def drawing(series: dict[str, list[tuple[float, float]]], title: str) -> str:
    """Return an SVG scatter of exact sentences against load, one color a model."""
    most = max((x for some in series.values() for x, _ in some), default=1.0) * 1.05

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for y in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x0, y0), (x1, _) = at(0, y), at(most, y)
        parts.append(f'<line x1="{x0}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y0:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 8}" y="{y0 + 4:.1f}" text-anchor="end">{100 * y:.0f}%</text>')
    for tick in range(int(most * 10) + 1):
        x, y = at(tick / 10, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick / 10:.1f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">load: tokens over width, b/d</text>')
    for place, (model, some) in enumerate(series.items()):
        color = COLORS.get(model, "#555")
        parts += [dot(at(x, y), color) for x, y in some]
        parts.append(f'<text x="{LEFT + 8}" y="{HEIGHT - BOTTOM - 12 - 16 * place}" fill="{color}">{model}</text>')
    return "\n".join([*parts, "</svg>\n"])


def dot(center: Sequence[float], color: str) -> str:
    """Return one batch's dot, half transparent: most lie on one another."""
    return f'<circle cx="{center[0]:.1f}" cy="{center[1]:.1f}" r="4" fill="{color}" fill-opacity="0.45"/>'


def main() -> None:
    """Draw one figure with dropout on and one with it off."""
    parser = options(__doc__)
    parser.add_argument("records", type=Path, help="folder of exact_decoding.py's records")
    parser.add_argument("target", type=Path, help="folder for the figures")
    given = parser.parse_args()
    records, target = given.records, given.target
    figures = {
        "exact-decoding-on": ("decode-*-b*-on*", "Sentences exact, dropout on, three data sets"),
        "exact-decoding-off": ("decode-m*-b*-off", "Sentences exact, encoders, dropout off, three data sets"),
    }
    for name, (pattern, title) in figures.items():
        (target / f"{name}.svg").write_text(drawing(points(records, pattern), title), encoding="utf8")
    Path("benchmarks/results/exact-decoding/totals.md").write_text(totals(records), encoding="utf8")


if __name__ == "__main__":
    main()
