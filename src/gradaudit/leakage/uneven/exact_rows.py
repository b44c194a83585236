"""The certificate of decoded rows: with the inputs known exactly, every entry that was sent is explained, or not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.uneven.low_rank import Fitting, solved

_STAGES = (0.1, 0.01, 1e-3, 1e-4, 0.0)
"""What is added to each entry's error while the signals settle, in medians of the gradient's size."""
_FLIPS, _FIRST = 24, 0.1
"""Rounds of exchanged mask bits at most, and the share of the largest gain that a bit of the same round has."""
_GAIN = 12.0
"""A mask bit is exchanged when chi^2 falls by this much: by chance it falls so in one of 2,000."""


@dataclass(frozen=True)
class Explanation:
    """What inputs known exactly leave of the entries.

    Args:
        left: [n, r] signals D^T, in the gradient's unit.
        chi2: squared residuals of all entries per degree of freedom: 1 when the inputs are those of the batch.
        noise: [n, r] a draw of the error of `left`.
    """

    left: Tensor
    chi2: float
    noise: Tensor


def explain(fitting: Fitting, rows: Tensor, rng: torch.Generator) -> Explanation:
    """Return the signals that explain the entries best by these inputs, and what they leave.

    Args:
        fitting: of the entries.
        rows: [r, d] inputs, linearly independent.
        rng: draws the noise of the signals.
    """
    seen = fitting.seen
    left = fitting.target @ torch.linalg.pinv(rows)
    for floor in _STAGES:
        weights = fitting.weights(left @ rows, floor)
        left = solved(rows, weights, weights * fitting.target)
    gradient = left @ rows * fitting.scale
    off = (seen.sent - seen.step.sent(gradient)) / seen.error(gradient)
    free = off.numel() - left.numel()
    noise = torch.randn(weights.shape, generator=rng).to(weights)
    drawn = solved(rows, weights, weights.sqrt() * noise)
    return Explanation(left * fitting.scale, float(off.square().sum()) / free, drawn * fitting.scale)


def mended(fitting: Fitting, clean: Tensor, kept: Tensor) -> Tensor:
    """Return the masks, [r, d] bool, with the bits exchanged that explain the entries better.

    A coordinate too small to move its row out of the span by more than the span's own error is decoded by chance. All
    entries of its column together tell it.

    Args:
        fitting: of the entries.
        clean: [r, d] rows before dropout, at the scale of the masked ones.
        kept: [r, d] bool.
    """
    kept = kept.clone()
    for floor in _STAGES[:-1]:  # even weights first: the signals lean to wrong bits in the few entries known best
        for _ in range(_FLIPS):
            rows = torch.where(kept, clean, torch.zeros_like(clean))
            left = fitting.target @ torch.linalg.pinv(rows)
            for _ in range(2):
                weights = fitting.weights(left @ rows, floor)
                left = solved(rows, weights, weights * fitting.target)
            residual = weights * (fitting.target - left @ rows)
            move = torch.where(kept, -clean, clean)
            gain = 2 * move * (left.T @ residual) - move.square() * (left.square().T @ weights)
            best, at = gain.max(0)  # one row a column: two moves in a column share the column's residual
            columns = torch.where(best > torch.clamp(_FIRST * best.max(), min=_GAIN))[0]
            if len(columns) == 0:
                break
            kept[at[columns], columns] ^= True
    return kept
