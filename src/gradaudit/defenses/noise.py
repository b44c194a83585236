"""Additive noise on the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradaudit.defenses.base import UpdateDefense, above_zero
from gradaudit.registry import hyper, register
from gradaudit.streams import draw_seed


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

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor] | None:
        if self.relative:
            return None
        # independent noises: the mean of n has a standard deviation of sigma / sqrt(n)
        return replace(self, sigma=self.sigma / math.sqrt(clients)).on_update(mean, rng)

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
        return self._noise().on_update({name: _unit(value) for name, value in tensors.items()}, rng)

    def mean_of_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        count = len(next(iter(several.values())))
        units = {name: torch.stack([_unit(one) for one in value]).mean(0) for name, value in several.items()}
        found = self._noise().on_mean(units, count, rng)
        assert found is not None
        return found

    def _noise(self) -> Gaussian:
        return Gaussian(self.sigma)


def _unit(value: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(value)
    return value / norm.clamp_min(torch.finfo(value.dtype).tiny)


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

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor] | None:
        # a sum of n exponential draws is one gamma draw of shape n; torch draws those without a generator of one's own
        draw = np.random.default_rng(draw_seed(rng))

        def noise(value: Tensor) -> Tensor:
            one, other = (draw.standard_gamma(clients, tuple(value.shape), dtype=np.float32) for _ in range(2))
            return torch.as_tensor(one - other).to(value) * (self.scale / clients)

        return {name: value + noise(value) for name, value in mean.items()}

    def _noise(self, value: Tensor, rng: torch.Generator) -> Tensor:
        # two exponential draws differ by a Laplace one; torch.distributions takes no generator
        one, other = (torch.empty(value.shape, dtype=torch.float64).exponential_(generator=rng) for _ in range(2))
        return (self.scale * (one - other)).to(value)
