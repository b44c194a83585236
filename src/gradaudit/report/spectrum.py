"""The singular values of a block's gradient as an inline SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import escape

from gradaudit.record import Spectrum
from gradaudit.report.visible import visible

_WIDTH, _HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 408, 66, 236
_POINTS = 240


def spectrum_svg(spectrum: Spectrum) -> str:
    """Return an SVG drawing of singular values on a log scale against their index, with rank, b and d marked.

    Args:
        spectrum: of one block; values that are not positive or not finite are drawn at the lowest other.

    Returns:
        one `<svg>` element; it takes its color from the text around it, and tells lines apart by dashes.
    """
    floor = min([v for v in spectrum.values if math.isfinite(v) and v > 0.0] + [0.1])
    values = [v if math.isfinite(v) and v > floor else floor for v in spectrum.values]
    decades = max(1, math.ceil(-math.log10(floor)))
    last = max(len(values), spectrum.width, 2)

    def across(index: float) -> float:
        return _LEFT + (min(index, last) - 1) / (last - 1) * (_RIGHT - _LEFT)

    def down(value: float) -> float:
        return _TOP + min(1.0, max(0.0, -math.log10(value) / decades)) * (_BOTTOM - _TOP)

    told = _told(spectrum)
    parts = [
        f'<svg class="spectrum" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" fill="currentColor" font-size="13.5">',
        f"<title>{told}</title>",
        *_axes(decades, last),
    ]
    chosen = _thin(len(values), spectrum.rank)
    line = " ".join(f"{across(i + 1):.1f},{down(values[i]):.1f}" for i in chosen)
    if len(chosen) > 1:
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.75" stroke-linejoin="round"/>'
        )
    if len(chosen) <= 80:
        parts += [f'<circle cx="{across(i + 1):.1f}" cy="{down(values[i]):.1f}" r="2.2"/>' for i in chosen]
    markers = [("rank", spectrum.rank, ""), ("width d", spectrum.width, "2 4")]
    if spectrum.tokens is not None:
        markers.insert(1, ("tokens b", spectrum.tokens, "8 4"))
    for row, (name, at, dashes) in enumerate(markers):
        parts += _marker(f"{name} = {at}", across(at), 14 + 17 * row, dashes, beyond=at > last)
    return "".join([*parts, "</svg>"])


def _told(spectrum: Spectrum) -> str:
    tokens = "unknown number of tokens" if spectrum.tokens is None else f"{spectrum.tokens} tokens"
    return str(
        escape(
            visible(
                f"Singular values of the gradient of block {spectrum.layer} ({spectrum.roles}), log scale: "
                f"rank {spectrum.rank}, {tokens}, width {spectrum.width}."
            )
        )
    )


def _axes(decades: int, last: int) -> list[str]:
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor" stroke-width="1"/>',
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">index of the singular value</text>',
    ]
    step = max(1, math.ceil(decades / 5))
    for power in range(0, decades + 1, step):
        y = _TOP + power / decades * (_BOTTOM - _TOP)
        name = "1" if power == 0 else f'10<tspan dy="-4" font-size="9.5">−{power}</tspan>'
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="currentColor" stroke-width="0.5" opacity="0.22"/>'
            f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{name}</text>'
        )
    for index in sorted({1, round((1 + last) / 2), last}):
        x = _LEFT + (index - 1) / (last - 1) * (_RIGHT - _LEFT)
        anchor = "end" if index == last else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 17}" text-anchor="{anchor}">{index}</text>')
    return parts


def _marker(label: str, x: float, y: int, dashes: str, beyond: bool) -> list[str]:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    right = x > (_LEFT + _RIGHT) / 2
    anchor, at = ("end", x - 5) if right else ("start", x + 5)
    return [
        f'<path d="M{x:.1f} {y - 10}V{_BOTTOM}" fill="none" stroke="currentColor" stroke-width="1.4"{dash}/>',
        f'<text x="{at:.1f}" y="{y}" text-anchor="{anchor}">{label}{" →" if beyond else ""}</text>',
    ]


def _thin(count: int, rank: int) -> Sequence[int]:
    """Return which values to draw: all of a few; of many, an even choice and everything near the rank."""
    if count <= _POINTS:
        return range(count)
    even = {round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)}
    return sorted(even | set(range(max(0, rank - 10), min(count, rank + 10))))
