"""A weight change of several steps of Adam or AdamW: what all of them took together, entry by entry, with its error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.uneven.entries import ARITHMETIC, UNIFORM, grid, summing_error
from gradaudit.leakage.uneven.steps import AdamSteps
from gradaudit.models.lora import unstepped
from gradaudit.types import Observation

_MOST = 64
"""Steps read together at most: memory goes with them, and their number is a claim. Ten were tried (and seldom read)."""


@dataclass(frozen=True)
class Summed:
    """Stacked matrices of one input, [n, d], as several steps show them.

    Args:
        sent: [n, d] what the steps took, each weighed by its share; descent is positive.
        spread: [n, d] standard deviation of its error.
        step: what takes the steps' gradients, in units of the optimizer's eps, to what was sent.
        groups: rows of each matrix by its view's name, in order.
        silent: the first step's gradient was zero: these are adapters that had made no step.
    """

    sent: Tensor
    spread: Tensor
    step: AdamSteps
    groups: Mapping[str, int]
    silent: bool = False

    def error(self, gradients: Tensor, slopes: Tensor) -> Tensor:
        """Return the standard deviation of each entry, [n, d]: the weights' grid, and the gradients' own rounding."""
        own = [(slope * summing_error(g, self.groups)).square() for g, slope in zip(gradients, slopes, strict=True)]
        return (self.spread.square() + torch.stack(own).sum(0)).sqrt()


def summed(seen: Observation, layer: int, roles: Sequence[str] = ("q", "k", "v")) -> Summed | None:
    """Return what several steps of Adam or AdamW took of a block's matrices that share an input.

    The client computes w_k = w_(k-1) (1 - r_k decay) - r_k y_k, so that w_0 times all of the decays less w_K is the sum
    of the steps, each scaled by its rate and the decays behind it. Every sum is rounded to the weights' grid, and every
    product: where weights move little a decay may be off by the same in each step, which is reckoned with.

    Args:
        seen: the observation; its model has the weights before.
        layer: block.
        roles: of q, k and v.

    Returns:
        None where nothing of the block was seen, or the change was not made so: the optimizer is another one or not
        told, Adam's decay is part of its gradient, weights or state are narrower than float32.

    Raises:
        NotSupportedError: too many steps.
    """
    how, steps = seen.knowledge.training, seen.knowledge.steps
    if how is None or steps is None or how.optimizer not in ("adam", "adamw") or how.precision == "bf16-weights":
        return None
    if how.optimizer == "adam" and how.weight_decay:
        return None
    if steps > _MOST:
        raise NotSupportedError(f"adapters are read over at most {_MOST} steps of Adam together, and these are {steps}")
    rates = how.rates(steps)
    # a factor so near to 1 is rounded itself, to the weights' type
    kept = torch.tensor([1 - rate * how.weight_decay for rate in rates], dtype=torch.float32).tolist()
    parts = [rate * math.prod(kept[at + 1 :]) for at, rate in enumerate(rates)]
    whole = sum(parts)
    arithmetic = ARITHMETIC * math.sqrt(sum(part**2 for part in parts)) / whole
    roundings = steps + ((steps - 1) ** 2 if how.weight_decay else 0)
    values, spreads = [], []
    groups: dict[str, int] = {}
    weights, silent = seen.model.parameters(), list[bool]()
    for role in roles:
        for view, sent in zip(seen.model.views(layer, role), seen.role(layer, role), strict=False):
            if view.name in groups:
                continue
            before, change = view(weights[view.parameter]).detach(), sent.detach()
            # the first product is computed as the optimizer does, and its rounding known
            decayed = (before * kept[0]).double() * math.prod(kept[1:])
            values.append((decayed - before.double() - change.double()) / whole)
            own = grid(before + change) * math.sqrt(roundings) / (UNIFORM * whole)
            spreads.append(own.hypot(torch.full_like(own, arithmetic)))
            groups[view.name] = len(sent)
            silent.append(unstepped(weights, view.parameter))
    if not values:
        return None
    step = AdamSteps([part / whole for part in parts], 1.0, how.betas)
    return Summed(torch.cat(values), torch.cat(spreads), step, groups, all(silent))
