"""Row spaces of attention gradients: rank, span, and who lies in it.

The gradient of y = W x over a batch is D^T X: its rows are combinations of the inputs x of the batch's tokens. So
the inputs' span can be read from the gradient, and a token whose input lies outside it was not in the batch.

Notation: W is [out, d]; b real tokens; X [b, d] their inputs; R [d, r] an orthonormal basis of the row space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.noise_floor import (
    CLEAR,
    balanced,
    clear_cut,
    few_digits,
    few_values,
    lost_share,
    noise_of,
    noise_rank,
    whitened,
)
from gradaudit.types import Observation

_WRONG = 0.8
"""A true row lies below so many times the residual that a wrong one, twice as far down the list, has."""
_BLOCKS, _SPARE = 10, 20
"""Of DAGER's released code: blocks whose ranks it looks at, and directions that it leaves out of the width."""
_TRUE = 3.0
"""True rows are within so many times what noise alone makes of the nearest ones: at most 3.4 times in trials."""


@dataclass(frozen=True)
class Span:
    """The row space of one block's stacked attention gradients.

    Args:
        basis: [d, r] orthonormal columns, float64.
        values: singular values, largest first.
        rank: r.
        confidence: ratio of the singular values on both sides of the cut (1: no gap, the rank is a guess).
        layer: block.
        roles: roles that were stacked.
        lost: [r] by direction, what noise turned out of it, per energy inside (`noise_floor.lost_share`); None where
            the gradient has no noise but rounding.
        scale: [d] by what a row is multiplied before it is held against the basis; None for nothing.
    """

    basis: Tensor
    values: Tensor
    rank: int
    confidence: float
    layer: int
    roles: tuple[str, ...]
    lost: Tensor | None = None
    scale: Tensor | None = None

    def told(self) -> dict[str, Any]:
        """Return what a record says of a row space."""
        return {"rank": self.rank, "rank_confidence": round(self.confidence, 1), "roles": " ".join(self.roles)}

    def expected(self, rows: Tensor) -> Tensor:
        """Return the distance at which noise would put each row if it were a true one, to be held beside `residual`.

        Args:
            rows: [..., d].
        """
        if self.lost is None:
            return torch.zeros_like(rows[..., 0])
        basis, lost = self.basis.to(rows.dtype), self.lost.to(rows.dtype)
        unit = self._unit(rows)
        inside = (unit @ basis).square()
        # noise brings energy into every direction alike: what is outside tells how much
        outside = (1 - inside.sum(-1, keepdim=True)).clamp_min(0) / max(basis.shape[0] - self.rank, 1)
        return ((inside - outside).clamp_min(0) @ lost).sqrt()

    def residual(self, rows: Tensor) -> Tensor:
        """Return the distance of each unit-normed row from the span, 0 (inside) to 1 (orthogonal).

        A zero row (the padding token of some models) counts 1: it would lie inside every span and says nothing.

        Args:
            rows: [..., d]; computed in the rows' own dtype, so float32 rows have a floor near 1e-6.
        """
        basis = self.basis.to(rows.dtype)
        unit = self._unit(rows)
        distance: Tensor = torch.linalg.vector_norm(unit - (unit @ basis) @ basis.T, dim=-1)
        distance = torch.where(unit.any(-1), distance, torch.ones_like(distance))
        return distance

    def _unit(self, rows: Tensor) -> Tensor:
        scaled = rows if self.scale is None else rows * self.scale.to(rows.dtype)
        return torch.nn.functional.normalize(scaled, dim=-1)


def stack(
    seen: Observation, layer: int, roles: Sequence[str] = ("q", "k", "v")
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return the block's gradients that share an input, each scaled to unit norm, stacked to [out, d] in float64.

    Q, K and V have the same input rows. Never one alone where more were shared: a causal first token has no query
    gradient, keys lose one direction a sequence (softmax ignores a shift).

    Returns:
        The stack (None when nothing of it was seen) and the roles that are in it. All-zero gradients are left out.
    """
    parts, used = _parts(seen, layer, roles)
    return (torch.cat([g / g.norm() for g in parts]) if parts else None), used


def _parts(seen: Observation, layer: int, roles: Sequence[str]) -> tuple[list[Tensor], tuple[str, ...]]:
    parts: dict[int, Tensor] = {}
    used = []
    for role in roles:
        found = [g for g in seen.role(layer, role) if bool(g.any())]
        if found:
            # one adapter beside GPT-2's fused matrix is q's, k's and v's
            parts |= {g.data_ptr(): g.detach().double() for g in found}
            used.append(role)
    return list(parts.values()), tuple(used)


def gap_rank(values: Tensor, precision: float) -> tuple[int, float]:
    """Return the numerical rank by the widest gap of the spectrum, and that gap's ratio.

    Only cuts whose next value is at the rounding level count: a gap between two true directions is no cut. Of several
    that are clear the last one above rounding is taken: with dropout off a true direction may be a thousand times
    weaker than the rest and still forty times above rounding. With no value at that level (noise, or as many tokens
    as the width) the widest gap of all is taken, if it is a gap.

    Args:
        values: singular values, largest first, not all zero.
        precision: rounding level of what made the gradient, relative to the largest value (float32: 1.2e-7).

    Returns:
        rank, and the ratio of the values on both sides of the cut; (all, 1.0) when there is no gap.
    """
    values = values.double()
    if len(values) == 0 or float(values[0]) == 0.0:
        return 0, 1.0
    relative = (values / values[0]).clamp_min(precision * 1e-6)
    if len(values) == 1:
        return 1, 1.0
    ratio = relative[:-1] / relative[1:]
    at_rounding = relative[1:] < 32 * precision
    if bool(at_rounding.any()):
        clear = at_rounding & (ratio >= 10) & (relative[:-1] > 4 * precision)
        clear_cuts = torch.where(clear)[0]
        widest = torch.where(at_rounding, ratio, torch.zeros_like(ratio)).argmax()
        cut = int(clear_cuts[-1] if len(clear_cuts) else widest)
        return cut + 1, float(ratio[cut])
    cut = int(ratio.argmax())
    if float(ratio[cut]) < 10:
        return len(values), 1.0
    return cut + 1, float(ratio[cut])


def tolerance_rank(values: Tensor, shape: tuple[int, ...]) -> int:
    """Return the rank by DAGER's fixed rule: values above largest x size x float32 epsilon.

    Args:
        values: singular values, largest first.
        shape: of the matrix.
    """
    if len(values) == 0:
        return 0
    return int((values > float(values[0]) * max(shape) * torch.finfo(torch.float32).eps).sum())


def published_rank(seen: Observation, roles: Sequence[str]) -> int:
    """Return the one rank of all blocks that DAGER's released code takes: the largest of the first ten, to d - 20.

    Args:
        seen: the observation.
        roles: which of q, k, v it reads.
    """
    found = [0]
    for layer in range(min(_BLOCKS, seen.model.depth)):
        stacked, _ = stack(seen, layer, roles)
        if stacked is not None:
            found.append(tolerance_rank(torch.linalg.svdvals(stacked), tuple(stacked.shape)))
    return min(max(found), seen.model.width - _SPARE)


def span(
    seen: Observation,
    layer: int,
    roles: Sequence[str] = ("q", "k", "v"),
    fixed_rank: int | None = None,
    noise: bool = False,
    sure: bool = False,
) -> Span | None:
    """Return the row space of a block's attention gradients, or None when none of them were seen.

    Args:
        seen: the observation.
        layer: block.
        roles: which of q, k, v to stack; those not shared are passed over.
        fixed_rank: the rank, where it is not to be told by the spectral gap.
        noise: where no value is at the rounding level, take what stands above the noise of the others.
        sure: there is noise, whatever this block's spectrum looks like.
    """
    parts, used = _parts(seen, layer, roles)
    if not parts:
        return None
    stacked = torch.cat([g / g.norm() for g in parts])
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    if fixed_rank is not None:
        rank = min(fixed_rank, len(values))
        confidence = float(values[rank - 1] / values[rank]) if 0 < rank < len(values) else 1.0
    else:
        precision = torch.finfo(next(iter(seen.tensors.values())).dtype).eps
        rank, confidence = gap_rank(values, precision)
        # of adapters' few rows the smallest value may be the batch's; a change of weights is always rounded
        if sure or (noise and (len(values) == stacked.shape[1] or seen.kind == "delta")):
            sent = [g for role in used for g in seen.role(layer, role)]
            digits = any(few_digits(g) for g in sent)
            sure = sure or digits or any(few_values(g) for g in sent)
            if sure or float(values[-1]) >= 32 * precision * float(values[0]):
                return above_noise(parts, digits, sure, layer, used)
    return Span(vh[:rank].T.contiguous(), values, rank, confidence, layer, used)


def above_noise(parts: Sequence[Tensor], digits: bool, sure: bool, layer: int = 0, roles: tuple[str, ...] = ()) -> Span:
    """Return what of the row space of gradients that share an input stands above their noise.

    Even noise (a known sigma, integers, rounded weights) is one number once each matrix is in multiples of its own.
    Noise in proportion to the entries (few digits) is even once all rows and all columns have unit norm; scaled rows
    span the same space, and scaled columns a space that is to be compared with rows scaled alike.

    Args:
        parts: [out, d] each, float64.
        digits: noise is in proportion to the entries.
        sure: there is noise, whatever the small values look like.
        layer: block.
        roles: roles of the parts.
    """
    stacked, scale = torch.cat([part / part.norm() for part in parts]), None
    if digits:
        stacked, scale = balanced(stacked)
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    longer = max(stacked.shape)  # adapters have fewer rows than columns
    rank, ratio = clear_cut(values, longer)
    if ratio >= CLEAR:
        sigma = noise_of(values, rank, longer)
    else:
        if not digits:
            _, values, vh = torch.linalg.svd(whitened(parts, sure), full_matrices=False)
        rank, sigma = noise_rank(values, longer, sure)
    lost = lost_share(values[:rank] / sigma, *stacked.shape) if sigma > 0 else None
    confidence = float(values[rank - 1] / values[rank]) if 0 < rank < len(values) else 1.0
    return Span(vh[:rank].T.contiguous(), values, rank, confidence, layer, roles, lost, scale)


def cut_by_gap(residuals: Tensor, low: float, high: float) -> float:
    """Return the threshold in the widest logarithmic gap of the residuals between `low` and `high`.

    Residuals of true rows sit at rounding level times the conditioning of the span, those of wrong rows near the
    distance of unrelated vectors; the gap between the two moves with the batch, which is why no fixed tolerance works.

    Args:
        residuals: [n] residuals of candidates, true and wrong mixed; there may be none of either.
        low: no threshold below this (rounding).
        high: no threshold above this (a wrong row could pass).
    """
    inside = residuals[(residuals > low) & (residuals < high)].double().sort().values
    edges = torch.cat([inside.new_tensor([low]), inside, inside.new_tensor([high])]).log()
    widest = int((edges[1:] - edges[:-1]).argmax())
    return float(((edges[widest] + edges[widest + 1]) / 2).exp())


def below_wrong(residuals: Tensor, most: int) -> float:
    """Return a threshold somewhat below the residuals of wrong rows, which most of the candidates are.

    Args:
        residuals: [n] residuals of candidates.
        most: true rows there can be.
    """
    return _WRONG * float(residuals.kthvalue(min(2 * most + 1, len(residuals))).values)


def cut_above_noise(residuals: Tensor, expected: Tensor, most: int, low: float) -> float:
    """Return a threshold between true rows, which noise puts off the span, and the wrong ones.

    Most candidates are wrong, so they tell themselves where wrong ones begin; what noise makes of the nearest tells
    where true ones may end. The threshold is in the widest gap between the two.

    Args:
        residuals: [n] residuals of candidates.
        expected: [n] what noise alone would make them (`Span.expected`).
        most: true rows there can be.
        low: no threshold below this (rounding).
    """
    true = float(expected[residuals.argsort()[:most]].median())
    high = below_wrong(residuals, most)
    if not low < high:
        return low
    return cut_by_gap(residuals, min(max(low, _TRUE * true), high / 2), high)
