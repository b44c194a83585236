"""Kernel ridge regression from updates to images: what a network learns in hours, in closed form from few thousand.

A Gaussian kernel on the scaled numbers of updates; ours, beside LTI's network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.learned.images.residuals import Spread, spread_of

SHARPNESS = (0.1, 0.3, 1.0)
"""Tried on held-out public images: the kernel is exp(-sharpness |a - b|^2), inputs of mean square norm 1."""
RIDGES = (1e-3, 1e-2, 1e-1)
"""Tried beside it; the smaller ones may leave the system of thousands of alike updates without a Cholesky factor."""


@dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel regression.

    Args:
        inputs: numbers of an update.
        references: public updates it is made of.
        image: channels, height and width.
        directions: of the spread; 0 where there is none.
    """

    inputs: int
    references: int
    image: tuple[int, int, int]
    directions: int = 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what it holds by name."""
        channels, height, width = self.image
        pixels, kept = channels * height * width, self.directions
        out: dict[str, tuple[int, ...]] = {
            "references": (self.references, self.inputs),
            "coefficients": (self.references, pixels),
            "image": self.image,
            "sharpness": (1,),
        }
        return out | ({"directions": (pixels, kept), "variances": (kept,), "floor": (1,)} if kept else {})


@dataclass(frozen=True)
class Kernel:
    """A fitted regression: image(a) = mean + sum over references r of exp(-sharpness |a - r|^2) coefficients(r).

    Args:
        references: [n, inputs] scaled public updates.
        coefficients: [n, pixels].
        image: [C, H, W] mean of the public images.
        sharpness: [1] of the kernel.
        spread: how far its readings are off; None in inverters that were saved before there was one.
    """

    references: Tensor
    coefficients: Tensor
    image: Tensor
    sharpness: Tensor
    spread: Spread | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Kernel:
        """Return the regression that holds some tensors; see `tensors`."""
        spread = None
        if "directions" in tensors:
            spread = Spread(tensors["directions"], tensors["variances"], tensors["floor"])
        return cls(tensors["references"], tensors["coefficients"], tensors["image"], tensors["sharpness"], spread)

    def tensors(self) -> dict[str, Tensor]:
        """Return what it holds by name."""
        own = {name: part for name, part in vars(self).items() if name != "spread"}
        return own | ({} if self.spread is None else vars(self.spread))

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return images [n, C, H, W], not yet limited to 0 to 1, from scaled numbers [n, inputs]."""
        weights = torch.exp(-self.sharpness.double() * distances(numbers, self.references))
        made = (weights @ self.coefficients.double()).float()
        return made.view(-1, *self.image.shape) + self.image


def distances(some: Tensor, others: Tensor) -> Tensor:
    """Return squared distances [n, m], float64; products are float32's, whose rounding is far below the ridges."""
    ends = some.double().square().sum(1)[:, None] + others.double().square().sum(1)[None]
    return (ends - 2 * (some @ others.T)).clamp_min(0)


def fit_kernel(
    numbers: Tensor, images: Tensor, held_numbers: Tensor, held_images: Tensor, ridges: Sequence[float] = RIDGES
) -> tuple[Kernel, float]:
    """Return the regression that reads held-out public images best, and its mean squared error there.

    Args:
        numbers: [n, inputs] scaled updates of public images.
        images: [n, C, H, W].
        held_numbers, held_images: the same of those held out.
        ridges: weights of the penalty that are tried.
    """
    mean = images.mean(0)
    wanted = (images - mean).flatten(1).double()
    own, across = distances(numbers, numbers), distances(held_numbers, numbers)
    best: tuple[float, float, Tensor] | None = None
    for sharpness in SHARPNESS:
        near, far = torch.exp(-sharpness * own), torch.exp(-sharpness * across)
        for ridge in ridges:
            shifted = near.clone()
            shifted.diagonal().add_(ridge)
            factor, failed = torch.linalg.cholesky_ex(shifted)
            if int(failed):
                continue
            # solved for the held-out updates, which are fewer than pixels; for the pixels of the best alone
            weights = torch.cholesky_solve(far.T, factor).T
            made = ((weights @ wanted).float().view_as(held_images) + mean).clamp(0, 1)
            error = float((made - held_images).square().mean())
            if best is None or error < best[0]:
                best = error, sharpness, factor
    assert best is not None  # the largest ridge is far above rounding
    error, chosen, factor = best
    solved = torch.cholesky_solve(wanted, factor)
    # of each image by the regression without it (Allen, 1974): its residual over the inverse's diagonal
    left_out = solved / torch.cholesky_inverse(factor).diagonal()[:, None]
    found = torch.tensor([chosen]).to(mean)
    return Kernel(numbers, solved.float(), mean, found, spread_of(left_out)), error
