"""Compression of the update: signs, the largest coordinates, or fewer bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradaudit.defense_traits import Law, Trait
from gradaudit.defenses.base import UpdateDefense, by_update
from gradaudit.errors import BadInputError
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class Sign(UpdateDefense):
    """Send the sign of every coordinate, -1, 0 or 1 (signSGD)."""

    name: ClassVar[str] = "sign"
    traits: ClassVar[frozenset[Trait]] = frozenset({"signs"})
    law: ClassVar[Law | None] = "signs"
    deterministic: ClassVar[bool] = True

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return values.sign()


@register
@dataclass(frozen=True)
class TopK(UpdateDefense):
    """Keep each tensor's largest coordinates by magnitude, or those of the whole update; send zeros for the rest.

    Raises:
        BadInputError: a share that is not between 0 and 1.
    """

    name: ClassVar[str] = "topk"
    traits: ClassVar[frozenset[Trait]] = frozenset({"support"})
    law: ClassVar[Law | None] = "largest"
    deterministic: ClassVar[bool] = True
    never_longer: ClassVar[bool] = True
    keep: float = hyper(0.1, "share of the coordinates that is sent", source="LTI, section 4")
    whole: bool = hyper(False, "the largest of the whole update, not of each tensor", later=True)

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise BadInputError(f"defense 'topk': keep must be above 0 and at most 1, got {self.keep}")

    @property
    def by_tensor(self) -> bool:
        return not self.whole

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        if not self.whole:
            return super().on_update(tensors, rng)
        every = torch.cat([value.detach().flatten().double() for value in tensors.values()])
        parts = torch.split(self._largest(every), [value.numel() for value in tensors.values()])
        return {n: part.view_as(v).to(v.dtype) for (n, v), part in zip(tensors.items(), parts, strict=True)}

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return torch.stack([self._largest(one.flatten()) for one in values]).view_as(values)

    def _largest(self, values: Tensor) -> Tensor:
        """Return numbers [m] with zeros but for the largest magnitudes; of equal ones the first are kept."""
        count = max(1, round(self.keep * len(values)))
        least = _th_largest(values.abs(), count).to(values.dtype)
        kept: Tensor = F.hardshrink(values, float(torch.nextafter(least, torch.zeros_like(least))))
        over = int(kept.count_nonzero()) - count
        if over > 0:
            equal = (values.abs() == least).nonzero().flatten()
            kept[equal[len(equal) - over :]] = 0
        return kept


def _th_largest(sizes: Tensor, place: int) -> Tensor:
    """Return the magnitude at a place, from 1, of the order from large to small."""
    at = len(sizes) - place
    if sizes.device.type == "cpu":  # NumPy's selection is vectorized: five times faster than torch's on the CPU
        sizes = sizes if sizes.dtype == torch.float64 else sizes.float()  # it knows no bfloat16
        return torch.from_numpy(np.partition(sizes.numpy(), at)[at : at + 1])[0]
    return sizes.kthvalue(at + 1).values


@register
@dataclass(frozen=True)
class RandomPruning(UpdateDefense):
    """Send zeros for a random share of each tensor's coordinates: the pruning that Grab's release evaluates.

    Raises:
        BadInputError: a share that is not between 0 and 1.
    """

    name: ClassVar[str] = "random-pruning"
    traits: ClassVar[frozenset[Trait]] = frozenset({"support"})
    law: ClassVar[Law | None] = "support"
    never_longer: ClassVar[bool] = True
    rate: float = hyper(0.9, "share of the coordinates that is not sent", source="Grab, section 5.5")

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise BadInputError(f"defense 'random-pruning': rate must be at least 0 and below 1, got {self.rate}")

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return values * (torch.rand(values.shape, generator=rng) >= self.rate).to(values)


@register
@dataclass(frozen=True)
class Quantize(UpdateDefense):
    """Send each tensor in fewer bits: rounded to bfloat16, or to integers of its own largest magnitude.

    Raises:
        BadInputError: a number of bits other than 16, 8 or 4.
    """

    name: ClassVar[str] = "quantize"
    traits: ClassVar[frozenset[Trait]] = frozenset({"zero mean"})
    deterministic: ClassVar[bool] = True
    bits: int = hyper(8, "16 (bfloat16), 8 or 4 (integers, one scale a tensor)", unit="bits")

    def __post_init__(self) -> None:
        if self.bits not in (16, 8, 4):
            raise BadInputError(f"defense 'quantize': bits must be 16, 8 or 4, got {self.bits}")

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        if self.bits == 16:
            return values.bfloat16().to(values.dtype)
        step = by_update(values.flatten(1).abs().amax(1) / (2 ** (self.bits - 1) - 1), values)
        step = torch.where(step == 0, 1.0, step)  # nothing but zeros
        return (values / step).round_().mul_(step)
