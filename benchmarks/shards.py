"""What it costs to run a sweep in four shards, one after the other, in the place of one run: the frontier's 198 points.

    OMP_NUM_THREADS=1 python benchmarks/shards.py --write benchmarks/results/integrations/shards.md

The points, clients and defenses are those of cases/sweeps/frontier-cola.toml, on a small random BERT and the sentences
of the package, with a few steps and `blind` in the place of `decode`, so that it takes minutes: what a shard costs by
itself does not depend on these.
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grid import commit, made, markdown, options, write_table

SWEEP = Path(__file__).parent.parent / "cases" / "sweeps" / "frontier-cola.toml"
ATTACKS = (
    '{name = "blind"}',
    '{name = "tag", steps = 5}',
    '{name = "grab", rounds = 1, steps = 5, starts = 5, permutations = 5, passes = 1, beam_width = 1, '
    "learn_masks = false}",
)
SMALL = {
    "model": '"random:bert-tiny"',
    "data.source": '"sample"',
    "data.batches": "1",
    "utility.steps": "10",
    "utility.test_rows": "50",
    "axes.attack": f"[{', '.join(ATTACKS)}]",
}
"""What is set in the sweep's file."""


def ran(*arguments: object) -> tuple[float, float]:
    """Run gradaudit; return seconds on the clock and of the processor."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gradaudit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def table_of(folder: Path) -> list[dict[str, str]]:
    """Return a sweep's table without what is timed."""
    with open(folder / "sweep.csv", encoding="utf8", newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def main() -> None:
    """Run both, compare, and print or write the table."""
    parser = options(__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="more settings of the sweep")
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    given = parser.parse_args()
    commit()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told = [part for setting in (*(f"{k}={v}" for k, v in SMALL.items()), *given.set) for part in ("--set", setting)]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        one, many = Path(place) / "one", Path(place) / "many"
        whole = ran("sweep", SWEEP, *told, "--out", one)
        rows.append(["one run", f"{whole[0]:.1f}", f"{whole[1]:.1f}"])
        spent = [ran("sweep", SWEEP, *told, "--out", many, "--shard", f"{n + 1}/{given.shards}")
                 for n in range(given.shards)]  # fmt: skip
        rows += [[f"shard {n}", f"{wall:.1f}", f"{cpu:.1f}"] for n, (wall, cpu) in enumerate(spent, 1)]
        spent.append(ran("report", many))
        rows.append(["`gradaudit report`", *(f"{part:.1f}" for part in spent[-1])])
        empty = ran("sweep", SWEEP, *told, "--out", Path(place) / "none", "--shard", "999/999")
        sums = [sum(part) for part in zip(*spent, strict=True)]
        rows.append(["shards and report", *(f"{part:.1f}" for part in sums)])
        more = [f"{total / alone - 1:+.1%}" for total, alone in zip(sums, whole, strict=True)]
        rows.append(["more than one run", *more])
        rows.append(["a shard without points", *(f"{part:.1f}" for part in empty)])
        found, wanted = table_of(many), table_of(one)
        same = found == wanted
    told_same = f"{len(wanted)} rows, the same table but for seconds: {'yes' if same else 'NO'}."
    table = markdown(["", "seconds", "of the processor"], rows) + f"\n\n{told_same}"
    print(table)
    if given.write is not None:
        write_table(given.write, f"{made()} One process at a time, beside other jobs of the machine.", table)


if __name__ == "__main__":
    main()
