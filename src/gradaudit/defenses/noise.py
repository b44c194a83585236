"""Additive noise on the update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradaudit.defense_traits import Law, Trait
from gradaudit.defenses.base import Noise, UpdateDefense, above_zero, by_update, mean_of
from gradaudit.registry import hyper, register
from gradaudit.streams import draw_seed


class _GaussianNoise(UpdateDefense):
    """Ends in independent Gaussian noise of one size a tensor; a subclass says on what, and of which size."""

    gaussian: ClassVar[bool] = True
    sigma: float

    def __post_init__(self) -> None:
        above_zero(self.name, "sigma", self.sigma)

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        base, deviations = self.before_noise(values)
        noise = torch.randn(base.shape, generator=rng, dtype=base.dtype).to(base.device)
        return base + by_update(deviations, base) * noise


@register
@dataclass(frozen=True)
class Gaussian(_GaussianNoise):
    """Add N(0, sigma^2) to every coordinate of the update, without clipping.

    This is *not* differential privacy: without a bound on one sentence's contribution, no epsilon follows.

    Raises:
        BadInputError: a sigma that is not positive and finite.
    """

    name: ClassVar[str] = "gaussian"
    traits: ClassVar[frozenset[Trait]] = frozenset({"zero mean"})
    law: ClassVar[Law | None] = "gaussian"
    sigma: float = hyper(1e-4, "standard deviation of the noise", unit="gradient units", source="DAGER, section 5")
    relative: bool = hyper(False, "sigma in multiples of each tensor's own root mean square")

    def noise(self, before: float | None, tensors: int, steps: int) -> Noise:
        return Noise(self.sigma, None if self.relative or before is None else 2 * before)

    def before_noise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.relative:
            return values, values.new_full((len(values),), self.sigma)
        return values, self.sigma * values.flatten(1).square().mean(1).sqrt()

    def deviation(self, sent: Tensor, examples: int | None) -> float | None:
        if not self.relative:
            return self.sigma
        # of the clean tensor, which has less power than what was sent, noise included
        return self.sigma * float(sent.double().square().mean().sqrt()) / math.hypot(1, self.sigma)

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor] | None:
        if self.relative:
            return None
        # independent noises: the mean of n has a standard deviation of sigma / sqrt(n)
        return replace(self, sigma=self.sigma / math.sqrt(clients)).on_update(mean, rng)


@register
@dataclass(frozen=True)
class NormalizedGaussian(_GaussianNoise):
    """Scale each tensor to unit norm, then add N(0, sigma^2): the noise that Grab's release evaluates.

    The paper calls it DP-SGD. It is *not*: one sentence's part is not bounded by itself. What follows is an epsilon for
    the whole update replaced, each tensor of norm 1 (`gradaudit claims`, clipped = "tensor").

    Raises:
        BadInputError: a sigma that is not positive and finite.
    """

    name: ClassVar[str] = "normalized-gaussian"
    traits: ClassVar[frozenset[Trait]] = frozenset({"unit norm"})
    sigma: float = hyper(0.01, "standard deviation of the noise on unit-norm tensors", source="Grab, section 5.4")

    def noise(self, before: float | None, tensors: int, steps: int) -> Noise:
        return Noise(self.sigma, 2 * math.sqrt(tensors))

    def deviation(self, sent: Tensor, examples: int | None) -> float | None:
        return self.sigma

    def before_noise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values / by_update(self._norms(values), values), values.new_full((len(values),), self.sigma)

    def mean_of_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        size = self.sigma / math.sqrt(len(next(iter(several.values()))))
        return {
            name: mean_of(value, 1 / self._norms(value)).add_(
                torch.randn(value.shape[1:], generator=rng, dtype=value.dtype).to(value.device), alpha=size
            )
            for name, value in several.items()
        }

    @staticmethod
    def _norms(values: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
        return norms.clamp_min(torch.finfo(values.dtype).tiny)


@register
@dataclass(frozen=True)
class Laplace(UpdateDefense):
    """Add Laplace noise of one scale to every coordinate of the update, without limiting any.

    This is *not* differential privacy: without a bound on the update's coordinates, no epsilon follows.

    Raises:
        BadInputError: a scale that is not positive and finite.
    """

    name: ClassVar[str] = "laplace"
    traits: ClassVar[frozenset[Trait]] = frozenset({"zero mean"})
    scale: float = hyper(1e-4, "scale b of the noise; its standard deviation is 1.41 b", unit="gradient units")

    def noise(self, before: float | None, tensors: int, steps: int) -> Noise:
        return Noise(without="Laplace noise without a bound on each coordinate has no epsilon")

    def deviation(self, sent: Tensor, examples: int | None) -> float | None:
        return math.sqrt(2) * self.scale

    def __post_init__(self) -> None:
        above_zero(self.name, "scale", self.scale)

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor] | None:
        # a sum of n exponential draws is one gamma draw of shape n; torch draws those without a generator of one's own
        draw = np.random.default_rng(draw_seed(rng))

        def noise(value: Tensor) -> Tensor:
            one, other = (draw.standard_gamma(clients, tuple(value.shape), dtype=np.float32) for _ in range(2))
            return torch.as_tensor(one - other).to(value) * (self.scale / clients)

        return {name: value + noise(value) for name, value in mean.items()}

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        # two exponential draws differ by a Laplace one; torch.distributions takes no generator
        one, other = (torch.empty(values.shape, dtype=torch.float64).exponential_(generator=rng) for _ in range(2))
        return values + (self.scale * (one - other)).to(values)
