"""Leakage and utility of MiniLM on CoLA under eight families of defenses, from the sweep's own table.

gradaudit sweep cases/sweeps/frontier-cola.toml --out out/frontier --jobs 2
python benchmarks/frontier_cola.py out/frontier
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from grid import command, commit, options, write_table

ATTACKS = ("decode", "tag", "grab")
HEADS = (
    "# in the drawing",
    "defense",
    "MCC",
    "95%",
    "accuracy",
    f"{ATTACKS[0]} R-1",
    *(f"{name} R-L" for name in ATTACKS),
    "exact",
    "blind R-L",
)


def main() -> None:
    """Read the sweep's table and write a table a batch size."""
    parser = options(__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/defenses/frontier-cola.md"))
    asked = parser.parse_args()
    found: dict[str, dict[str, dict[str, dict[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    with open(asked.sweep / "sweep.csv", encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["data.batch_size"]][row["defense"]][row["attack"].split()[0]] = row
    parts = []
    for size, clients in found.items():
        parts += [f"## B = {size}", "", f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
        place = {defense: n for n, defense in enumerate(sorted(clients, key=lambda d: _order(clients[d])), 1)}
        for defense, attacks in clients.items():
            one = attacks[ATTACKS[0]]
            cost = ["not measured"] * 3
            if one["mcc"]:
                low, high = float(one["mcc_low"]), float(one["mcc_high"])
                cost = [f"{float(one['mcc']):.1f}", f"{low:.0f} to {high:.0f}", f"{float(one['accuracy']):.1f}"]
            exact = max((float(r["exact mean"]) for r in attacks.values() if r["exact mean"]), default=0.0)
            blind = next((r["blind rougeL"] for r in attacks.values() if r["blind rougeL"]), "")
            scores = [_score(one, "rouge1").split(" (")[0]]
            scores += [_score(attacks[name]) if name in attacks else "not run" for name in ATTACKS]
            cells = [
                str(place[defense]),
                defense,
                *cost,
                *scores,
                f"{exact:.0f}",
                f"{float(blind):.1f}" if blind else "",
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    head = (
        "# Leakage and utility: MiniLM on CoLA, attention and head trained\n\n"
        f"`gradaudit sweep cases/sweeps/frontier-cola.toml --out {asked.sweep} --jobs 2`, then `{command()}` at "
        f"{commit()}. Two batches a row, dropout on (0.1) where no defense changes it, labels and lengths given, "
        "attacks told of the defense and run with small budgets (the case file says which). Utility: 1,000 rounds of "
        "16 sentences, 500 test rows; its interval is over the test rows."
    )
    write_table(asked.write, head, "\n".join(parts).rstrip())


def _order(attacks: dict[str, dict[str, str]]) -> tuple[float, float]:
    """As `gradaudit.sweeps.frontier` orders points: the highest utility first, and of one utility the lowest leak."""
    costs = [float(row["mcc"]) for row in attacks.values() if row["mcc"]]
    leaks = [float(row["rougeL mean"]) for row in attacks.values() if row["rougeL mean"]]
    return -max(costs, default=-100.0), max(leaks, default=0.0)


def _score(row: dict[str, str], metric: str = "rougeL") -> str:
    if row["error"]:
        unsupported = any(said in row["error"] for said in ("no counter", "none of them is in this update"))
        return "not supported" if unsupported else "failed"
    mean, low, high = (float(row[f"{metric} {part}"]) for part in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.0f}-{high:.0f})"


if __name__ == "__main__":
    main()
