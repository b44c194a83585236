"""A weight change read as a gradient, each entry with its error: the error model of all that follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.uneven.steps import AdamStep, PlainStep, Step
from gradaudit.types import Observation

_UNIFORM = math.sqrt(12.0)
"""A rounding error is uniform: its standard deviation is its width over this."""
_ARITHMETIC = 1.5e-7
"""The optimizer's own float32 arithmetic, relative to a step of 1: at most two roundings of 6e-8 (measured: 1.2e-7)."""
_SUMMED = 2e-7
"""Rounding of a gradient's entry that float32 summed over tokens, relative to the root mean squares of its matrix and
of its row and column: 1.1e-7 in the mean (MiniLM, 16 to 95 tokens), in columns with outliers up to four times that."""


@dataclass(frozen=True)
class Entries:
    """Stacked matrices of one input, [n, d], as an optimizer's step shows them.

    Args:
        sent: [n, d] the step y in units of the learning rate; descent is positive, as the gradient is.
        spread: [n, d] standard deviation of y's error.
        step: what takes a gradient to y.
        groups: rows of each matrix by its view's name, in order.
        steps: of the optimizer that made the change.
    """

    sent: Tensor
    spread: Tensor
    step: Step
    groups: Mapping[str, int]
    steps: int = 1

    def parts(self, stacked: Tensor) -> dict[str, Tensor]:
        """Return each matrix of a stack, by its view's name."""
        return dict(zip(self.groups, torch.split(stacked, list(self.groups.values())), strict=True))

    def own(self, gradient: Tensor) -> Tensor:
        """Return the standard deviation of the gradient's own rounding, [n, d]: it was summed over tokens in float32.

        A sum's rounding goes with the size of what is summed, which entries that cancel do not show: the whole matrix
        does, and row and column where outliers are.
        """
        parts = []
        for part in self.parts(gradient.square()).values():
            mean = part.mean().clamp_min(torch.finfo(part.dtype).tiny)
            parts.append((mean + part.mean(1, keepdim=True) * (part.mean(0) / mean)).sqrt())
        return _SUMMED * torch.cat(parts)

    def error(self, gradient: Tensor) -> Tensor:
        """Return the standard deviation of y at a gradient, [n, d]: of the weights' grid and of the gradient."""
        return self.spread.hypot(self.step.slope(gradient) * self.own(gradient))


def grid(weights: Tensor) -> Tensor:
    """Return the distance of each weight to the next one its type can hold (one unit in the last place), float64."""
    size = weights.abs()
    return (torch.nextafter(size, torch.full_like(size, math.inf)).double() - size.double()).to(torch.float64)


def entries(seen: Observation, layer: int, roles: Sequence[str] = ("q", "k", "v")) -> Entries | None:
    """Return what a weight change says of the gradients of a block's matrices that share an input.

    The client computes w1 = w0 (1 - lr decay) - lr y. Both weights lie on their type's grid, so y is known up to half a
    grid step over lr: finely for small weights, coarsely for large ones.

    Args:
        seen: the observation; its model has the weights before.
        layer: block.
        roles: of q, k and v.

    Returns:
        The entries; None where this is no weight change of known training, or nothing of the block was seen.
    """
    how, size = seen.knowledge.training, seen.knowledge.batch_size
    if seen.kind != "delta" or how is None or how.optimizer == "none":
        return None
    steps = 1 if size is None else how.steps(size)
    step: Step = PlainStep() if how.optimizer == "sgd" else AdamStep()
    if steps > 1 and not isinstance(step, PlainStep):
        return None
    weights = seen.model.parameters()
    values, spreads = [], []
    groups: dict[str, int] = {}
    for role in roles:
        for view, change in zip(seen.model.views(layer, role), seen.role(layer, role), strict=False):
            before = view(weights[view.parameter]).detach()
            after = before + change
            # as the optimizer computes it, in the weights' own type: its rounding is known then
            kept = before * (1 - how.learning_rate * how.weight_decay)
            width = grid(after) * math.sqrt(steps)
            value = (kept.double() - before.double() - change.double()) / how.learning_rate
            values.append(value)
            groups[view.name] = len(value)
            rounded = width / (_UNIFORM * how.learning_rate)
            step_size = torch.ones_like(value) if isinstance(step, AdamStep) else value.abs()
            spreads.append((rounded.square() + (_ARITHMETIC * step_size).square()).sqrt())
    if not values:
        return None
    return Entries(torch.cat(values), torch.cat(spreads), step, groups, steps)
