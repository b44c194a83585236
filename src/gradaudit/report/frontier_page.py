"""The frontier as a page and as a drawing: `frontier.html` and an SVG a batch size."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gradaudit.files import read_lines, write_page
from gradaudit.report import images, text  # noqa: F401 - each registers its page
from gradaudit.report.page import page_of
from gradaudit.report.visible import clip, environment, visible
from gradaudit.sweeps.frontier import USEFUL, Frontier, OperatingPoint

PAGE = "frontier.html"
_HERE = Path(__file__).parent
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 530, 22, 308
_APART = 12.0
"""Points nearer than this share a label."""


def write_frontiers(folder: Path, found: Sequence[Frontier], title: str, show_text: bool = False) -> Path:
    """Write the page and a drawing for each batch size into a sweep's folder, and return the page's path.

    Args:
        folder: the sweep's.
        found: its frontiers.
        title: what the page is called.
        show_text: show the private words of the sentences, or the images, that were read best; blocks stand for words
            otherwise, and images are left out.

    Raises:
        BadInputError: the folder cannot be written.
    """
    drawings = [frontier_svg(one) for one in found]
    shown = [[_worst(folder, point, show_text) for point in one.points] for one in found]
    html = (
        environment()
        .get_template("frontier.html.j2")
        .render(
            title=visible(title),
            css=Markup((_HERE / "report.css").read_text(encoding="utf8")),
            frontiers=list(zip(found, drawings, shown, strict=True)),
            show_text=show_text,
            page=page_of(next((point.measure.kind for one in found for point in one.points), "")),
            short=lambda value: clip(visible(value), 120),
        )
    )
    for one in found:
        write_page(folder / f"frontier-{one.batch_size}.svg", drawing_alone(one), private=False)
    return write_page(folder / PAGE, html, private=show_text)


def _worst(folder: Path, point: OperatingPoint, show_text: bool) -> Any:
    if point.worst is None:
        return None
    record, at = point.worst
    page = page_of(point.measure.kind)
    private = [] if page.private is None else read_lines(folder / record.case / page.file, page.private)
    return page.read_best(record, at, next((p for p in private if p.batch == record.batch), None), show_text)


_SHAPES = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-4 -4H4V4H-4Z",
    "M0 -5L5 4H-5Z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
    "M0 5L5 -4H-5Z",
    "M-2 -5H2V-2H5V2H2V5H-2V2H-5V-2H-2Z",
)
"""Disk, square, triangle, rhombus, triangle on its tip, cross."""
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8a6d00")
"""Of Okabe and Ito's palette, but for the yellow, which is too light on white. With five colors and six shapes thirty
families differ."""


def _signs(found: Frontier) -> dict[str, tuple[str, str]]:
    """Return shape and color of each family of defenses, in the order of the points."""
    families = dict.fromkeys(point.family for point in found.points)
    return {name: (_SHAPES[n % len(_SHAPES)], _COLORS[n % len(_COLORS)]) for n, name in enumerate(families)}


def drawing_alone(found: Frontier, note: str = "") -> str:
    """Return the drawing as a file of its own, which no page gives colors.

    Args:
        found: the frontier.
        note: one line below it.
    """
    return str(frontier_svg(found, note)).replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="color:#1c2126;background:#fff" ', 1
    )


def frontier_svg(found: Frontier, note: str = "") -> Markup:
    """Return an SVG drawing of leakage over utility: a shape and color a family of defenses, dominated points hollow.

    The chosen one is ringed, and what is both private and useful is shaded. Points on the front have their numbers
    beside them; the others say theirs under the pointer.

    Args:
        found: the frontier; its points are numbered in its order.
        note: one line below it.
    """
    mccs = [end for p in found.points for end in (p.utility.mcc_low, p.utility.mcc_high)]
    most = max([10.0, *mccs])
    apart = 10 if most <= 60 else 20
    low, high = 0, math.ceil(most / apart) * apart

    def across(value: float) -> float:
        return _LEFT + (max(value, low) - low) / (high - low) * (_RIGHT - _LEFT)

    def down(value: float) -> float:
        return _BOTTOM - min(max(value, 0.0), 100.0) / 100 * (_BOTTOM - _TOP)

    def place(point: OperatingPoint) -> tuple[float, float]:
        return across(point.utility.mcc), down(point.leak.mean or 0.0)

    labels: dict[tuple[float, float], str] = {}
    for number, point in enumerate(found.points, 1):
        if point.dominated:
            continue
        at = place(point)
        near = next((other for other in labels if math.dist(other, at) < _APART), None)
        label = f"{number}{'↑' if point.bound else ''}"  # at least so much
        labels[near or at] = label if near is None else f"{labels[near]}, {label}"
    drawn = (
        environment()
        .get_template("frontier_drawing.html.j2")
        .render(
            found=found,
            note=note,
            box=(_LEFT, _RIGHT, _TOP, _BOTTOM),
            across=across,
            down=down,
            place=place,
            ticks=range(low, high + 1, apart),
            front=[place(p) for p in sorted(found.points, key=lambda p: p.utility.mcc) if not p.dominated],
            labels=labels,
            signs=_signs(found),
            useful=USEFUL * max((p.utility.mcc for p in found.points), default=0.0),
        )
    )
    return Markup(drawn)
