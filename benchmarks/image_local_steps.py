"""What local steps hide of images: `ig` with the client's steps replayed, and with the change read as one gradient.

    OMP_NUM_THREADS=1 python benchmarks/image_local_steps.py

Digits, LeNet, SGD. Run again to go on: finished batches are read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grid import Cell, Done, Options, Program, each, main

from gradaudit.metrics.summary import summarize

CLIENTS = [(1, 1, 0.1), (1, 4, 0.01), (1, 4, 0.1)]
"""Images, epochs and learning rate."""
COLUMNS = (
    "images", "local steps", "learning rate", "replayed", "MSE", "PSNR", "SSIM", "blind MSE", "s a batch", "flags"
)  # fmt: skip


def cells(given: Options) -> list[Cell]:
    """Return every client, with its steps replayed and not."""
    return [
        Cell(
            model="lenet", size=size, batches=10, title=f"{size} images, {epochs} steps, {rate:g}, {replayed} replayed",
            client={"optimizer": "sgd", "learning_rate": rate, "epochs": epochs},
            attack={"name": "ig", "steps": given.steps, "restarts": 4, "replayed_steps": replayed},
            more={
                "task": "image-classification",
                "data": {"source": "digits", "batch_size": size, "batches": 10, "shuffle_seed": 7},
                "metrics": {},
            },
        )
        for size, epochs, rate in CLIENTS
        for replayed in ((8, 0) if epochs > 1 else (8,))
    ]  # fmt: skip


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    client, found = done.cell.client, summarize(done.records)[0]
    replayed = done.cell.attack["replayed_steps"] and client["epochs"] > 1
    scores = [f"{found.scores[k].mean or 0.0:.{n}f}" for k, n in (("mse", 4), ("psnr", 1), ("ssim", 2))]
    return [
        str(done.cell.size), str(client["epochs"]), f"{client['learning_rate']:g}", "yes" if replayed else "no",
        *scores, f"{found.baseline['mse'].mean or 0.0:.4f}", f"{found.seconds:.1f}", ", ".join(found.flags),
    ]  # fmt: skip


PROGRAM = Program(
    about=__doc__,
    groups={"local-steps": cells},
    columns=COLUMNS,
    table=each(row),
    words=lambda group, given: (
        "Digits of scikit-learn, 8 x 8, LeNet (parameters uniform in -0.5 to 0.5), 10 batches (fewer where asked) "
        f"each, `ig` with {given.steps} steps and 4 restarts, training known."
        " With one step a weight change is a gradient."
    ),
    results=Path("benchmarks/results/vision"),
    records=Path("out/benchmarks/image-local-steps"),
    options=lambda parser: parser.add_argument("--steps", type=int, default=500, help="of signed Adam") and None,
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
