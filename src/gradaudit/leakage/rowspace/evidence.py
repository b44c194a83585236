"""How a row is told from rows that were never in a batch, where a batch has more tokens than a row space directions.

Two measures, each low for rows of the batch. What enters q, k and v has d entries, so past the width its row space is
full; but not every row is equally easy to make from it, and its leverage says how hard it is. What enters the
feed-forward's second matrix has several times d entries (3072 for a width of 768), of which its gradient holds d
directions at most: with more tokens than that no row of the batch lies inside, but each lies nearer than others do,
and its share outside says how near.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_FLOOR = 1e-6
"""Directions weaker than this share of the strongest are rounding."""
_NOTHING = 1e-10
"""Shares of a row below this are rounding."""
_COMMON = 192
"""Directions outside of the span in which any row is expected to lie, and which so tell less than the others."""
_LEAST_SPREAD = 0.02
"""Where usual rows differ by less, the measure says nothing."""
_LOUD = 0.1
"""Directions that have ten times the energy of the others are left out altogether."""


Rating = Callable[[Tensor], Tensor]
"""Takes rows [..., in] and returns a number of each, [...]."""


def own_of(rows: Tensor, dimensions: int) -> Rating:
    """Return what tells of unit rows the energy that is their own: without the directions that rows of any text have.

    Some rows (of a text's first token, where later ones attend to it) are nearly one direction, whatever the word: that
    this direction is the batch's too says nothing of them. Each common direction is taken off down to what the other
    directions have.

    Args:
        rows: [n, in] of any text.
        dimensions: of the space that they lie in.
    """
    count = min(_COMMON, len(rows) // 2, dimensions // 2)
    if len(rows) > rows.shape[1]:  # the smaller of both Gram matrices: they have the same energies
        energy, directions = torch.linalg.eigh(rows.T @ rows)
        energy, basis = energy.flip(0), directions.flip(1)[:, :count]
    else:
        energy, mix = torch.linalg.eigh(rows @ rows.T)
        energy, mix = energy.flip(0), mix.flip(1)
        basis = torch.linalg.qr(rows.T @ mix[:, :count])[0]
    rest = float(energy[count:].sum()) / max(dimensions - count, 1)
    left = (rest / energy[:count].clamp_min(1e-30)).clamp_max(1.0)
    # of a row that is nearly one loud direction even a tenth of it would be more than all that is its own
    gains = 1 - torch.where(left < _LOUD, 0.0, left)

    def own(unit: Tensor) -> Tensor:
        shared: Tensor = (unit @ basis.to(unit.dtype)).square() @ gains.to(unit.dtype)
        return (1 - shared).clamp_min(_NOTHING)

    return own


def _per_own(away: Rating, usual: Tensor) -> Rating:
    """Return how far rows are from being the batch's per what is their own, as a logarithm; lower is nearer."""
    own = own_of(usual, usual.shape[1])

    def measure(rows: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(rows, dim=-1)
        return (away(unit) / own(unit)).log()

    return measure


def leverage_of(stacked: Tensor, usual: Tensor) -> Rating:
    """Return how hard a row is to make from what a block's gradients hold, as a logarithm.

    Args:
        stacked: [out, d] float64.
        usual: [n, d] rows as the model has them for any text.
    """
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    weights = vh.T * ((values / values[0]).square() + _FLOOR**2).rsqrt()

    def leverage(unit: Tensor) -> Tensor:
        found: Tensor = (unit @ weights.to(unit.dtype)).square().sum(-1)
        return found

    return _per_own(leverage, torch.nn.functional.normalize(usual.to(stacked), dim=-1))


def outside_of(matrix: Tensor, rounding: float, usual: Tensor) -> Rating:
    """Return how much of what is a row's own lies outside of a gradient's row space, as a logarithm.

    Args:
        matrix: [out, in] float64, in > out.
        rounding: directions weaker than this are not the batch's.
        usual: [n, in] rows as the model has them for any text.
    """
    # by the smaller Gram matrix: its directions are good to the square root of float64's precision, far below rounding
    values, left = torch.linalg.eigh(matrix @ matrix.T)
    strong = values.clamp_min(0).sqrt() > max(rounding, _FLOOR * float(values[-1].clamp_min(0).sqrt()))
    span = torch.linalg.qr(matrix.T @ left[:, strong])[0]
    usual = torch.nn.functional.normalize(usual.to(span), dim=-1)
    whole, rank = span.shape
    own_outside = own_of(usual - (usual @ span) @ span.T, whole - rank)

    def outside(unit: Tensor) -> Tensor:
        inside: Tensor = (unit @ span.to(unit.dtype)).square().sum(-1)
        return (own_outside(unit) - inside).clamp_min(_NOTHING)

    return _per_own(outside, usual)


def deviation(measure: Rating, usual: Tensor) -> Rating:
    """Return a measure in deviations from what it is for usual rows [n, in], both by the median; negative is nearer."""
    values = measure(usual)
    middle = float(values.median())
    spread = max(float(1.4826 * (values - values.median()).abs().median()), _LEAST_SPREAD)
    return lambda rows: (measure(rows) - middle) / spread
