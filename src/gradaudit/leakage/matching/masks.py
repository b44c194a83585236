"""Dropout masks of a guess: one number in [0, 1] for each value that a client's dropout may have put to zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.models.taps import Dropout


class Masks:
    """Masks at every dropout site of a batch, drawn where a forward pass first asks for them.

    Source: Grab (Feng et al., 2024), section 4.2: one mask of full shape a site, Bernoulli at first, then learned.

    Args:
        size: sentences of the batch.
        rng: draws the masks.
        learn: whether they get gradients.
        of: sentences in force, for `only`.
    """

    def __init__(self, size: int, rng: torch.Generator, learn: bool = True) -> None:
        self._size, self._rng, self._learn = size, rng, learn
        self._sites: dict[int, Tensor] = {}
        self._rates: dict[int, float] = {}
        self._rows: slice | Tensor = slice(None)

    def at(self, candidates: int) -> Dropout:
        """Return what happens at the sites of a pass over so many candidates, which share the masks."""

        def act(site: int, inner: Tensor, rate: float) -> Tensor:
            parts = inner.view(candidates, -1, *inner.shape[1:])
            self._rates[site] = rate
            if site not in self._sites:
                drawn = self._bernoulli((self._size, *inner.shape[1:]), 1 - rate).to(inner.device, inner.dtype)
                self._sites[site] = drawn.requires_grad_(self._learn)
            kept = self._sites[site][self._rows]
            # a sentence without the batch's padding is the beginning of its row
            kept = kept[(slice(None), *(slice(0, n) for n in inner.shape[1:]))]
            if kept.shape[1:] != inner.shape[1:]:
                raise ValueError(f"masks of shape {tuple(kept.shape)} met values of shape {tuple(inner.shape)}")
            return (parts * (kept / (1 - rate))).view_as(inner)

        return act

    @property
    def whole(self) -> bool:
        """Whether these are the masks of all sentences."""
        return isinstance(self._rows, slice)

    def holding(self, values: Sequence[Tensor]) -> Masks:
        """Return masks with these values at the sites that were met, in their order."""
        other = Masks(self._size, self._rng, self._learn)
        other._sites, other._rates = dict(zip(self._sites, values, strict=True)), self._rates
        return other

    def only(self, rows: Tensor | slice) -> Masks:
        """Return the masks of some sentences of the batch, sharing their values."""
        part = Masks(self._size, self._rng, self._learn)
        part._sites, part._rates, part._rows = self._sites, self._rates, rows
        return part

    def values(self, name: str = "mask") -> dict[str, Tensor]:
        """Return the masks by site, to be kept under a name."""
        return {f"{name}.{site}": mask.detach() for site, mask in self._sites.items()}

    def put_back(self, values: dict[str, Tensor], device: torch.device, name: str = "mask") -> None:
        """Take masks up again that were kept."""
        sites = sorted(int(key.removeprefix(f"{name}.")) for key in values if key.startswith(f"{name}."))
        for site in sites:  # in their order: a restart draws them one after the other
            self._sites[site] = values[f"{name}.{site}"].to(device).requires_grad_(self._learn)

    def variables(self) -> list[Tensor]:
        """Return the masks that can be learned, site by site; empty before the first pass."""
        return list(self._sites.values()) if self._learn else []

    @torch.no_grad()
    def clamp(self) -> None:
        """Put every value back into [0, 1]."""
        for mask in self._sites.values():
            mask.clamp_(0, 1)

    @torch.no_grad()
    def restart(self, rate: float | None = None) -> None:
        """Draw all masks anew, each at its own share of ones or at a given rate."""
        for mask in self._sites.values():
            keep = float(mask.mean().clamp(0.05, 1)) if rate is None else 1 - rate
            mask.copy_(self._bernoulli(mask.shape, keep).to(mask))

    @torch.no_grad()
    def expect(self) -> None:
        """Put every value to what it is in the mean: nothing is dropped, nothing scaled."""
        for site, mask in self._sites.items():
            mask.fill_(1 - self._rates[site])

    def _bernoulli(self, shape: tuple[int, ...] | torch.Size, keep: float) -> Tensor:
        return (torch.rand(shape, generator=self._rng) < keep).float()
