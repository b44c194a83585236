"""Images under defenses: LTI's vision table on CIFAR-10 and LeNet, B = 1, with its baselines, and LTI's ablations.

    python benchmarks/vision.py defenses sizes shift --data ../shared/data/cifar10_jpeg --images 10

Groups: `defenses` (all attacks), `sizes` and `shift` (LTI by number and kind of public images), `speed` (simulated
updates a second, one by one and many at a time). Private images are from
test.parquet, public ones from train.parquet (in the papers' draw). A cell that is finished is read and not run again.
Seconds are of one image; fitting is told apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pyarrow import parquet
from tables import command, commit, write_table

from gradaudit.audit.fitting import simulation_of
from gradaudit.audit.prepare import Prepared, prepare
from gradaudit.audit.run import run
from gradaudit.case import Case, parse_case
from gradaudit.client.simulate_images import ImageSimulation
from gradaudit.machine import ready_process
from gradaudit.metrics.summary import summarize
from gradaudit.record import Summary
from gradaudit.streams import stream
from gradaudit.types import ImageBatch

DEFENSES = {
    "none": [],
    "sign": [{"name": "sign"}],
    "pruning 0.99": [{"name": "topk", "keep": 0.01}],
    "Gaussian 0.1": [{"name": "gaussian", "sigma": 0.1}],
}
ATTACKS = {
    "blind": {"name": "blind"},
    "lti-kernel": {"name": "lti-images", "learner": "kernel"},
    "lti-plain": {"name": "lti-images", "learner": "kernel", "mirrored": False},
    "lti-refined": {"name": "lti-images", "learner": "kernel", "refine": 1000},
    "ig": {"name": "ig", "steps": 1000},
    "ig-plain": {"name": "ig", "steps": 1000, "restarts": 1, "relative": False},
    "gigip": {"name": "gigip"},
    "gigip-plain": {"name": "gigip", "restarts": 1, "relative": False},
    "lti-network": {"name": "lti-images", "width": 1000, "epochs": 20},
}
SHIFTED = 2500
"""Public images of the shifted sets: no class half of the data here has 5,000."""
PUBLISHED = {  # LTI (arXiv 2210.10880): MSE on LeNet, 50,000 auxiliary images; the order of DEFENSES
    "ig": (0.022, 0.116, 0.138, 0.150),
    "ig-plain": (0.022, 0.116, 0.138, 0.150),
    "gigip": (0.001, 0.091, 0.043, 0.124),
    "gigip-plain": (0.001, 0.091, 0.043, 0.124),
    "lti-plain": (0.004, 0.014, 0.029, 0.012),
    "lti-kernel": (0.004, 0.014, 0.029, 0.012),
    "lti-refined": (0.004, 0.014, 0.029, 0.012),
    "lti-network": (0.004, 0.014, 0.029, 0.012),
}


@dataclass(frozen=True)
class Data:
    """Where images come from.

    Args:
        private, public: parquet files.
        images: private images a cell.
        rows: public images.
        seed: of the private draw; None takes the first.
    """

    private: Path
    public: Path
    images: int
    rows: int
    seed: int | None = 101


def case_of(data: Data, attack: str, defense: str) -> Case:
    """Return the case of a cell."""
    return parse_case(
        {
            "model": "lenet",
            "task": "image-classification",
            "data": {"path": str(data.private), "batches": data.images, "shuffle_seed": data.seed},
            "public": {"path": str(data.public), "rows": data.rows, "shuffle_seed": 101},
            "defense": DEFENSES[defense],
            "attack": ATTACKS[attack],
            "metrics": {"diagnose": False},
        }
    )


def cell(data: Data, attack: str, defense: str, out: Path) -> tuple[Summary, float]:
    """Run one cell and return its scores and the seconds spent on learning."""
    case = case_of(data, attack, defense)
    ready = prepare(case, Path.cwd(), torch.device("cpu"))
    began = time.perf_counter()
    folder = out / case.content_hash()
    spent = folder / "seconds.json"
    records = list(run(ready, folder, inverters=folder / "inverters"))
    whole = time.perf_counter() - began
    if not spent.is_file():
        spent.write_text(json.dumps(max(0.0, whole - sum(r.seconds for r in records))))
        shutil.rmtree(folder / "inverters", ignore_errors=True)  # hundreds of megabytes each
    return summarize(records)[0], json.loads(spent.read_text())


def defenses(asked: argparse.Namespace) -> None:
    """Every attack under every defense."""
    data = Data(asked.data / "test.parquet", asked.data / "train.parquet", asked.images, asked.public)
    rows = []
    for attack in asked.only.split(","):
        for number, defense in enumerate(DEFENSES):
            found, fitting = cell(data, attack, defense, asked.out)
            shown = [f"{found.scores[n].mean or 0:.2f}" for n in ("psnr", "ssim")]
            published = f"{PUBLISHED[attack][number]:.3f}" if attack in PUBLISHED else ""
            learned = f"{fitting:.0f}" if attack.startswith("lti") else ""
            counts = [str(found.n), str(found.failed)]
            blind = f"{found.baseline['mse'].mean:.4f}"
            seconds = f"{found.seconds:.2f}"
            rows.append([attack, defense, *counts, _mse(found), *shown, blind, seconds, learned, published])
            print(rows[-1], flush=True)
            heads = "attack, defense, images, failed, MSE, PSNR, SSIM, blind MSE, seconds an image, fitting s"
            _write(asked, "cifar10.md", "CIFAR-10, LeNet, B = 1", [*heads.split(", "), "published MSE"], rows)


def sizes(asked: argparse.Namespace) -> None:
    """LTI by the number of public images."""
    rows = []
    for count in (500, 1000, 2000, 5000, 10_000):
        data = Data(asked.data / "test.parquet", asked.data / "train.parquet", asked.images, count)
        found = [cell(data, "lti-plain", defense, asked.out)[0] for defense in DEFENSES]
        rows.append([str(count), *map(_mse, found), f"{found[0].baseline['mse'].mean:.4f}"])
        print(rows[-1], flush=True)
        _write(
            asked,
            "sizes.md",
            "LTI (kernel, not mirrored) by public images",
            ["public images", *DEFENSES, "blind MSE"],
            rows,
        )


def shift(asked: argparse.Namespace) -> None:
    """LTI by the share of public images that are of the private classes: private ones are of the first five."""
    rows = []
    private = _of_classes(asked.data / "test.parquet", asked.out / "private.parquet", {True: asked.images, False: 100})
    for beta in (0.0, 0.01, 0.05, 0.1, 0.5, 1.0):
        near = round(beta * SHIFTED)
        place = asked.out / f"public-{beta:g}.parquet"
        public = _of_classes(asked.data / "train.parquet", place, {True: near, False: SHIFTED - near})
        data = Data(private, public, asked.images, SHIFTED, seed=None)
        found = [cell(data, "lti-plain", defense, asked.out)[0] for defense in DEFENSES]
        rows.append([f"{beta:g}", *map(_mse, found), f"{found[0].baseline['mse'].mean:.4f}"])
        print(rows[-1], flush=True)
        head = f"LTI (kernel, not mirrored) by the share of {SHIFTED} public images that are of the private classes"
        _write(asked, "shift.md", head, ["beta", *DEFENSES, "blind MSE"], rows)


def speed(asked: argparse.Namespace) -> None:
    """Simulate the same updates one by one and many at a time; seconds are the best of three turns."""
    rows = []
    for name in DEFENSES:
        data = Data(asked.data / "test.parquet", asked.data / "train.parquet", 1, 512, None)
        ready = prepare(case_of(data, "lti-kernel", name), Path.cwd(), torch.device("cpu"))
        assert isinstance(ready, Prepared)
        assert ready.public is not None
        images, labels = ready.public.images[:, None], ready.public.labels[:, None]
        simulation = simulation_of(ready.client, ready.selection)
        assert isinstance(simulation, ImageSimulation)
        rates = []
        for together in (False, True):
            best = float("inf")
            for turn in range(3):
                began = time.perf_counter()
                if together:
                    simulation(images, labels, stream(turn, "speed"))
                else:
                    for n in range(len(images)):
                        ready.client.update(ImageBatch(images[n], labels[n]), stream(turn, "speed", n))
                best = min(best, (time.perf_counter() - began) / len(images))
            rates.append(1 / best)
        rows.append([name, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / rates[0]:.1f}"])
        about = f"512 updates of LeNet, B = 1, {torch.get_num_threads()} thread(s); the best of three turns."
        _write(asked, "speed.md", "updates a second", ["defense", "one by one", "together", "times"], rows, about)


def _of_classes(source: Path, place: Path, counts: dict[bool, int]) -> Path:
    """Write the first images of the private classes (True), then those of the others, into a file of their own."""
    table = parquet.read_table(source)
    private = [y < 5 for y in table.column("label").to_pylist()]
    rows = {kind: [n for n, one in enumerate(private) if one == kind][:most] for kind, most in counts.items()}
    place.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.take(rows[True] + rows[False]), place)
    return place


def main() -> None:
    """Run the groups that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {one.__name__: one for one in (defenses, sizes, shift, speed)}
    parser.add_argument("groups", nargs="+", choices=groups)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--images", type=int, default=10, help="private images a cell")
    parser.add_argument("--public", type=int, default=5000, help="public images of the defenses' table")
    parser.add_argument(
        "--only",
        default=",".join(a for a in ATTACKS if a != "lti-plain"),
        help="attacks of that table, joined by commas",
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/vision"))
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/vision"))
    asked = parser.parse_args()
    ready_process()
    for group in asked.groups:
        groups[group](asked)


def _mse(found: Summary) -> str:
    mse = found.scores["mse"]
    interval = "" if mse.low is None else f" ({mse.low:.4f}-{mse.high:.4f})"
    return f"{mse.mean:.4f}{interval}"


def _write(
    asked: argparse.Namespace, name: str, title: str, heads: list[str], rows: list[list[str]], about: str = ""
) -> None:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]
    about = about or (
        f"{asked.images} private images a cell. The attacker is given the batch size, the defenses and public images "
        "(`blind` is their mean), not the labels. MSE of pixels in 0 to 1, lower is more leakage; in brackets the 95% "
        "interval over images. Published: LTI, arXiv 2210.10880, 50,000 auxiliary images."
    )
    head = f"# Images under defenses: {title}\n\n`{command()}` at {commit()}. {about}"
    write_table(asked.write / name, head, "\n".join(lines))


if __name__ == "__main__":
    main()
