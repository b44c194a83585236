"""How a row is told from rows that were never in a batch, where a batch has more tokens than a row space directions.

Two measures, each low for rows of the batch. What enters q, k and v has d entries, so past the width its row space is
full; but not every row is equally easy to make from it, and its leverage says how hard it is. What enters the
feed-forward's second matrix has several times d entries (3072 for a width of 768), of which its gradient holds d
directions at most: with more tokens than that no row of the batch lies inside, but each lies nearer than others do,
and its share outside says how near.
"""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Common:
    """What of a row is its own: its energy without the directions that rows of any text have.

    Some rows (of a text's first token, where later ones attend to it) are nearly one direction, whatever the word: that
    this direction is the batch's too says nothing of them.

    Args:
        basis: [in, r] orthonormal columns, the commonest directions.
        gains: [r] what each takes off.
    """

    basis: Tensor
    gains: Tensor

    def own(self, unit: Tensor) -> Tensor:
        """Return the energy of unit rows [..., in] that is their own, [...]."""
        shared = (unit @ self.basis.to(unit.dtype)).square() @ self.gains.to(unit.dtype)
        return (1 - shared).clamp_min(_NOTHING)


def common_of(rows: Tensor, dimensions: int) -> Common:
    """Return the directions that rows share, each taken off down to what the other directions have.

    Args:
        rows: [n, in].
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
    return Common(basis, 1 - torch.where(left < _LOUD, 0.0, left))


@dataclass(frozen=True)
class WordMeasure:
    """How far a row is from being one of the batch's, as a logarithm, per what is its own; lower is nearer.

    Args:
        key: (block, role) of the matrix whose inputs are measured; role "q" for what enters q, k and v.
        common: of what enters it.
        away: of unit rows [..., in], how far each is, [...].
    """

    key: tuple[int, str]
    common: Common
    away: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the measure of rows [..., in], [...]."""
        unit = torch.nn.functional.normalize(rows, dim=-1)
        return (self.away(unit) / self.common.own(unit)).log()


def leverage_of(stacked: Tensor, layer: int, usual: Tensor) -> WordMeasure:
    """Return the leverage in a block's gradients: how hard a row is to make from what they hold.

    Args:
        stacked: [out, d] float64.
        layer: block.
        usual: [n, d] rows as the model has them for any text.
    """
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    strength = (values / values[0]).square() + _FLOOR**2
    unit = torch.nn.functional.normalize(usual.to(stacked), dim=-1)
    weights = vh.T * strength.rsqrt()

    def leverage(unit: Tensor) -> Tensor:
        found: Tensor = (unit @ weights.to(unit.dtype)).square().sum(-1)
        return found

    return WordMeasure((layer, "q"), common_of(unit, unit.shape[1]), leverage)


def outside_of(matrix: Tensor, key: tuple[int, str], rounding: float, usual: Tensor) -> WordMeasure:
    """Return how much of what is a row's own lies outside of a gradient's row space.

    Args:
        matrix: [out, in] float64, in > out.
        key: block and role.
        rounding: directions weaker than this are not the batch's.
        usual: [n, in] rows as the model has them for any text.
    """
    # by the smaller Gram matrix: its directions are good to the square root of float64's precision, far below rounding
    values, left = torch.linalg.eigh(matrix @ matrix.T)
    strong = values.clamp_min(0).sqrt() > max(rounding, _FLOOR * float(values[-1].clamp_min(0).sqrt()))
    span = torch.linalg.qr(matrix.T @ left[:, strong])[0]
    unit = torch.nn.functional.normalize(usual.to(span), dim=-1)
    whole, rank = span.shape
    outside = common_of(unit - (unit @ span) @ span.T, whole - rank)

    def away(unit: Tensor) -> Tensor:
        inside: Tensor = (unit @ span.to(unit.dtype)).square().sum(-1)
        return (outside.own(unit) - inside).clamp_min(_NOTHING)

    return WordMeasure(key, common_of(unit, whole), away)


@dataclass(frozen=True)
class Deviation:
    """A measure, in deviations from what it is for any row.

    Args:
        measure: the measure.
        middle: its median over rows of texts that are not in the batch.
        spread: its deviation there, by the median too.
    """

    measure: WordMeasure
    middle: float
    spread: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the deviations of rows [..., in], [...]; negative is nearer."""
        return (self.measure(rows) - self.middle) / self.spread


def deviation(measure: WordMeasure, usual: Tensor) -> Deviation:
    """Return a measure in deviations from what it is for usual rows [n, in]."""
    values = measure(usual)
    middle = values.median()
    spread = 1.4826 * (values - middle).abs().median()
    return Deviation(measure, float(middle), max(float(spread), _LEAST_SPREAD))
