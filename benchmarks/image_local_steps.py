"""What local steps hide of images: `ig` with the client's steps replayed, and with the change read as one gradient.

    OMP_NUM_THREADS=1 python benchmarks/image_local_steps.py

Digits, LeNet, SGD. Run again to go on: finished batches are read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tables import command, commit, write_table

from gradaudit.audit.prepare import pick_device, prepare
from gradaudit.audit.run import run
from gradaudit.case import parse_case
from gradaudit.machine import ready_process
from gradaudit.metrics.summary import summarize

CLIENTS = [(1, 1, 0.1), (1, 4, 0.01), (1, 4, 0.1)]
"""Images, epochs and learning rate."""
HEADER = (
    "| images | local steps | learning rate | replayed | MSE | PSNR | SSIM | blind MSE | s a batch | flags |\n"
    + "|---" * 10
    + "|"
)


def case_of(size: int, epochs: int, rate: float, replayed: int, batches: int, steps: int) -> dict[str, Any]:
    """Return the case file's content."""
    return {
        "name": "local steps",
        "model": "lenet",
        "task": "image-classification",
        "data": {"source": "digits", "batch_size": size, "batches": batches, "shuffle_seed": 7},
        "client": {"optimizer": "sgd", "learning_rate": rate, "epochs": epochs},
        "attack": {"name": "ig", "steps": steps, "restarts": 4, "replayed_steps": replayed},
    }


def main() -> None:
    """Run every setting and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/image-local-steps"), help="records")
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/vision"), help="the table's folder")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500, help="of signed Adam")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    ready_process()
    device, lines = pick_device(given.device), [HEADER]
    for size, epochs, rate in CLIENTS:
        for replayed in (8, 0) if epochs > 1 else (8,):
            case = parse_case(case_of(size, epochs, rate, replayed, given.batches, given.steps))
            records = list(run(prepare(case, Path.cwd(), device), given.out / case.content_hash()))
            found = summarize(records)[0]
            scores = " | ".join(
                f"{found.scores[k].mean or 0.0:.{n}f}" for k, n in (("mse", 4), ("psnr", 1), ("ssim", 2))
            )
            lines.append(
                f"| {size} | {epochs} | {rate:g} | {'yes' if replayed and epochs > 1 else 'no'} | {scores} "
                f"| {found.baseline['mse'].mean or 0.0:.4f} | {found.seconds:.1f} | {', '.join(found.flags)} |"
            )
            print(lines[-1], flush=True)
    about = (
        f"Made by `{command()}` (commit {commit()}) on {device}, {torch.get_num_threads()} thread(s). Digits of "
        f"scikit-learn, 8 x 8, LeNet (parameters uniform in -0.5 to 0.5), {given.batches} batches, `ig` with "
        f"{given.steps} steps and 4 restarts, training known. With one step a weight change is a gradient."
    )
    write_table(given.write / "local-steps.md", about, "\n".join(lines))


if __name__ == "__main__":
    main()
