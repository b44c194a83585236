"""Draws the frontiers of MiniLM on CoLA anew from their table, which holds every number of the drawings.

    python benchmarks/frontier_figures.py

Reads benchmarks/results/defenses/frontier-cola.md and writes docs/frontier-cola.svg (one sentence an update) and
docs/frontier-cola-8.svg. Points are told apart and chosen as `gradaudit sweep` does; a sweep draws its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from grid import options

from gradaudit.record import Interval
from gradaudit.report.frontier_page import drawing_alone
from gradaudit.sweeps.frontier import Frontier, OperatingPoint, frontier_of
from gradaudit.sweeps.measure import MEASURES
from gradaudit.sweeps.utility import Utility

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "benchmarks/results/defenses/frontier-cola.md"
DRAWN = {1: "frontier-cola.svg", 8: "frontier-cola-8.svg"}
ATTACKS = ("decode", "tag", "grab")
NOTE = "Measured with an earlier decode: today’s reads more behind noise and pruning."
BATCHES = 2
"""That each cell of the table was measured on."""
TESTED, CLIENTS = 500, 16
"""Rows that utility was tested on, and clients a round, as the table says."""


def frontiers(page: str) -> list[Frontier]:
    """Return the frontier of each batch size of the table."""
    found = []
    for part in re.split(r"^## B = ", page, flags=re.M)[1:]:
        size = int(re.match(r"\d+", part)[0])  # type: ignore[index]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
        heads, *rest = rows
        cells = [dict(zip(heads, row, strict=True)) for row in rest if not row[0].startswith("-")]
        found.append(frontier_of(size, [_point(size, row) for row in cells if row["MCC"] != "not measured"]))
    return found


def _point(size: int, row: dict[str, str]) -> OperatingPoint:
    """Return the point of a row.

    `tag` and `grab` do not reckon with dropout, which was on in all of them: where one ran, its score is a lower bound.
    """
    leaks = {name: leak for name in ATTACKS if (leak := _interval(row[f"{name} R-L"])) is not None}
    attack = max(leaks, key=lambda name: leaks[name].mean or 0.0)
    blind, exact = float(row["blind R-L"]), float(row["exact"])
    low, high = (float(end) for end in row["95%"].split(" to "))
    measure = MEASURES["text"]
    return OperatingPoint(
        client="no defense" if row["defense"] == "none" else row["defense"],
        family=" + ".join(one.split()[0] for one in row["defense"].split("; ")).replace("none", "no defense"),
        batch_size=size,
        leak=leaks[attack],
        blind=blind,
        exact=exact,
        blind_exact=0.0,
        attack=attack,
        bound=any(name in leaks for name in ATTACKS[1:]),
        unsupported=tuple(name for name in ATTACKS if row[f"{name} R-L"] == "not supported"),
        silent=exact == 0 and max(leak.high or 0.0 for leak in leaks.values()) - blind <= measure.margin,
        utility=Utility(
            accuracy=float(row["accuracy"]),
            f1=float("nan"),
            mcc=float(row["MCC"]),
            mcc_low=low,
            mcc_high=high,
            before=float("nan"),
            train_rows=0,
            test_rows=TESTED,
            epsilon=None,
            delta=float("nan"),
            clients=CLIENTS,
            seconds=float("nan"),
        ),
        measure=measure,
    )


def _interval(cell: str) -> Interval | None:
    numbers = re.fullmatch(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", cell)
    if numbers is None:
        return None
    mean, low, high = map(float, numbers.groups())
    return Interval(mean=mean, low=low, high=high, n=BATCHES)


def main() -> None:
    """Draw both."""
    options(__doc__).parse_args()
    for one in frontiers(TABLE.read_text(encoding="utf8")):
        target = ROOT / "docs" / DRAWN[one.batch_size]
        target.write_text(drawing_alone(one, NOTE), encoding="utf8")
        print(target, one.reason)


if __name__ == "__main__":
    main()
