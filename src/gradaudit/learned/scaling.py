"""How features are scaled before a network or a kernel reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of each bin over simulated updates, [bins] each."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Return inputs [n, bins] of mean 0 and deviation 1; a bin that never moves stays 0."""
        return (values - self.mean) / self.deviation


def scaling_of(values: Tensor) -> Scaling:
    """Return the scaling that some hashed updates [n, bins] need.

    Signs are 1 and gradients 1e-4: without it every defense would need a learning rate of its own scale.
    """
    spread = values.std(0) if len(values) > 1 else torch.zeros_like(values[0])
    # where a bin hardly moves, rounding would be blown up to the size of the rest
    least = 1e-3 * spread.median().clamp_min(torch.finfo(values.dtype).tiny)
    return Scaling(values.mean(0), torch.where(spread > least, spread, torch.inf))
