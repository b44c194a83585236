"""Compression of the update: signs, the largest coordinates, or fewer bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defenses.base import UpdateDefense, by_update
from gradaudit.errors import BadInputError
from gradaudit.registry import hyper, register

_SAMPLED = 4096
"""Magnitudes that tell about where the largest begin: sorting all of a large tensor takes three times as long."""


@register
@dataclass(frozen=True)
class Sign(UpdateDefense):
    """Send the sign of every coordinate, -1, 0 or 1 (signSGD)."""

    name: ClassVar[str] = "sign"
    deterministic: ClassVar[bool] = True

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return self.each_tensor(tensors, rng)

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
    deterministic: ClassVar[bool] = True
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
            return self.each_tensor(tensors, rng)
        sizes = torch.cat([value.detach().abs().flatten().double() for value in tensors.values()])
        sent = torch.zeros_like(sizes, dtype=torch.bool)
        sent[_largest(sizes, max(1, round(self.keep * len(sizes))))] = True
        parts = torch.split(sent, [value.numel() for value in tensors.values()])
        return {
            name: torch.where(part.view_as(value), value, value.new_zeros(()))
            for (name, value), part in zip(tensors.items(), parts, strict=True)
        }

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        flat = values.flatten(1)
        count = max(1, round(self.keep * flat.shape[1]))
        if flat.shape[1] < 2 * _SAMPLED:  # all rows at once, unless magnitudes are equal
            sizes = flat.abs()
            sent = sizes >= sizes.kthvalue(flat.shape[1] - count + 1, dim=1, keepdim=True).values
            if bool((sent.sum(1) == count).all()):
                return torch.where(sent, flat, flat.new_zeros(())).view_as(values)
        kept = torch.zeros_like(flat)
        for row, out in zip(flat, kept, strict=True):
            sent = _largest(row.abs(), count)
            if sent.dtype == torch.bool:
                torch.where(sent, row, out, out=out)
            else:
                out[sent] = row[sent]
        return kept.view_as(values)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return which of [m] magnitudes are the `count` largest: their indices where they are few, else a mask [m].

    A sample tells between which two magnitudes the smallest of them lies, and only what lies between is sorted.
    """
    every = len(sizes) // _SAMPLED
    if every >= 2:
        sample = sizes[::every]
        place = count // every
        around = 8 + 4 * math.isqrt(place)
        floor = _th_largest(sample, min(len(sample), place + around))
        if place <= around:
            maybe = (sizes >= floor).nonzero().flatten()
            if len(maybe) >= count:  # no unlucky sample
                return maybe[sizes[maybe].topk(count, sorted=False).indices]
        else:
            sent = sizes > _th_largest(sample, place - around)
            maybe = ((sizes >= floor) ^ sent).nonzero().flatten()
            left = count - int(sent.count_nonzero())
            if 0 <= left <= len(maybe):
                sent[maybe[sizes[maybe].topk(left, sorted=False).indices]] = True
                return sent
    # the smallest that is sent is found several times faster than all that are
    least = _th_largest(sizes, count)
    sent = sizes > least
    sent[(sizes == least).nonzero().flatten()[: count - int(sent.sum())]] = True
    return sent


def _th_largest(sizes: Tensor, place: int) -> Tensor:
    """Return the magnitude at a place, from 1, of the order from large to small."""
    return sizes.kthvalue(len(sizes) - place + 1).values


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
        return self.each_tensor(tensors, rng)

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
    deterministic: ClassVar[bool] = True
    bits: int = hyper(8, "16 (bfloat16), 8 or 4 (integers, one scale a tensor)", unit="bits")

    def __post_init__(self) -> None:
        if self.bits not in (16, 8, 4):
            raise BadInputError(f"defense 'quantize': bits must be 16, 8 or 4, got {self.bits}")

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        return self.each_tensor(tensors, rng)

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        if self.bits == 16:
            return values.bfloat16().to(values.dtype)
        step = by_update(values.flatten(1).abs().amax(1) / (2 ** (self.bits - 1) - 1), values)
        return torch.where(step == 0, values, (values / step).round() * step)
