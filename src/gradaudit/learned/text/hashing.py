"""Feature hashing of updates: each coordinate goes to one bin, told by integers alone; no matrix is stored."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_AT_ONCE = 1 << 22
"""Coordinates whose bins are computed together."""


@dataclass(frozen=True)
class Hash:
    """The bins of an update's coordinates, summed (Weinberger et al., 2009; LTI sums without signs).

    A coordinate's bin is the SplitMix64 hash of (seed, index), which is the same on every device and in every run. Bins
    are drawn independently, as LTI's are: their sizes are binomial, not equal.

    Args:
        sizes: entries of each tensor by view name, in the order in which they are numbered.
        bins: how many.
        seed: of the hash.
        signed: give each coordinate a random sign before it is summed; the paper does not.
        apart: view, first entry and how many of it have a bin each, behind those of all others; None for none.
    """

    sizes: Mapping[str, int]
    bins: int
    seed: int
    signed: bool = False
    apart: tuple[str, int, int] | None = None
    _kept: dict[tuple[str, torch.device], tuple[Tensor, Tensor | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def drawn(self) -> int:
        """Bins that coordinates fall into by chance."""
        return self.bins - (self.apart[2] if self.apart is not None else 0)

    def places(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return the bins [stop - start] into which consecutive coordinates are drawn, int64."""
        return (((_mixed(self.seed, start, stop, device) >> 33) & 0x7FFFFFFF) * self.drawn) >> 31

    def signs(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return the signs [stop - start], 1 or -1, float32; all 1 where none are used."""
        if not self.signed:
            return torch.ones(stop - start, device=device)
        return 1.0 - 2.0 * (_mixed(self.seed, start, stop, device) & 1).float()

    def add(self, out: Tensor, name: str, values: Tensor, first: int = 0) -> None:
        """Add tensors of several updates to their bins, in place.

        Coordinates are added in their order, so that a CPU gives the same bits however they are cut; a GPU adds in any
        order, and differs by rounding.

        Args:
            out: [n, bins].
            name: the tensors' view.
            values: [n, ...] tensors, or consecutive entries [n, m] of them.
            first: number of the first entry within the tensor.
        """
        flat = values.reshape(len(values), -1)
        bins, signs = self._of(name, out.device)
        rows = slice(first, first + flat.shape[1])
        out.index_add_(1, bins[rows], flat if signs is None else flat * signs[rows])

    def __call__(self, parts: Iterable[tuple[str, Tensor]], count: int, device: torch.device | None = None) -> Tensor:
        """Return the hashed updates [count, bins], float32.

        Args:
            parts: tensors [count, ...] by view name, each once, in any order.
            count: updates.
            device: where the tensors are; the CPU when None.
        """
        out = torch.zeros(count, self.bins, device=device)
        for name, values in parts:
            self.add(out, name, values)
        return out

    def counts(self, names: Iterable[str], device: torch.device | None = None) -> Tensor:
        """Return how many coordinates of some tensors fall into each bin, [tensors, bins]."""
        found = [torch.bincount(self._of(n, device or torch.device("cpu"))[0], minlength=self.bins) for n in names]
        return torch.stack(found).float()

    def _of(self, name: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return a tensor's bins and signs; kept in memory (4 bytes a coordinate), since every update needs them."""
        key = (name, device)
        if key not in self._kept:
            end = dict(zip(self.sizes, accumulate(self.sizes.values()), strict=True))[name]
            pairs = list(pairwise([*range(end - self.sizes[name], end, _AT_ONCE), end]))
            bins = torch.cat([self.places(a, b, device).int() for a, b in pairs])
            signs = torch.cat([self.signs(a, b, device) for a, b in pairs]) if self.signed else None
            if self.apart is not None and self.apart[0] == name:
                own = slice(self.apart[1], self.apart[1] + self.apart[2])
                bins[own] = torch.arange(self.drawn, self.bins, dtype=bins.dtype, device=bins.device)
                if signs is not None:
                    signs[own] = 1.0
            self._kept[key] = bins, signs
        return self._kept[key]


def _mixed(seed: int, start: int, stop: int, device: torch.device | None) -> Tensor:
    """Return SplitMix64 of the seed at some steps, [stop - start] int64 whose bits are those of the unsigned hash."""
    index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device)
    z = index * _signed(_GOLDEN) + _signed(seed)
    z = (z ^ _down(z, 30)) * _signed(_FIRST)
    z = (z ^ _down(z, 27)) * _signed(_SECOND)
    return z ^ _down(z, 31)


def _down(z: Tensor, bits: int) -> Tensor:
    """Return an unsigned shift to the right: torch's own carries the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the 64-bit integer with the bits of an unsigned one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
