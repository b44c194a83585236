"""The partial-gradients paper's table of DP-SGD, corrected: what is attacked is what is sent.

gradaudit sweep cases/sweeps/dpsgd-sst2.toml --out out/dpsgd-sst2
python benchmarks/dpsgd_sst2.py out/dpsgd-sst2
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from grid import command, commit, options, write_table

PUBLISHED = {  # arXiv 2406.00999, DP-SGD on SST-2: ROUGE-L, F1, MCC, epsilon
    "0.01": ("68.3", ".891", ".773", "2e8"),
    "0.1": ("68.3", ".855", ".709", "575"),
    "0.3": ("66.8", ".71", ".285", "9.38"),
    "0.5": ("64.9", ".675", "0", "1.87"),
}
HEADS = (
    "noise multiplier",
    "decode R-L",
    "dager R-L",
    "lamp R-L",
    "blind R-L",
    "F1",
    "MCC",
    "epsilon of a row, 200 rounds",
    "published R-L",
    "published F1",
    "published MCC",
    "published epsilon",
)


def main() -> None:
    """Read the sweep's table and write ours beside the published one."""
    parser = options(__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/defenses/dpsgd-sst2.md"))
    asked = parser.parse_args()
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    with open(asked.sweep / "sweep.csv", encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            noise = row["defense"].partition("noise_multiplier=")[2] or "no defense"
            found[noise][row["attack"].split()[0]] = row
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for noise, attacks in found.items():
        any_row = attacks["decode"]
        scores = [_score(attacks[name]) for name in ("decode", "dager", "lamp")]
        cost = [f"{float(any_row['f1']) / 100:.3f}", f"{float(any_row['mcc']) / 100:.3f}"]
        epsilon = f"{float(any_row['epsilon']):.3g}" if any_row["epsilon"] else "none"
        cells = [noise, *scores, f"{float(any_row['blind rougeL']):.1f}", *cost, epsilon]
        lines.append(f"| {' | '.join([*cells, *PUBLISHED.get(noise, ('', '', '', ''))])} |")
    head = (
        "# DP-SGD read where it acts: SST-2, MiniLM, B = 1, C = 1\n\n"
        f"`gradaudit sweep cases/sweeps/dpsgd-sst2.toml --out {asked.sweep}`, then `{command()}` at {commit()}. "
        "Five sentences a row, embeddings frozen, dropout off, labels and lengths given; the model and the attacks' "
        "budgets are smaller than the paper's (BERT-base). F1 and MCC: 200 rounds of 16 clients, 500 test rows."
    )
    write_table(asked.write, head, "\n".join(lines))


def _score(row: dict[str, str]) -> str:
    if row["error"]:
        return "not supported" if "no counter" in row["error"] else "failed"
    return f"{float(row['rougeL mean']):.1f} ({float(row['rougeL low']):.0f}-{float(row['rougeL high']):.0f})"


if __name__ == "__main__":
    main()
