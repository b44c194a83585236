"""The singular values of a block's gradient as an inline SVG drawing."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from gradaudit.record import Spectrum
from gradaudit.report.visible import environment

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 408, 66, 236
_POINTS = 240


def spectrum_svg(spectrum: Spectrum) -> Markup:
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

    markers = [("rank", spectrum.rank, ""), ("tokens b", spectrum.tokens, "8 4"), ("width d", spectrum.width, "2 4")]
    drawn = (
        environment()
        .get_template("spectrum.html.j2")
        .render(
            spectrum=spectrum,
            box=(_LEFT, _RIGHT, _TOP, _BOTTOM),
            across=across,
            down=down,
            last=last,
            powers=range(0, decades + 1, max(1, math.ceil(decades / 5))),
            indices=sorted({1, round((1 + last) / 2), last}),
            points=[(across(i + 1), down(values[i])) for i in _thin(len(values), spectrum.rank)],
            markers=[marker for marker in markers if marker[1] is not None],
        )
    )
    return Markup(drawn)


def _thin(count: int, rank: int) -> Sequence[int]:
    """Return which values to draw: all of a few; of many, an even choice and everything near the rank."""
    if count <= _POINTS:
        return range(count)
    even = {round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)}
    return sorted(even | set(range(max(0, rank - 10), min(count, rank + 10))))
