"""Images under defenses: LTI's vision table on CIFAR-10 and LeNet, B = 1, with its baselines.

    python benchmarks/vision.py ../shared/data/cifar10_jpeg [--images 10] [--only lti-kernel,ig]

Private images are from test.parquet, public ones the first 5,000 of train.parquet (in the papers' draw). A cell that is
finished is read and not run again. Seconds are of one image; fitting is told apart.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tables import command, commit, write_table

from gradaudit.audit import prepare, run
from gradaudit.case import parse_case
from gradaudit.metrics.summary import summarize
from gradaudit.process import ready_process

DEFENSES = {
    "none": [],
    "sign": [{"name": "sign"}],
    "pruning 0.99": [{"name": "topk", "keep": 0.01}],
    "Gaussian 0.1": [{"name": "gaussian", "sigma": 0.1}],
}
ATTACKS = {
    "blind": {"name": "blind"},
    "lti-kernel": {"name": "lti-images", "learner": "kernel", "mirrored": False},
    "ig": {"name": "ig", "steps": 1000},
    "gigip": {"name": "gigip"},
    "lti-network": {"name": "lti-images", "width": 1000, "epochs": 20},
}
PUBLISHED = {  # LTI (arXiv 2210.10880): MSE on LeNet, 50,000 auxiliary images; the order of DEFENSES
    "ig": (0.022, 0.116, 0.138, 0.150),
    "gigip": (0.001, 0.091, 0.043, 0.124),
    "lti-kernel": (0.004, 0.014, 0.029, 0.012),
    "lti-network": (0.004, 0.014, 0.029, 0.012),
}


def cell(data: Path, attack: str, defense: str, images: int, public: int, out: Path) -> list[str]:
    """Run one cell and return its row."""
    case = parse_case(
        {
            "model": "lenet",
            "task": "image-classification",
            "data": {"path": str(data / "test.parquet"), "batches": images, "shuffle_seed": 101},
            "public": {"path": str(data / "train.parquet"), "rows": public, "shuffle_seed": 101},
            "defense": DEFENSES[defense],
            "attack": ATTACKS[attack],
            "metrics": {"diagnose": False},
        }
    )
    ready = prepare(case, Path.cwd(), torch.device("cpu"))
    began = time.perf_counter()
    folder = out / case.content_hash()
    spent = folder / "seconds.json"
    records = list(run(ready, folder, inverters=out / "inverters"))
    whole = time.perf_counter() - began
    if not spent.is_file():
        spent.write_text(json.dumps(max(0.0, whole - sum(r.seconds for r in records))))
    fitting = json.loads(spent.read_text())
    found = summarize(records)[0]
    scores, blind = found.scores, found.baseline["mse"].mean
    mse = scores["mse"]
    told = PUBLISHED.get(attack)
    published = "" if told is None else f"{told[list(DEFENSES).index(defense)]:.3f}"
    interval = f"{mse.mean:.4f} ({mse.low:.4f}-{mse.high:.4f})" if mse.low is not None else f"{mse.mean:.4f}"
    shown = [f"{scores[n].mean:.2f}" if scores[n].mean is not None else "" for n in ("psnr", "ssim")]
    learned = f"{fitting:.0f}" if attack.startswith("lti") else ""
    row = [attack, defense, str(found.n), str(found.failed), interval, *shown, f"{blind:.4f}", f"{found.seconds:.2f}"]
    return [*row, learned, published]


def main() -> None:
    """Run the cells that are asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=10, help="private images a cell")
    parser.add_argument("--public", type=int, default=5000, help="public images")
    parser.add_argument("--only", default=",".join(ATTACKS), help="attacks, joined by commas")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/vision"))
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/vision"))
    asked = parser.parse_args()
    ready_process()
    rows = []
    for attack in asked.only.split(","):
        for defense in DEFENSES:
            rows.append(cell(asked.data, attack, defense, asked.images, asked.public, asked.out))
            print(rows[-1], flush=True)
            _write(asked.write / "cifar10.md", rows)


def _write(place: Path, rows: list[list[str]]) -> None:
    heads = "attack, defense, images, failed, MSE, PSNR, SSIM, blind MSE, seconds an image, fitting s, published MSE"
    lines = [f"| {' | '.join(heads.split(', '))} |", "|" + "---|" * len(heads.split(", "))]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    head = (
        f"# Images under defenses: CIFAR-10, LeNet, B = 1\n\n`{command()}` at {commit()}. The attacker is given the "
        "batch size, the defenses and public images (`blind` is their mean), not the labels. MSE of pixels in 0 to 1, "
        "lower is more leakage; in brackets the 95% interval over images. Published: MSE of IG, GI-GIP and LTI with "
        "50,000 auxiliary images (LTI, arXiv 2210.10880)."
    )
    write_table(place, head, "\n".join(lines))


if __name__ == "__main__":
    main()
