"""Compression of the update: signs, the largest coordinates, or fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defenses.base import UpdateDefense
from gradaudit.errors import BadInputError
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class Sign(UpdateDefense):
    """Send the sign of every coordinate, -1, 0 or 1 (signSGD)."""

    name: ClassVar[str] = "sign"

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {name: value.sign() for name, value in tensors.items()}

    def on_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return self.on_update(several, rng)


@register
@dataclass(frozen=True)
class TopK(UpdateDefense):
    """Keep each tensor's largest coordinates by magnitude and send zeros for the rest, without error feedback.

    Raises:
        BadInputError: a share that is not between 0 and 1.
    """

    name: ClassVar[str] = "topk"
    keep: float = hyper(0.1, "share of the coordinates that is sent", source="LTI, section 4")

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise BadInputError(f"defense 'topk': keep must be above 0 and at most 1, got {self.keep}")

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {name: self._largest(value) for name, value in tensors.items()}

    def _largest(self, value: Tensor) -> Tensor:
        count, sizes = max(1, round(self.keep * value.numel())), value.abs().flatten()
        if count == len(sizes):
            return value.clone()
        # the smallest that is sent: several times faster to find than all that are
        least = sizes.kthvalue(len(sizes) - count + 1).values
        sent = sizes > least
        sent[(sizes == least).nonzero().flatten()[: count - int(sent.sum())]] = True
        return value * sent.view_as(value)


@register
@dataclass(frozen=True)
class RandomPruning(UpdateDefense):
    """Send zeros for a random share of each tensor's coordinates: the pruning that Grab's release evaluates.

    Raises:
        BadInputError: a share that is not between 0 and 1.
    """

    name: ClassVar[str] = "random-pruning"
    rate: float = hyper(0.9, "share of the coordinates that is not sent", source="Grab, section 5.5")

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise BadInputError(f"defense 'random-pruning': rate must be at least 0 and below 1, got {self.rate}")

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return {
            name: value * (torch.rand(value.shape, generator=rng) >= self.rate).to(value)
            for name, value in tensors.items()
        }


@register
@dataclass(frozen=True)
class Quantize(UpdateDefense):
    """Send each tensor in fewer bits: rounded to bfloat16, or to integers of its own largest magnitude.

    Raises:
        BadInputError: a number of bits other than 16, 8 or 4.
    """

    name: ClassVar[str] = "quantize"
    bits: int = hyper(8, "16 (bfloat16), 8 or 4 (integers, one scale a tensor)", unit="bits")

    def __post_init__(self) -> None:
        if self.bits not in (16, 8, 4):
            raise BadInputError(f"defense 'quantize': bits must be 16, 8 or 4, got {self.bits}")

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        if self.bits == 16:
            return {name: value.bfloat16().to(value.dtype) for name, value in tensors.items()}
        return {name: self._rounded(value) for name, value in tensors.items()}

    def _rounded(self, value: Tensor) -> Tensor:
        step = value.abs().max() / (2 ** (self.bits - 1) - 1)
        return value if float(step) == 0 else (value / step).round() * step
