"""Kernel ridge regression from updates to images: what a network learns in hours, in closed form from few thousand.

A Gaussian kernel on the scaled numbers of updates; ours, beside LTI's network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHARPNESS = (0.1, 0.5)
"""Tried on held-out public images: the kernel is exp(-sharpness |a - b|^2), inputs of mean square norm 1."""
RIDGES = (1e-3, 1e-2)
"""Tried beside it; the smaller ones leave the system of thousands of alike updates without a Cholesky factor."""


@dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel regression.

    Args:
        inputs: numbers of an update.
        references: public updates it is made of.
        image: channels, height and width.
    """

    inputs: int
    references: int
    image: tuple[int, int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what it holds by name."""
        channels, height, width = self.image
        coefficients = (self.references, channels * height * width)
        references = (self.references, self.inputs)
        return {"references": references, "coefficients": coefficients, "image": self.image, "sharpness": (1,)}


@dataclass(frozen=True)
class Kernel:
    """A fitted regression: image(a) = mean + sum over references r of exp(-sharpness |a - r|^2) coefficients(r).

    Args:
        references: [n, inputs] scaled public updates.
        coefficients: [n, pixels].
        image: [C, H, W] mean of the public images.
        sharpness: [1] of the kernel.
    """

    references: Tensor
    coefficients: Tensor
    image: Tensor
    sharpness: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return what it holds by name."""
        return {
            "references": self.references,
            "coefficients": self.coefficients,
            "image": self.image,
            "sharpness": self.sharpness,
        }

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
            factor, failed = torch.linalg.cholesky_ex(near + ridge * torch.eye(len(near), dtype=near.dtype).to(near))
            if int(failed):
                continue
            solved = torch.cholesky_solve(wanted, factor)
            made = ((far @ solved).float().view_as(held_images) + mean).clamp(0, 1)
            error = float((made - held_images).square().mean())
            if best is None or error < best[0]:
                best = error, sharpness, solved.float()
    assert best is not None  # the largest ridge is far above rounding
    return Kernel(numbers, best[2], mean, torch.tensor([best[1]]).to(mean)), best[0]
