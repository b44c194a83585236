"""Additive noise on the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defenses.base import UpdateDefense, above_zero
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class Gaussian(UpdateDefense):
    """Add N(0, sigma^2) to every coordinate of the update, without clipping.

    This is *not* differential privacy: without a bound on one sentence's contribution, no epsilon follows.

    Raises:
        BadInputError: a sigma that is not positive and finite.
    """

    name: ClassVar[str] = "gaussian"
    sigma: float = hyper(1e-4, "standard deviation of the noise", unit="gradient units", source="DAGER, section 5")
    relative: bool = hyper(False, "sigma in multiples of each tensor's own root mean square")

    def __post_init__(self) -> None:
        above_zero(self.name, "sigma", self.sigma)

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {
            name: value
            + self._scale(value) * torch.randn(value.shape, generator=rng, dtype=value.dtype).to(value.device)
            for name, value in tensors.items()
        }

    def _scale(self, value: Tensor) -> float:
        return self.sigma * (float(value.square().mean().sqrt()) if self.relative else 1.0)


@register
@dataclass(frozen=True)
class NormalizedGaussian(UpdateDefense):
    """Scale each tensor to unit norm, then add N(0, sigma^2): the noise that Grab's release evaluates.

    The paper calls it DP-SGD. It is *not*: one sentence's part is not bounded by itself. What follows is an epsilon for
    the whole update replaced, each tensor of norm 1 (`gradaudit claims`, clipped = "tensor").

    Raises:
        BadInputError: a sigma that is not positive and finite.
    """

    name: ClassVar[str] = "normalized-gaussian"
    sigma: float = hyper(0.01, "standard deviation of the noise on unit-norm tensors", source="Grab, section 5.4")

    def __post_init__(self) -> None:
        above_zero(self.name, "sigma", self.sigma)

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        out = {}
        for name, value in tensors.items():
            unit = value / value.norm().clamp_min(torch.finfo(value.dtype).tiny)
            noise = torch.randn(value.shape, generator=rng, dtype=value.dtype).to(value.device)
            out[name] = unit + self.sigma * noise
        return out


@register
@dataclass(frozen=True)
class Laplace(UpdateDefense):
    """Add Laplace noise of one scale to every coordinate of the update, without limiting any.

    This is *not* differential privacy: without a bound on the update's coordinates, no epsilon follows.

    Raises:
        BadInputError: a scale that is not positive and finite.
    """

    name: ClassVar[str] = "laplace"
    scale: float = hyper(1e-4, "scale b of the noise; its standard deviation is 1.41 b", unit="gradient units")

    def __post_init__(self) -> None:
        above_zero(self.name, "scale", self.scale)

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {name: value + self._noise(value, rng) for name, value in tensors.items()}

    def _noise(self, value: Tensor, rng: torch.Generator) -> Tensor:
        # two exponential draws differ by a Laplace one; torch.distributions takes no generator
        one, other = (torch.empty(value.shape, dtype=torch.float64).exponential_(generator=rng) for _ in range(2))
        return (self.scale * (one - other)).to(value)
