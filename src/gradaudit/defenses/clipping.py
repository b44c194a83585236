"""Clipping of the finished update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defense_traits import Trait
from gradaudit.defenses.base import UpdateDefense, above_zero, by_update, mean_of
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class Clip(UpdateDefense):
    """Scale the update down to a largest L2 norm: the whole of it, or each tensor by itself.

    Alone it hides nothing: an attacker who matches directions, or reads row spaces, does not see the scale. It is what
    noise behind it needs for an epsilon of the whole update (`gradaudit claims`).

    Raises:
        BadInputError: a bound that is not positive and finite.
    """

    name: ClassVar[str] = "clip"
    traits: ClassVar[frozenset[Trait]] = frozenset({"scaled"})
    deterministic: ClassVar[bool] = True
    norm: float = hyper(1.0, "largest L2 norm", unit="gradient units", source="flwr 1.42, LocalDpMod's clipping_norm")
    per_tensor: bool = hyper(False, "each tensor is clipped by itself")

    def bound(self, before: float | None, tensors: int) -> float:
        return self.norm * (math.sqrt(tensors) if self.per_tensor else 1.0)

    def __post_init__(self) -> None:
        above_zero(self.name, "norm", self.norm)

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        norms = {name: float(value.double().norm()) for name, value in tensors.items()}
        whole = math.hypot(*norms.values())
        return {
            name: value * self._factor(norms[name] if self.per_tensor else whole) for name, value in tensors.items()
        }

    def on_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {name: value * by_update(factor, value) for name, (value, factor) in self._factors(several).items()}

    def mean_of_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {name: mean_of(value, factor) for name, (value, factor) in self._factors(several).items()}

    def _factors(self, several: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each tensor of several updates with the factors [n] that clip it."""
        norms = {name: torch.linalg.vector_norm(value.flatten(1), dim=1) for name, value in several.items()}
        whole = torch.stack(list(norms.values())).square().sum(0).sqrt()
        out = {}
        for name, value in several.items():
            norm = norms[name] if self.per_tensor else whole
            out[name] = value, (self.norm / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
        return out

    def _factor(self, norm: float) -> float:
        return min(1.0, self.norm / norm) if norm > 0 else 1.0
