"""DAGER beyond exact gradients: few digits, noise and local training; a table a group in benchmarks/results/dager/.

    python benchmarks/rotten_tomatoes.py ../shared/data/rotten_tomatoes out/data/rotten_tomatoes.tsv
    OMP_NUM_THREADS=1 python benchmarks/dager.py precision fedavg

Groups: precision (half precision, integers, Gaussian noise), fedavg (the paper's grid and beyond; four blocks, random
weights). Records go to out/benchmarks (a run that was stopped goes on there) and hold no text. Failures count 0.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from exact_decoding import DATA, OFF
from tables import command, commit, write_table

from gradaudit.audit import pick_device, prepare, run
from gradaudit.case import parse_case
from gradaudit.metrics.summary import summarize
from gradaudit.record import Record


@dataclass(frozen=True)
class Cell:
    """One row.

    Args:
        title: what the table calls it.
        model: the case's model.
        data: key of `DATA`.
        size: batch size.
        batches: how many.
        client: the [client] table.
        defense: [[defense]] tables.
        layers: blocks of the model; None for all.
        published: ROUGE-1 in the paper, if any.
    """

    title: str
    model: str
    data: str
    size: int
    batches: int
    client: dict[str, Any] = field(default_factory=lambda: dict(OFF))
    defense: tuple[dict[str, Any], ...] = ()
    layers: int | None = None
    published: str = ""

    def case(self) -> dict[str, Any]:
        """The case file's content."""
        return {
            "name": self.title,
            "model": self.model,
            "layers": self.layers,
            "data": DATA[self.data] | {"shuffle_seed": 202, "batch_size": self.size, "batches": self.batches},
            "client": self.client,
            "defense": list(self.defense),
            "attack": {"name": "dager"},
            "metrics": {"diagnose": False},
        }


def precision() -> list[Cell]:
    """Half precision and 8-bit integers at B = 1, 4, 16, and the paper's noise at B = 1."""
    cells = []
    for model in ("smollm2", "random:gpt2"):
        for size in (1, 4, 16):
            for name, how in (("float32", ()), ("bfloat16", (16,)), ("int8", (8,))):
                defense = tuple({"name": "quantize", "bits": bits} for bits in how)
                cells.append(Cell(name, model, "cola", size, 3, defense=defense))
        for sigma, value in ((1e-5, "74.0"), (5e-5, "46.9"), (1e-4, "20.7"), (5e-4, "5.6")):
            noise = ({"name": "gaussian", "sigma": sigma},)
            cells.append(Cell(f"noise {sigma:g}", model, "rt", 1, 5, defense=noise, published=value))
    return cells


def fedavg() -> list[Cell]:
    """The paper's grid around 10 epochs, learning rate 1e-4, minibatches of 4; larger rates and AdamW."""
    usual = {"dropout": False, "optimizer": "sgd", "learning_rate": 1e-4, "epochs": 10, "minibatch": 4}
    grid: list[tuple[str, dict[str, Any], str]] = [("epochs 10, lr 1e-4, minibatch 4", {}, "95.4")]
    grid += [(f"epochs {e}", {"epochs": e}, v) for e, v in ((2, "98.4"), (5, "97.3"), (20, "96.0"))]
    grid += [(f"lr {r:g}", {"learning_rate": r}, v) for r, v in ((1e-5, "100"), (5e-5, "99.8"), (5e-4, "84.2"))]
    grid += [(f"minibatch {m}", {"minibatch": m}, v) for m, v in ((2, "93.2"), (8, "98.6"), (16, "100"))]
    grid += [(f"lr {r:g}", {"learning_rate": r}, "") for r in (1e-3, 1e-2)]
    grid += [("AdamW, lr 1e-4", {"optimizer": "adamw"}, "")]
    return [
        Cell(title, "random:gpt2", "rt", 16, 2, usual | how, layers=4, published=value) for title, how, value in grid
    ]


GROUPS = {"precision": precision, "fedavg": fedavg}
HEADER = (
    "| update | model | data | B | batches | load b/d | R-1 | R-2 | R-L | exact % | blind R-L | median s "
    "| published R-1 |\n" + "|---" * 13 + "|"
)


def row(cell: Cell, records: list[Record]) -> str:
    """Return the cell's table row."""
    summary = summarize(records)[0]
    scores = [summary.scores[k].mean or 0.0 for k in ("rouge1", "rouge2", "rougeL", "exact")]
    loads = [r.load for r in records]
    model = cell.model if cell.layers is None else f"{cell.model}, {cell.layers} blocks"
    return (
        f"| {cell.title} | {model} | {cell.data} | {cell.size} | {len(records)} | {min(loads):.2f}-{max(loads):.2f} "
        f"| {' | '.join(f'{v:.1f}' for v in scores)} | {summary.baseline['rougeL'].mean or 0:.1f} "
        f"| {summary.seconds:.1f} | {cell.published} |"
    )


def main() -> None:
    """Run the groups and write a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=sorted(GROUPS))
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/dager"), help="folder for the records")
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/dager"), help="tables' folder")
    parser.add_argument("--batches", type=int, default=0, help="at most so many a cell; 0 for all")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = pick_device(given.device)
    for group in given.groups:
        lines = []
        for cell in GROUPS[group]():
            ready = prepare(parse_case(cell.case()), Path.cwd(), device, None)
            title = f"{group}-{cell.model}-{cell.data}-{cell.size}-{cell.title}"
            records: list[Record] = []
            for record in run(ready, given.out / title.replace(" ", "-").replace(",", "").replace(":", "-")):
                records.append(record)
                if len(records) == given.batches:
                    break
            lines.append(row(cell, records))
            print(lines[-1], flush=True)
            head = (
                f"Made by `{command()}` (commit {commit()}) on {device}, {torch.get_num_threads()} thread(s). Our "
                "scoring; the attacker has the weights, and knows batch size and training, not labels or lengths; "
                "failures count 0. Draw 202: thresholds were developed on 101. "
                "Published: GPT-2 with trained weights, Rotten Tomatoes."
            )
            write_table(given.write / f"{group}.md", head, "\n".join([HEADER, *lines]))


if __name__ == "__main__":
    main()
