"""The frontier as a page and as a drawing: `frontier.html` and an SVG a batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from gradaudit.files import read_lines, write_page
from gradaudit.report import images, text  # noqa: F401 - each registers its page
from gradaudit.report.page import page_of
from gradaudit.report.render import environment
from gradaudit.report.visible import clip, visible
from gradaudit.sweeps.frontier import Frontier, OperatingPoint

PAGE = "frontier.html"
_HERE = Path(__file__).parent
_WIDTH, _HEIGHT = 560, 360
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
    for one, drawing in zip(found, drawings, strict=True):
        write_page(folder / f"frontier-{one.batch_size}.svg", _alone(drawing), private=False)
    return write_page(folder / PAGE, html, private=show_text)


def _worst(folder: Path, point: OperatingPoint, show_text: bool) -> Any:
    if point.worst is None:
        return None
    record, at = point.worst
    page = page_of(point.measure.kind)
    private = [] if page.private is None else read_lines(folder / record.case / page.file, page.private)
    return page.read_best(record, at, next((p for p in private if p.batch == record.batch), None), show_text)


def _alone(drawing: Markup) -> str:
    # as a file of its own it has no page that gives colors
    return str(drawing).replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="color:#1c2126;background:#fff" ', 1
    )


def frontier_svg(found: Frontier) -> Markup:
    """Return an SVG drawing of leakage over utility: numbered points, dominated ones hollow, the chosen one ringed.

    Args:
        found: the frontier; its points are numbered in its order.
    """
    mccs = [end for p in found.points for end in (p.utility.mcc_low, p.utility.mcc_high)]
    least, most = min([0.0, *mccs]), max([10.0, *mccs])
    apart = 10 if most - least <= 60 else 20
    low, high = math.floor(least / apart) * apart, math.ceil(most / apart) * apart

    def across(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)

    def down(value: float) -> float:
        return _BOTTOM - min(max(value, 0.0), 100.0) / 100 * (_BOTTOM - _TOP)

    unit = found.points[0].measure.about if found.points else "none measured"
    told = f"Leakage over utility at batch size {found.batch_size}: {len(found.points)} settings. {found.reason}"
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" fill="currentColor" font-size="12.5" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(visible(told))}</title>",
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor"/>',
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">utility: Matthews correlation, 0 to '
        "100 (better to the right)</text>",
        f'<text transform="translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">leakage: '
        f"{escape(unit)}</text>",
    ]
    for value in (0.0, 25.0, 50.0, 75.0, 100.0):
        parts.append(
            f'<path d="M{_LEFT} {down(value):.1f}H{_RIGHT}" stroke="currentColor" stroke-width="0.5" opacity="0.2"/>'
            f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        )
    for value in range(low, high + 1, apart):
        parts.append(f'<text x="{across(value):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{value:.0f}</text>')
    if found.points:
        blind = found.points[0].blind
        below = down(blind) + 14
        beside = below if below < _BOTTOM else down(blind) - 6
        parts.append(
            f'<path d="M{_LEFT} {down(blind):.1f}H{_RIGHT}" stroke="currentColor" stroke-dasharray="5 4"/>'
            f'<text x="{_RIGHT}" y="{beside:.1f}" text-anchor="end">blind</text>'
        )
    front = sorted((p for p in found.points if not p.dominated), key=lambda p: p.utility.mcc)
    line = " ".join(f"{across(p.utility.mcc):.1f},{down(p.leak.mean or 0):.1f}" for p in front)
    if len(front) > 1:
        parts.append(f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.2" opacity="0.5"/>')
    labels: dict[tuple[float, float], str] = {}
    for number, point in enumerate(found.points, 1):
        x, y = across(point.utility.mcc), down(point.leak.mean or 0.0)
        parts += _drawn(point, across, down, point == found.chosen)
        near = next((at for at in labels if math.dist(at, (x, y)) < _APART), None)
        label = f"{number}{'↑' if point.bound else ''}"  # at least so much
        labels[near or (x, y)] = label if near is None else f"{labels[near]}, {label}"
    parts += [
        f'<text x="{x + 7:.1f}" y="{y - 6:.1f}" font-size="11">{label}</text>' for (x, y), label in labels.items()
    ]
    return Markup("".join([*parts, "</svg>"]))


def _drawn(
    point: OperatingPoint, across: Callable[[float], float], down: Callable[[float], float], chosen: bool
) -> list[str]:
    cost = point.utility
    x, y = across(cost.mcc), down(point.leak.mean or 0.0)
    span = f"M{across(cost.mcc_low):.1f} {y:.1f}H{across(cost.mcc_high):.1f}"
    parts = [f'<path d="{span}" stroke="currentColor" opacity="0.25"/>']
    if point.leak.low is not None and point.leak.high is not None:
        span = f"M{x:.1f} {down(point.leak.low):.1f}V{down(point.leak.high):.1f}"
        parts.append(f'<path d="{span}" stroke="currentColor" opacity="0.4"/>')
    inside = "none" if point.dominated else "currentColor"
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{inside}" stroke="currentColor" stroke-width="1.3"/>')
    if chosen:
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="currentColor" stroke-width="2"/>')
    return parts
