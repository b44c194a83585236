"""An update read as a gradient, each entry with its error: the error model of all that follows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.defense_traits import deviation_told
from gradaudit.leakage.rowspace.noise_floor import few_digits, few_values, noise_rank
from gradaudit.leakage.uneven.steps import AdamStep, PlainStep, Step
from gradaudit.models.local_steps import AUTOCAST, WEIGHTS
from gradaudit.types import Observation

UNIFORM = math.sqrt(12.0)
"""A rounding error is uniform: its standard deviation is its width over this."""
ARITHMETIC = 1.5e-7
"""The optimizer's own float32 arithmetic, relative to a step of 1: at most two roundings of 6e-8 (measured: 1.2e-7)."""
_SUMMED = 2e-7
"""Rounding of a gradient's entry that float32 summed over tokens, relative to the root mean squares of its matrix and
of its row and column: 1.1e-7 in the mean (MiniLM, 16 to 95 tokens), in columns with outliers up to four times that."""
_DIGITS = {torch.bfloat16: 7, torch.float16: 10}
"""Binary digits behind the first."""
_LEFT_OUT = 0.02
"""A larger share of zeros was left out: of the own ones there are none, but where a whole row or column is zero."""
_UNKNOWN = 1e6
"""Deviation of an entry that was left out, in multiples of the largest one."""
_FEWEST = 0.02
"""Share of entries of which more than sign and bound must be known: of a development batch at 1e-5 in float32 it was
13%, and of AdamW's steps on weights in bfloat16 at 5e-5 and 1e-3 0.2% and 1.4%: their grid hides all but the sign."""
_LEVELS = 8
"""Fewer values than these are signs."""
_NOISE = 1e-5
"""Smaller noise, relative to the root mean square, is rounding: spans are exact."""
_Read = Callable[[Tensor, Tensor, "float | None"], "tuple[Tensor, Tensor] | None"]
"""From what was sent of a matrix, its weights before, and the noise that was told, to values and their deviations."""


@dataclass(frozen=True)
class Entries:
    """Stacked matrices of one input, [n, d], as an optimizer's step shows them.

    Args:
        sent: [n, d] the step y in units of the learning rate; descent is positive, as the gradient is.
        spread: [n, d] standard deviation of y's error.
        step: what takes a gradient to y.
        groups: rows of each matrix by its view's name, in order.
        steps: of the optimizer that made the change.
        rounded: type to which the inputs were rounded before they entered; None for their own.
        weights: type of the weights before and after; None for float32.
        narrow: digits behind the first of the client's gradient, whose rounding is not in `spread`; None for float32.
    """

    sent: Tensor
    spread: Tensor
    step: Step
    groups: Mapping[str, int]
    steps: int = 1
    rounded: torch.dtype | None = None
    weights: torch.dtype | None = None
    narrow: int | None = None

    @property
    def even(self) -> bool:
        """Whether gradients were sent whose errors are of one size in each matrix, as noise and integers make them."""
        parts = torch.split(self.spread, list(self.groups.values()))
        plain = isinstance(self.step, PlainStep)
        return plain and all(bool((part == part[0, 0]).all()) and bool(part[0, 0] > 0) for part in parts)

    def as_computed(self, device: torch.device) -> torch.autocast:
        """Return the context in which passes round as the client's did: autocast of its type, or none."""
        kind = self.rounded if self.weights is None else None
        return torch.autocast(device.type, kind, enabled=kind is not None)

    def parts(self, stacked: Tensor) -> dict[str, Tensor]:
        """Return each matrix of a stack, by its view's name."""
        return dict(zip(self.groups, torch.split(stacked, list(self.groups.values())), strict=True))

    def unsure(self) -> float:
        """Return the error of an entry as a share of its size, in the middle of those that are there and not zero."""
        there = (self.spread < self.sent.abs().max()) & (self.sent != 0)
        share = (self.spread[there] / self.sent[there].abs()).flatten()
        return float(share.median()) if len(share) else math.inf

    def own(self, gradient: Tensor, times: float = 1.0) -> Tensor:
        """Return the standard deviation of the gradient's own rounding, [n, d].

        Args:
            gradient: [n, d].
            times: how much more than a sum over tokens alone has rounded it; see `summing_error`.
        """
        own = times * summing_error(gradient, self.groups)
        return own if self.narrow is None else own.hypot(last_place(gradient, self.narrow) / UNIFORM)

    def unread(self) -> "Entries":
        """Return the entries as they are before rows are known, whose own rounding then is an error, too."""
        if self.rounded is None:
            return self
        gradient, _ = self.step.behind(self.sent, self.spread)
        # a rounding error is half a unit in the last place at most, and uniform
        blur = torch.finfo(self.rounded).eps / (UNIFORM * _SUMMED) * summing_error(gradient, self.groups)
        return replace(self, spread=self.spread.hypot(self.step.slope(gradient) * blur))

    def error(self, gradient: Tensor, times: float = 1.0) -> Tensor:
        """Return the standard deviation of y at a gradient, [n, d]: of the weights' grid and of the gradient.

        Args:
            gradient: [n, d].
            times: how much more than a sum over tokens alone has rounded it.
        """
        return self.spread.hypot(self.step.slope(gradient) * self.own(gradient, times))


def summing_error(gradient: Tensor, groups: Mapping[str, int]) -> Tensor:
    """Return the standard deviation of a gradient's own rounding, [n, d]: it was summed over tokens in float32.

    A sum's rounding goes with the size of what is summed, which entries that cancel do not show: the whole matrix
    does, and row and column where outliers are.

    Args:
        gradient: [n, d] stacked matrices.
        groups: rows of each matrix.
    """
    parts = []
    for part in torch.split(gradient.square(), list(groups.values())):
        mean = part.mean().clamp_min(torch.finfo(part.dtype).tiny)
        parts.append((mean + part.mean(1, keepdim=True) * (part.mean(0) / mean)).sqrt())
    return _SUMMED * torch.cat(parts)


def last_place(values: Tensor, digits: int) -> Tensor:
    """Return the unit in the last of so many binary digits behind the first, of each value."""
    exponent = torch.frexp(values.abs().clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones_like(values), exponent - 1 - digits)


def _finest(values: Tensor) -> float:
    """Return the unit of which all values are multiples: those of a float16 below 6e-5 have no finer one."""
    mantissa, exponent = torch.frexp(values[values != 0].double())
    whole = (mantissa.abs() * 2.0**53).long()
    return float(torch.ldexp((whole & -whole).double(), exponent - 53).min())


def grid(weights: Tensor) -> Tensor:
    """Return the distance of each weight to the next one its type can hold (one unit in the last place), float64."""
    size = weights.abs()
    return (torch.nextafter(size, torch.full_like(size, math.inf)).double() - size.double()).to(torch.float64)


def entries(seen: Observation, layer: int, roles: Sequence[str] = ("q", "k", "v")) -> Entries | None:
    """Return what an update says of the gradients of a block's matrices that share an input.

    Args:
        seen: the observation; its model has the weights before.
        layer: block.
        roles: of q, k and v.

    Returns:
        The entries; None where nothing of the block was seen, where a weight change is of unknown training or of
        several steps that do not add up, and where a gradient has no error beside its own rounding, or signs are sent.
    """
    weights = seen.model.parameters()
    found: dict[str, tuple[Tensor, Tensor, bool]] = {}
    for role in roles:
        for view, sent in zip(seen.model.views(layer, role), seen.role(layer, role), strict=False):
            # one adapter beside a fused matrix is that of q, k and v
            whole = weights[view.parameter].numel() == sent.numel()
            found.setdefault(view.name, (sent, view(weights[view.parameter]), whole))
    return entries_of(seen, found)


def entries_of(seen: Observation, matrices: Mapping[str, tuple[Tensor, Tensor, bool]]) -> Entries | None:
    """Return what an update says of the gradients of some matrices; see `entries`.

    Args:
        seen: the observation.
        matrices: by name, what was sent, the weights before, and whether that is the whole parameter: of a part, noise
            relative to the whole is not known.
    """
    read = _of_change(seen) if seen.kind == "delta" else _of_gradient
    if read is None:
        return None
    values, spreads = [], []
    groups: dict[str, int] = {}
    for name, (sent, before, whole) in matrices.items():
        changed = seen.kind == "delta"
        noise = deviation_told(seen.knowledge.defenses, sent, seen.knowledge.batch_size, changed) if whole else None
        if noise is None and seen.model.spec.lora:
            noise = 0.0  # all of few directions are the batch's: no small singular values tell noise
        one = read(sent.detach(), before.detach(), noise)
        if one is None:
            return None
        values.append(one[0])
        spreads.append(one[1])
        groups[name] = len(one[0])
    if not values:
        return None
    how, steps = seen.knowledge.training, seen.knowledge.steps or 1
    adaptive = seen.kind == "delta" and how is not None and how.optimizer != "sgd"
    step: Step = AdamStep(how.eps) if adaptive and how is not None else PlainStep()
    sent, spread = torch.cat(values), torch.cat(spreads)
    if float(step.behind(sent, spread)[1].double().mean()) < _FEWEST:
        return None
    kind = WEIGHTS.get(how.precision) if how is not None else None
    rounded = AUTOCAST.get(how.precision, kind) if how is not None else None
    narrow = _DIGITS[rounded] if seen.kind == "delta" and rounded is not None else None
    return Entries(sent, spread, step, groups, steps, rounded, kind, narrow)


def _of_change(seen: Observation) -> _Read | None:
    """Return how the entries of a weight change are read.

    The client computes w1 = w0 (1 - lr decay) - lr y. Both weights lie on their type's grid, so y is known up to half a
    grid step over lr: finely for small weights, coarsely for large ones.
    """
    how, steps = seen.knowledge.training, seen.knowledge.steps
    if how is None or how.optimizer == "none" or steps is None:
        return None
    adaptive = how.optimizer != "sgd"
    if steps > 1 and (adaptive or how.momentum or how.clip_norm):
        return None  # what each step takes depends on the others
    if how.optimizer == "adam" and how.weight_decay:
        return None  # the decay is part of the gradient whose size is taken off
    rate = how.mean_rate(steps)
    narrow = WEIGHTS.get(how.precision)
    # the optimizer's own rounding grows with that of its state's type; plain SGD has none and rounds once, to the grid
    state = narrow if narrow is not None and (adaptive or how.weight_decay or how.momentum) else torch.float32
    arithmetic = ARITHMETIC * torch.finfo(state).eps / torch.finfo(torch.float32).eps

    def read(change: Tensor, before: Tensor, noise: float | None) -> tuple[Tensor, Tensor]:
        kind = narrow or before.dtype
        before, after = before.to(kind), (before + change).to(kind)
        # as the optimizer computes it, in the weights' own type: its rounding is known then
        kept = before * (1 - rate * how.weight_decay) if how.optimizer == "adamw" else before
        value = (kept.double() - before.double() - change.double()) / rate
        if how.optimizer == "sgd":
            value = value - how.weight_decay * steps * before.double()
        rounded = grid(after) * math.sqrt(steps) / (UNIFORM * rate)
        size = torch.ones_like(value) if adaptive else value.abs()
        return value, (rounded.square() + (arithmetic * size).square() + ((noise or 0.0) / rate) ** 2).sqrt()

    return read


def _of_gradient(sent: Tensor, before: Tensor, noise: float | None) -> tuple[Tensor, Tensor] | None:
    """Return a gradient's entries and their errors, as its own values show them; None for signs and exact ones.

    Half precision: a unit in the last place. Integers: their step. Zeros in place of entries: nothing is known there.
    Else noise, of the size that was told, or that the small singular values tell.
    """
    value = sent.double()
    least = _NOISE * float(value.square().mean().sqrt())
    if noise:
        return (value, torch.full_like(value, noise)) if noise > least else None
    digits = few_digits(sent)
    if few_values(sent):
        levels = torch.unique(value)
        if len(levels) < _LEVELS:
            return None
        if not digits:
            return value, torch.full_like(value, float(levels.diff().min()) / UNIFORM)
    there = value != 0
    if float((~there).double().mean()) > _LEFT_OUT:
        own = _SUMMED * value[there].square().mean().sqrt()
        return value, torch.where(there, own, _UNKNOWN * value.abs().max())
    if digits:
        kind = torch.bfloat16 if bool((sent.bfloat16().to(sent.dtype) == sent).all()) else torch.float16
        return value, last_place(value, _DIGITS[kind]).clamp_min(_finest(value)) / UNIFORM
    if noise is None:
        rows = value if value.shape[0] >= value.shape[1] else value.T
        _, noise = noise_rank(torch.linalg.svdvals(rows), len(rows), sure=True)
    return (value, torch.full_like(value, noise)) if noise > least else None
