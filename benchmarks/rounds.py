"""What a round of a defense takes: milliseconds of the mean update of sixteen clients, one sentence of CoLA each.

    OMP_NUM_THREADS=1 python benchmarks/rounds.py

The frontier's client (MiniLM, dropout on, attention and head trained), which trains a thousand rounds a point. With
`--other DIR`, a checkout of another commit (that has data sets by name), the same is measured of its code, both in
turns, and
stands beside it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grid import DATA, made, options, write_table

from gradaudit.audit.prepare import client_of, pick_device, prepare
from gradaudit.case import parse_case
from gradaudit.client.mean_update import mean_update
from gradaudit.data.text import make_batch
from gradaudit.registry import build
from gradaudit.streams import stream

CLIENTS = 16
DEFENSES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "dp-sgd": ("dp-sgd", {"noise_multiplier": 0.01}),
    "clip": ("clip", {"norm": 1.0}),
    "normalized-gaussian": ("normalized-gaussian", {"sigma": 0.01}),
    "topk, half kept": ("topk", {"keep": 0.5}),
    "topk, a hundredth kept": ("topk", {"keep": 0.01}),
    "quantize, 8 bits": ("quantize", {"bits": 8}),
    "quantize, 16 bits": ("quantize", {"bits": 16}),
    "sign": ("sign", {}),
}


def measure(turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of each turn, by defense."""
    table = {
        "model": "minilm",
        "task": "classification",
        "data": DATA["cola"] | {"shuffle_seed": 101, "batch_size": CLIENTS},
        "client": {"dropout": True, "freeze": ["embeddings", "*:f,p"]},
        "attack": {"name": "decode"},
    }
    case = parse_case(table)
    ready = prepare(case, Path.cwd(), pick_device("cpu"))
    client = client_of(case, ready.model)
    order = torch.randperm(len(ready.rows), generator=stream(0, "rounds")).tolist()
    rows, chosen = ready.rows.source, order[:CLIENTS]
    assert rows.labels is not None
    batch = make_batch(ready.model, [rows.texts[n] for n in chosen], [rows.labels[n] for n in chosen])
    found = defaultdict(list)
    for name, how in DEFENSES.items():
        one = client if how is None else replace(client, defenses=(build("defense", *how),))
        for turn in range(turns + 1):  # the first warms up
            began = time.perf_counter()
            mean_update(one, batch, CLIENTS, stream(turn, "round"))
            if turn:
                found[name].append(1e3 * (time.perf_counter() - began))
    return found


def main() -> None:
    """Measure, of one code or of two in turns, and write the table."""
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/defenses/rounds.md"))
    parser.add_argument("--print", action="store_true", help="print the numbers only, as `--other` asks for them")
    asked = parser.parse_args()
    if asked.print:
        for name, values in measure(asked.turns).items():
            print(name, *(f"{v:.2f}" for v in values), sep="\t")
        return
    here = Path(__file__).resolve().parent.parent
    codes = [here, *([asked.other.resolve()] if asked.other else [])]
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in codes]
    for _ in range(2 if asked.other else 1):  # in turns: the machine's own pace changes
        for code, into in zip(codes, found, strict=True):
            told = subprocess.run(
                [sys.executable, __file__, "--turns", str(asked.turns), "--print"],
                env=os.environ | {"PYTHONPATH": str(code / "src")}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            for line in told.stdout.splitlines():
                name, *values = line.split("\t")
                into[name] += map(float, values)
    other = f" | at {_at(asked.other)}, ms | times" if asked.other else ""
    lines = [f"| defense | ms a round{other} |", "|---|---|" + ("---|---|" if asked.other else "")]
    for name in DEFENSES:
        each = [statistics.median(one[name]) for one in found]
        ratio = [f"{each[1] / each[0]:.2f}"] if asked.other else []
        lines.append(f"| {' | '.join([name, *(f'{v:.0f}' for v in each), *ratio])} |")
    head = (
        "# What a round takes\n\n"
        f"{made()} The mean update of "
        f"{CLIENTS} clients with one sentence of CoLA each, MiniLM, dropout on, attention and head trained; medians."
    )
    write_table(asked.write, head, "\n".join(lines))
    print("\n".join(lines))


def _at(place: Path) -> str:
    told = subprocess.run(
        ["git", "-C", str(place), "describe", "--always"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or place.name


if __name__ == "__main__":
    main()
