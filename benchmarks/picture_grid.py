"""A grid of pictures: private digits, and what each attack reads of them under each defense, LeNet, B = 1.

    python benchmarks/picture_grid.py

Five of scikit-learn's digits (real images that come with the package), the others being public, LTI's defenses at its
strengths; the attacks that need public images have those. Writes benchmarks/results/vision/digits.png, a row an
attack, five columns a defense. A cell that is finished is read and not run again. With `--cifar10` it is the same of
CIFAR-10, and `--write` says where the picture goes.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

from grid import Cell, Options, Runner, options
from PIL import Image, ImageDraw
from vision import DEFENSES, PRIVATE, PROGRAM, PUBLIC, mse, setting

from gradaudit.audit.info import IMAGES
from gradaudit.machine import ready_process
from gradaudit.metrics.summary import summarize
from gradaudit.record import Pictures

ROWS = {"blind": "blind", "ig": "ig", "gigip": "gigip", "lti-images": "lti-kernel", "refined": "lti-refined"}
"""What a row is called, and what it is in the table."""
SIDE, GAP, MARGIN, HEAD = 40, 4, 92, 22
"""Pixels: of an image, between images, left of them, above them."""


def cell(given: Options, attack: str, defense: str) -> Cell:
    """Return a cell of the picture."""
    private, public = (PRIVATE, PUBLIC) if given.cifar10 else ({"source": "digits"}, {})
    found = setting(attack, defense, given.images, given.public, private, public)
    return replace(found, name=f"{attack}-{defense.replace(' ', '-')}")


def pictures(folder: Path) -> list[tuple[Image.Image, Image.Image | None]]:
    """Return a cell's originals and what was read of each."""
    lines = (folder / IMAGES).read_text(encoding="utf8").splitlines()
    found = sorted((Pictures.model_validate_json(line) for line in lines), key=lambda one: one.batch)
    return [
        (_picture(original), None if recovered is None else _picture(recovered))
        for one in found
        for original, recovered in zip(one.originals, one.recovered, strict=True)
    ]


def _picture(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)


def grid(out: Path, errors: dict[tuple[str, str], str]) -> Image.Image:
    """Return the picture of all cells, each with its mean squared error."""
    several = len(pictures(out / f"{next(iter(ROWS.values()))}-none"))
    wide = several * (SIDE + GAP) + 3 * GAP
    high = SIDE + HEAD
    page = Image.new("RGB", (MARGIN + len(DEFENSES) * wide, HEAD + (1 + len(ROWS)) * high), "white")
    pen = ImageDraw.Draw(page)
    for column, defense in enumerate(DEFENSES):
        left = MARGIN + column * wide
        pen.text((left, 6), defense, fill="black")
        for row, (name, attack) in enumerate({"private": None, **ROWS}.items()):
            top = HEAD + row * high
            if column == 0:
                pen.text((6, top + SIDE // 2 - 6), name, fill="black")
            shown = pictures(out / f"{attack or 'blind'}-{defense.replace(' ', '-')}")
            for n, (original, recovered) in enumerate(shown):
                one = original if attack is None else recovered
                if one is not None:
                    page.paste(one, (left + n * (SIDE + GAP), top))
            if attack is not None:
                pen.text((left, top + SIDE + 2), f"MSE {errors[attack, defense]}", fill="dimgray")
    return page


def main() -> None:
    """Run all cells and write the picture."""
    parser = options(__doc__)
    parser.add_argument("--cifar10", action="store_true", help="in place of digits")
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--public", type=int, default=5000, help="public images where they are not digits")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/pictures"))
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/vision/digits.png"))
    parser.set_defaults(device="cpu")
    asked = parser.parse_args()
    ready_process()
    runner, errors = Runner(PROGRAM, asked), {}
    for attack in ROWS.values():
        for defense in DEFENSES:
            done = runner.finished(cell(asked, attack, defense), 0)
            if runner.failed:
                parser.error("; ".join(runner.failed.values()))
            found = summarize(done.records)[0]
            errors[attack, defense] = mse(found).split(" (")[0]
            print(f"{attack}, {defense}: MSE {errors[attack, defense]}, {found.seconds:.1f} s", flush=True)
    asked.write.parent.mkdir(parents=True, exist_ok=True)
    grid(asked.out, errors).save(asked.write, optimize=True)
    print(asked.write)


if __name__ == "__main__":
    main()
