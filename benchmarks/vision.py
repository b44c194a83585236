"""Images under defenses: LTI's vision table on CIFAR-10 and LeNet, B = 1, with its baselines, and LTI's ablations.

    python benchmarks/vision.py defenses sizes shift --images 10

Groups: `defenses` (all attacks), `sizes` and `shift` (LTI by number and kind of public images), `speed` (simulated
updates a second, one by one and many at a time). Private images are from
CIFAR-10's test split, public ones from its training split (in the papers' draw). A cell that is finished is read
and not run again.
Seconds are of one image; fitting is told apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from grid import Cell, Done, Options, Program, made, main, markdown, write_table
from pyarrow import parquet

from gradaudit.audit.fitting import simulation_of
from gradaudit.audit.prepare import Prepared as PreparedImages
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.client.simulate_images import ImageSimulation
from gradaudit.data.named import NAMED, local_files
from gradaudit.errors import BadInputError
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


SIZES = (500, 1000, 2000, 5000, 10_000)
SHARES = (0.0, 0.01, 0.05, 0.1, 0.5, 1.0)
PRIVATE: dict[str, Any] = {"source": "cifar10", "split": "test"}
PUBLIC: dict[str, Any] = {"source": "cifar10"}


def setting(
    attack: str,
    defense: str,
    images: int,
    rows: int,
    private: dict[str, Any] = PRIVATE,
    public: dict[str, Any] = PUBLIC,
    seed: int | None = 101,
    row: str = "",
) -> Cell:
    """Return an attack on private images under a defense, with so many public ones.

    Args:
        attack: key of `ATTACKS`.
        defense: key of `DEFENSES`.
        images: private images.
        rows: public images.
        private: where the private images are from.
        public: where the public ones are from.
        seed: of the private draw; None takes the first.
        row: the table's row, where all defenses are in one.
    """
    drawn = {"batches": images} | ({} if seed is None else {"shuffle_seed": seed})
    more = {"task": "image-classification", "data": private | drawn}
    if public:
        more["public"] = public | {"rows": rows, "shuffle_seed": 101}
    return Cell(
        model="lenet", batches=images, client={}, defense=DEFENSES[defense], title=f"{attack}, {defense} {row}".strip(),
        attack=ATTACKS[attack], more=more, facts={"attack": attack, "defense": defense, "row": row},
    )  # fmt: skip


def defenses(given: Options) -> list[Cell]:
    """Every attack under every defense."""
    return [setting(attack, d, given.images, given.public) for attack in given.only.split(",") for d in DEFENSES]


def sizes(given: Options) -> list[Cell]:
    """LTI by the number of public images."""
    return [setting("lti-plain", d, given.images, count, row=str(count)) for count in SIZES for d in DEFENSES]


def shift(given: Options) -> list[Cell]:
    """LTI by the share of public images that are of the private classes: private ones are of the first five."""
    private = {"path": str(given.out / "private.parquet")}
    return [
        setting("lti-plain", d, given.images, SHIFTED, private, {"path": str(shifted(given, beta))}, None, f"{beta:g}")
        for beta in SHARES
        for d in DEFENSES
    ]


def shifted(given: Options, beta: float) -> Path:
    """Return the file of public images of which a share is of the private classes."""
    return Path(given.out) / f"public-{beta:g}.parquet"


def before(group: str, given: Options) -> None:
    """Write the files of `shift`."""
    if group != "shift":
        return
    files = {split: local_files("cifar10", split) for split in ("train", "test")}
    if not all(files.values()):
        wanted = " and ".join(file for split in files for file in NAMED["cifar10"].files[split])
        raise BadInputError(f"shift is made of a local copy; set GRADAUDIT_DATA to a folder that holds {wanted}")
    take_classes(files["test"][0], given.out / "private.parquet", {True: given.images, False: 100})
    for beta in SHARES:
        near = round(beta * SHIFTED)
        take_classes(files["train"][0], shifted(given, beta), {True: near, False: SHIFTED - near})


def take_classes(source: Path, place: Path, counts: dict[bool, int]) -> None:
    """Write the first images of the private classes (True), then those of the others, into a file of their own."""
    table = parquet.read_table(source)
    private = [y < 5 for y in table.column("label").to_pylist()]
    rows = {kind: [n for n, one in enumerate(private) if one == kind][:most] for kind, most in counts.items()}
    place.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.take(rows[True] + rows[False]), place)


def speed(given: Options) -> None:
    """Simulate the same updates one by one and many at a time; seconds are the best of three turns."""
    rows = []
    for name in DEFENSES:
        case = parse_case(setting("lti-kernel", name, 1, 512, seed=None).case())
        ready = prepare(case, Path.cwd(), torch.device("cpu"))
        assert isinstance(ready, PreparedImages)
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
    head = f"{made()} 512 updates of LeNet, B = 1; the best of three turns."
    write_table(given.write / "speed.md", head, markdown(["defense", "one by one", "together", "times"], rows))


def mse(found: Summary) -> str:
    """Return the mean squared error with its interval."""
    one = found.scores["mse"]
    return f"{one.mean:.4f}" + ("" if one.low is None else f" ({one.low:.4f}-{one.high:.4f})")


def table(done: Sequence[Done]) -> list[list[str]]:
    """Return a row a cell, or of the groups with all defenses in a row, that row."""
    together: dict[str, list[str]] = {}
    for one in done:
        if not one.records:
            continue
        facts, found = one.cell.facts, summarize(one.records)[0]
        blind = f"{found.baseline['mse'].mean:.4f}"
        if facts["row"]:
            row = together.setdefault(facts["row"], [facts["row"], *[""] * len(DEFENSES), blind])
            row[1 + list(DEFENSES).index(facts["defense"])] = mse(found)
            continue
        attack, defense = facts["attack"], facts["defense"]
        published = PUBLISHED.get(attack)
        together[one.cell.title] = [
            attack, defense, str(found.n), str(found.failed), mse(found),
            *(f"{found.scores[n].mean or 0:.2f}" for n in ("psnr", "ssim")), blind, f"{found.seconds:.2f}",
            "" if one.learning is None else f"{one.learning:.0f}",
            "" if published is None else f"{published[list(DEFENSES).index(defense)]:.3f}",
        ]  # fmt: skip
    return list(together.values())


ABOUT = {
    "defenses": "CIFAR-10, LeNet, B = 1.",
    "sizes": "LTI (kernel, not mirrored) by public images.",
    "shift": f"LTI (kernel, not mirrored) by the share of {SHIFTED} public images that are of the private classes.",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add what this program takes."""
    parser.add_argument("--images", type=int, default=10, help="private images a cell")
    parser.add_argument("--public", type=int, default=5000, help="public images of the defenses' table")
    every = ",".join(a for a in ATTACKS if a != "lti-plain")
    parser.add_argument("--only", default=every, help="attacks of that table, joined by commas")


PROGRAM = Program(
    about=__doc__,
    groups={"defenses": defenses, "sizes": sizes, "shift": shift},
    columns={
        "defenses": (
            "attack", "defense", "images", "failed", "MSE", "PSNR", "SSIM", "blind MSE", "seconds an image",
            "fitting s", "published MSE",
        ),
        "sizes": ("public images", *DEFENSES, "blind MSE"),
        "shift": ("beta", *DEFENSES, "blind MSE"),
    },
    table=table,
    words=lambda group, given: (
        f"{ABOUT[group]} {given.images} private images a cell. The attacker is given the batch size, the defenses and "
        "public images (`blind` is their mean), not the labels. MSE of pixels in 0 to 1, lower is more leakage; in "
        "brackets the 95% interval over images. Published: LTI, arXiv 2210.10880, 50,000 auxiliary images."
    ),
    results=Path("benchmarks/results/vision"),
    records=Path("out/benchmarks/vision"),
    options=options,
    before=before,
    files={"defenses": "cifar10"},
    measured={"speed": speed},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
