"""How far readings of images are off: the covariance that readings of public images show, as a few directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = 256
"""In which readings are most off; with 128 as good on CIFAR-10."""
_ROWS = 4096
"""Public readings that the covariance is taken from at most."""
_FLOOR = 0.1
"""Variance of every other direction, in multiples of the mean one."""


@dataclass(frozen=True)
class Spread:
    """A normal law of what is to be added to a reading.

    Args:
        directions: [pixels, r] orthonormal.
        variances: [r] along them, beside the floor.
        floor: [1] variance in every direction.
    """

    directions: Tensor
    variances: Tensor
    floor: Tensor

    def to(self, device: torch.device) -> Spread:
        """Return the same on a device."""
        return Spread(self.directions.to(device), self.variances.to(device), self.floor.to(device))

    def __call__(self, off: Tensor) -> Tensor:
        """Return minus the log density of [n, pixels], but for a constant: [n]."""
        along = (off @ self.directions).square()
        # Woodbury: the inverse of floor * I + directions diag(variances) directions^T
        less = along @ (self.variances / (self.floor + self.variances))
        return (off.square().sum(1) - less) / (2 * self.floor)


def spread_of(residuals: Tensor, directions: int = DIRECTIONS) -> Spread:
    """Return the law of residuals [n, pixels] of public images that the reading was not fitted to.

    Args:
        residuals: right minus read.
        directions: how many are kept at most.
    """
    some = residuals[:_ROWS].double()
    if len(some) < some.shape[1]:
        values, inner = torch.linalg.eigh(some @ some.T / len(some))
        kept = min(directions, int((values > values[-1] * 1e-9).sum()))
        values, inner = values[-kept:], inner[:, -kept:]
        found = some.T @ inner / (values * len(some)).sqrt()
    else:
        values, found = torch.linalg.eigh(some.T @ some / len(some))
        values, found = values[-directions:], found[:, -directions:]
    mean = some.square().mean()
    return Spread(found.float(), values.clamp_min(0).float(), (_FLOOR * mean).clamp_min(1e-12).float()[None])
