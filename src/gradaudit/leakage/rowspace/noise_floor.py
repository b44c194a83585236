"""Row spaces under noise: how many directions stand above it, and how far each can be trusted.

The weight change of local steps is rounded to the weights' precision, a gradient may have been sent in few bits or with
noise. Its small singular values are then noise's, and follow the law of Marchenko and Pastur (1967): their median tells
the noise, and with it the largest value that noise alone could have. What stands above is the batch's; a direction at a
multiple of the noise is known up to an angle that theory gives (Benaych-Georges and Nadakuditi, 2012).
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_SURE = 3.3
"""The largest value of noise passes its edge by so many scales of Tracy and Widom's law once in a thousand times."""
CLEAR = 3.0
"""A gap this wide is a cut: between directions of the batch none was wider in trials but near the first."""
_WIDE = 10.0
"""A gap this wide is a cut whatever is behind it."""
_UNEVEN = 4.0
"""Noise that differs from entry to entry reaches so many times as far as even noise of its median."""
_BALANCE = 3
"""Turns of scaling rows and columns."""
_LEAST = 8
"""Fewer values than these tell no noise."""
_LIKE_NOISE = (0.4, 2.5)
"""The smallest value, in multiples of noise's smallest, where what is below the edge is noise."""


def few_digits(value: Tensor) -> bool:
    """Say whether a tensor was sent in half precision, whatever it is stored in."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return True
    # 13 of float32's 23 digits are zero in every float16, 16 in every bfloat16
    return bool((value.detach().float().contiguous().view(torch.int32) & 0x1FFF).eq(0).all())


def few_values(value: Tensor) -> bool:
    """Say whether a tensor has no more values than 8 bits tell apart, and each twice in the mean."""
    some = value.flatten()[:4096]  # most are told from the first few
    return all(int(torch.unique(part).numel()) <= min(256, part.numel() // 2) for part in (some, value))


def noise_rank(values: Tensor, rows: int, sure: bool = False) -> tuple[int, float]:
    """Return how many singular values stand above the noise of all others, and that noise's standard deviation.

    Args:
        values: [d] singular values of a [rows, d] matrix, rows at least d, largest first.
        rows: its rows.
        sure: there is noise, whatever its small values look like.

    Returns:
        rank and the standard deviation of an entry's noise; (d, 0.0) where the small values are not like noise's (a
        gradient without noise of as many tokens as the width).
    """
    columns, rank = len(values), 0
    while columns - rank >= _LEAST:
        left = columns - rank
        sigma = noise_of(values, rank, rows)
        edge = sigma * _largest(rows - rank, left)
        above = int((values > edge).sum())
        if above > rank:
            rank = above
            continue
        least = sigma * (math.sqrt(rows - rank) - math.sqrt(left))
        like = sure or least <= 0.05 * edge or _LIKE_NOISE[0] <= float(values[-1]) / least <= _LIKE_NOISE[1]
        return (rank, sigma) if like and sigma > 0 else (columns, 0.0)
    return columns, 0.0


def clear_cut(values: Tensor, rows: int) -> tuple[int, float]:
    """Return the rank at the widest gap of a spectrum behind which all is noise, and the gap's ratio; 1.0: none.

    Args:
        values: [d] singular values of a [rows, d] matrix, largest first.
        rows: its rows.
    """
    best, widest = len(values), 1.0
    for rank in range(1, len(values) - _LEAST):
        ratio = float(values[rank - 1] / values[rank].clamp_min(1e-300))
        if ratio > widest:
            left = len(values) - rank
            edge = noise_of(values, rank, rows) * (math.sqrt(rows - rank) + math.sqrt(left))
            if ratio >= _WIDE or float(values[rank]) <= _UNEVEN * edge:
                best, widest = rank, ratio
    return best, widest


def balanced(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix whose rows and columns have about unit norm, and what its columns were multiplied by."""
    scale = torch.ones_like(matrix[0])
    for _ in range(_BALANCE):
        for along in (1, 0):
            norm = matrix.norm(dim=along, keepdim=True)
            factor = torch.where(norm > 1e-12 * norm.max(), 1 / norm.clamp_min(1e-300), 0.0)
            matrix = matrix * factor
            scale = scale * factor[0] if along == 0 else scale
    return matrix, scale


def lost_share(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return, by direction, the energy of a true row that lies outside the direction found, per energy inside.

    Args:
        values: [r] singular values in multiples of the noise's standard deviation, all above its edge.
        rows: of the matrix.
        columns: d.
    """
    ratio = columns / rows
    # the signal's own squared value, and the squared cosine between the direction found and the true one
    plain = values.square() - rows - columns
    own = (plain + (plain.square() - 4 * rows * columns).clamp_min(0).sqrt()) / (2 * rows)
    cosine = (1 - ratio * (1 + own) / (own * (own + ratio))).clamp(1e-6, 1)
    return (1 - cosine) / cosine


def whitened(parts: Sequence[Tensor], sure: bool = False) -> Tensor:
    """Return gradients that share an input, stacked, each in multiples of its own noise.

    One whose noise does not show (more directions than it is wide, or none) is scaled as those that do in the mean.

    Args:
        parts: [out, d] each, float64.
        sure: there is noise.
    """
    found = []
    for part in parts:
        wide = part if part.shape[0] >= part.shape[1] else part.T
        found.append(noise_rank(torch.linalg.svdvals(wide), wide.shape[0], sure)[1])
    known = [sigma for sigma in found if sigma > 0]
    typical = math.exp(sum(map(math.log, known)) / len(known)) if known else 1.0
    return torch.cat([part / (sigma or typical) for part, sigma in zip(parts, found, strict=True)])


def _largest(rows: int, columns: int) -> float:
    """Return the largest singular value that a [rows, columns] matrix of unit noise has but once in a thousand times.

    Source: Johnstone (2001), the largest eigenvalue's law.
    """
    sides = math.sqrt(max(rows - 1, 1)), math.sqrt(columns)
    return math.sqrt(sum(sides) ** 2 + _SURE * sum(sides) * (1 / sides[0] + 1 / sides[1]) ** (1 / 3))


def noise_of(values: Tensor, rank: int, rows: int) -> float:
    """Return the noise's standard deviation by the median of the values behind a rank."""
    return float(values[rank:].median()) / _median(rows - rank, len(values) - rank)


@lru_cache(maxsize=4096)
def _median(rows: int, columns: int) -> float:
    """Return the median singular value of a [rows, columns] matrix of unit noise, by its limit law."""
    rows, columns = max(rows, columns), min(rows, columns)
    ratio = columns / rows
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    # even steps of the angle, where the density has no pole at its ends
    angle = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    square = (low + high) / 2 - (high - low) / 2 * angle.cos()
    density = ((high - square) * (square - low)).clamp_min(0).sqrt() / square.clamp_min(1e-12) * angle.sin()
    share = torch.cumulative_trapezoid(density, angle)
    middle = square[1:][int((share < share[-1] / 2).sum())]
    return math.sqrt(float(middle) * rows)
