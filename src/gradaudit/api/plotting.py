"""The drawing of an outcome: a sign a sentence, told apart by shape as well as by color, on light and dark pages."""

from collections.abc import Sequence
from typing import Any

from gradaudit.errors import BadInputError

_SIGNS = {
    "proven": ("s", "#D55E00"),
    "likely": ("^", "#E69F00"),
    "guess": ("o", "#0072B2"),
    "no certificate": ("x", "#009E73"),
}
"""Shape and color, of Okabe and Ito's palette, by certificate."""
_INK = "#808080"
"""Legible on white and on black alike."""


def plot_rows(rows: Sequence[dict[str, Any]], title: str, axes: Any = None) -> Any:
    """Draw the sentences of an outcome, the best read first, and return matplotlib's axes.

    With the truth at hand the height is ROUGE-L; without it, sentences are counted by certificate.

    Args:
        rows: as of `Outcome.rows`.
        title: above the drawing.
        axes: where to draw; a new figure when None.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise BadInputError("plot needs matplotlib, of the extra figures: pip install 'gradaudit[figures]'") from error
    if axes is None:
        figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
        figure.patch.set_alpha(0)
    told = [row["certificate"] or "no certificate" for row in rows]
    if rows and "rougeL" in rows[0]:
        best = sorted(range(len(rows)), key=lambda n: -(rows[n]["rougeL"] or 0.0))
        for name, (shape, color) in _SIGNS.items():
            own = [(place, rows[n]["rougeL"] or 0.0) for place, n in enumerate(best, 1) if told[n] == name]
            if own:
                axes.scatter(*zip(*own, strict=True), marker=shape, color=color, s=48, label=name, zorder=3)
        axes.set(ylim=(-4, 104), xlabel="sentences, the best read first", ylabel="ROUGE-L")
        axes.set_xticks(range(1, len(rows) + 1) if len(rows) <= 20 else axes.get_xticks())
        if rows:
            axes.legend(frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        names = list(_SIGNS)
        axes.barh(names, [told.count(name) for name in names], color=[color for _, color in _SIGNS.values()])
        axes.invert_yaxis()
        axes.set_xlabel("sentences that were read")
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)
    for side, spine in axes.spines.items():
        spine.set_color(_INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.grid(axis="y", color=_INK, alpha=0.25, zorder=0)
    return axes
