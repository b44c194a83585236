"""How many threads an attack should take: `gradaudit --threads N attack`, alone and beside busy processes.

    python benchmarks/threads.py BUNDLE --write benchmarks/results/threads.md

BUNDLE is a folder, as `gradaudit demo` leaves it in gradaudit-demo/update. Run it alone: the load is made here. The
settings of a load are tried turn about. The last row of a load lets threads spin while they wait for each other, as
OpenMP does where nobody says otherwise.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grid import made, markdown, options, write_table

LOADS = (0, 8)
"""Busy processes beside it."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def took(bundle: str, attack: str, threads: int, policy: str) -> tuple[float, float]:
    """Return the wall and processor seconds of one attack, loading included."""
    command = [sys.executable, "-m", "gradaudit", "--threads", str(threads), "attack", bundle, "--attack", attack]
    before, began = os.times(), time.perf_counter()
    subprocess.run([*command, "--json"], env=os.environ | {"OMP_WAIT_POLICY": policy}, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("bundle")
    asked.add_argument("--attack", default="decode")
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--write", type=Path)
    given = asked.parse_args()
    cores = os.cpu_count() or 1
    ways = [(n, "PASSIVE") for n in range(1, cores + 1)] + [(cores, "ACTIVE")]
    rows = []
    for load in LOADS:
        found: dict[tuple[int, str], list[tuple[float, float]]] = {way: [] for way in ways}
        with busy(load):
            for _ in range(given.times):
                for way in ways:
                    found[way].append(took(given.bundle, given.attack, *way))
        for (threads, policy), times in found.items():
            medians = [f"{statistics.median(column):.1f}" for column in zip(*times, strict=True)]
            wait = "sleep" if policy == "PASSIVE" else "spin"
            rows.append([str(load), str(threads), wait, *medians])
    columns = ("busy processes", "threads", "while they wait they", "wall s", "processor s")
    head = f"{made()} {cores} cores; `{given.attack}`, loading included; medians of {given.times}, turn about."
    table = markdown(columns, rows)
    print(table)
    if given.write:
        write_table(given.write, head, table)


if __name__ == "__main__":
    main()
