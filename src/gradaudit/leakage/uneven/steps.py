"""What an optimizer's first steps from a fresh state make of gradients, entry by entry, and one step's way back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_INSIDE = 1e-6
"""Nearest to 1 that |y| of Adam's step may come before it counts as saturated, whatever its error: float32 in the
optimizer leaves that much."""


class Step(Protocol):
    """A step in units of the learning rate, y = f(g), monotone in every entry."""

    def sent(self, gradient: Tensor) -> Tensor:
        """Return y of each entry."""

    def slope(self, gradient: Tensor) -> Tensor:
        """Return dy/dg at each entry."""

    def secant(self, one: Tensor, other: Tensor) -> Tensor:
        """Return (f(one) - f(other)) / (one - other), the slope where they are equal."""

    def behind(self, sent: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient behind each entry, and a bool tensor: False where only its sign and a bound are known.

        Args:
            sent: y.
            spread: standard deviation of its error.
        """


@dataclass(frozen=True)
class PlainStep:
    """SGD without momentum: y = g."""

    def sent(self, gradient: Tensor) -> Tensor:
        """Return y of each entry."""
        return gradient

    def slope(self, gradient: Tensor) -> Tensor:
        """Return dy/dg, 1 everywhere."""
        return torch.ones_like(gradient)

    def secant(self, one: Tensor, other: Tensor) -> Tensor:
        """Return 1 everywhere."""
        return torch.ones_like(one)

    def behind(self, sent: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return y itself, known everywhere."""
        return sent, torch.ones_like(sent, dtype=torch.bool)


@dataclass(frozen=True)
class AdamStep:
    """Adam's and AdamW's first step: bias correction cancels both moments' rates, so that y = g / (|g| + eps).

    An entry is taken for its sign only. But y falls short of 1 by eps / (|g| + eps), and the weights' grid shows that
    up to gradients of about a thousand eps.

    Args:
        eps: the optimizer's eps; 1e-8 is the default of torch and of the transformers Trainer.
    """

    eps: float = 1e-8

    def sent(self, gradient: Tensor) -> Tensor:
        """Return y of each entry."""
        return gradient / (gradient.abs() + self.eps)

    def slope(self, gradient: Tensor) -> Tensor:
        """Return dy/dg, from 1/eps at 0 down to eps/g^2."""
        return self.eps / (gradient.abs() + self.eps).square()

    def secant(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the slope of the line through two points of the map."""
        a, b = one.abs(), other.abs()
        # of one sign f(a) - f(b) = eps (a - b) / ((a + eps) (b + eps)); across zero 2 a b / (a + b) joins eps
        across = torch.where(one * other < 0, 2 * a * b / (a + b).clamp_min(1e-300), torch.zeros_like(a))
        return (self.eps + across) / ((a + self.eps) * (b + self.eps))

    def behind(self, sent: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return eps y / (1 - |y|), known where y is two standard deviations from 1."""
        limit = (1 - 2 * spread).clamp(0.0, 1 - _INSIDE)
        inside = torch.maximum(torch.minimum(sent, limit), -limit)
        return self.eps * inside / (1 - inside.abs()), sent.abs() < limit


@dataclass(frozen=True)
class AdamSteps:
    """Adam's and AdamW's first K steps from a fresh state, y = sum of w_k m_k / (sqrt(v_k) + eps), bias corrected.

    One equation for the K gradients of an entry: nothing leads back without knowing how entries hang together.

    Args:
        shares: w_k, of each step in what was sent.
        eps, betas: the optimizer's.
    """

    shares: Sequence[float]
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)

    def sent(self, gradients: Tensor) -> Tensor:
        """Return y of each entry.

        Args:
            gradients: [K, ...] of each step.
        """
        y = torch.zeros_like(gradients[0])
        for share, own, size in self._moments(gradients):
            y += share * own / (size + self.eps)
        return y

    def taken(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return y of each entry, and [K, ...] its derivative by each step's gradient.

        Args:
            gradients: [K, ...] of each step.
        """
        first, second = self.betas
        y, slopes = torch.zeros_like(gradients[0]), torch.zeros_like(gradients)
        tiny = torch.finfo(gradients.dtype).tiny
        for k, (share, own, size) in enumerate(self._moments(gradients), 1):
            below = size + self.eps
            y += share * own / below
            for j in range(k):
                by_mean = (1 - first) * first ** (k - 1 - j) / (1 - first**k)
                by_size = (1 - second) * second ** (k - 1 - j) / (1 - second**k) * gradients[j] / size.clamp_min(tiny)
                slopes[j] += share * (by_mean / below - own * by_size / below.square())
        return y, slopes

    def _moments(self, gradients: Tensor) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Yield each step's share, its mean gradient and the root of its mean square, bias corrected."""
        first, second = self.betas
        mean, square = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
        for k, (share, gradient) in enumerate(zip(self.shares, gradients, strict=True), 1):
            mean = first * mean + (1 - first) * gradient
            square = second * square + (1 - second) * gradient.square()
            yield share, mean / (1 - first**k), (square / (1 - second**k)).sqrt()
