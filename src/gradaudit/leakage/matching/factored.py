"""Distances of gradients that are known by their factors, measured without ever writing a matrix of the model's size.

A linear layer's gradient is a sum of outer products of rows it read and of slopes at rows it wrote. It is made block by
block, measured while it is in the processor's cache, and pushed back into its factors at once. Where a distance asks
for inner products only (cosine), no entry of it is made at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.matching.distances import Distance, Sums, sums_of

_BLOCK = 160_000
"""Gradient values measured at a time on a CPU: what is made of them stays in a core's cache."""
_BLOCK_CUDA = 32_000_000
"""The same on a GPU, where few large launches pay."""
_LINES = 48
"""Rows of a matrix that are worth a call: with more candidates than fit so, some wait."""
_Parts = dict[str, tuple[Tensor, Tensor]]
"""By part of `Slope` ("all" where it is known beforehand): what it brings to the slopes and to the rows read."""


@dataclass(frozen=True)
class Observed:
    """What gradients of one size are compared with.

    Args:
        values: [out, in] of a matrix, or [k, w] of k vectors.
        offset: what a predicted gradient gets added before it is measured; None for nothing.
        energy: sum of squares of `values`.
    """

    values: Tensor
    offset: Tensor | None
    energy: Tensor
    _thinner: dict[int, Observed] = field(default_factory=dict, init=False, repr=False, compare=False)

    def thinned(self, every: int) -> Observed:
        """Return a matrix's every so many-th row; kept, since many candidates are compared with them."""
        if every == 1:
            return self
        if every not in self._thinner:
            rows = self.values[::every].contiguous()
            offset = None if self.offset is None else self.offset[::every].contiguous()
            self._thinner[every] = Observed(rows, offset, rows.square().sum())
        return self._thinner[every]


@dataclass(frozen=True)
class Product:
    """One matrix by its factors.

    Args:
        slope: [N, K, out].
        read: [N, K, in].
        observed: what it is compared with.
    """

    slope: Tensor
    read: Tensor
    observed: Observed


def gradient(how: str, slope: Tensor, read: Tensor, like: torch.Size) -> Tensor:
    """Return the gradients [N, *like] that factors make.

    Args:
        how: of the tap.
        slope: [N, K, out] slopes at rows that were written.
        read: [N, K, in] rows read, [N, K] ids of a lookup, -1 for none; anything for a shift.
        like: the gradient's shape.
    """
    if how == "shift":
        return slope.sum(1)
    if how == "scale":
        return (slope * read).sum(1)
    if how == "lookup":
        found = slope.new_zeros(len(slope), *like)
        met = read[..., None].expand_as(slope)
        return found.scatter_add(1, met.clamp_min(0), torch.where(met < 0, 0.0, slope))
    return slope.mT @ read


def of_whole(predicted: Tensor, observed: Observed, distance: Distance, of: int = 1) -> Tensor:
    """Return the distance [N] of tensors of one size, [N, k, w], summed over them."""
    shown = predicted if observed.offset is None else predicted + observed.offset
    value: Tensor = _Whole.apply(shown, observed.values, distance, of)  # type: ignore[no-untyped-call]
    return value


def of_products(matrices: Sequence[Product], distance: Distance, of: int = 1) -> Tensor:
    """Return the distance [N] of matrices that are sums of outer products, summed over them.

    Args:
        matrices: their factors, and what they are compared with (every `of`-th row of it).
        distance: what to measure.
        of: as `Sums` has it.
    """
    if not distance.streams:
        found = []
        for m in matrices:
            flat = None if m.observed.offset is None else m.observed.offset.reshape(1, -1)
            target = Observed(m.observed.values.reshape(1, -1), flat, m.observed.energy)
            found.append(of_whole(torch.bmm(m.slope.mT, m.read).flatten(1)[:, None], target, distance, of))
        return _total(found)
    targets = [m.observed for m in matrices]
    factors = [*(m.slope for m in matrices), *(m.read for m in matrices)]
    value: Tensor = _FactoredProducts.apply(targets, distance, of, *factors)  # type: ignore[no-untyped-call]
    return value


@torch.no_grad()
def rank_of_products(matrices: Sequence[Product], distance: Distance, of: int = 1) -> Tensor:
    """Return the distance [N] of matrices by inner products of their factors alone: fast, and rounded.

    A small difference of large gradients comes out with the rounding of the large ones: good for a ranking, whose best
    are then measured entry by entry.

    Args:
        matrices: as `of_products` has them.
        distance: one without an L1 term.
        of: as `Sums` has it.
    """
    sums = [_by_inner_products(m.slope, m.read, m.observed, distance, of, False)[0] for m in matrices]
    return distance.combine(_beside(sums))[0].sum(1)


class _Whole(torch.autograd.Function):
    """The distance of tensors that are at hand; its derivative is found beside it."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, observed: Tensor, distance: Distance, of: int) -> Tensor:
        value, ctx.slope = distance.each(predicted.clone(), observed, ctx.needs_input_grad[0], of)
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slope * outer[:, None, None], None, None, None


class _FactoredProducts(torch.autograd.Function):
    """The distance of matrices by their factors.

    The derivative is carried back to the factors in the forward pass already, while each matrix is at hand; what it
    needs of the sums over a whole matrix is put in at the end, for all matrices at once.
    """

    @staticmethod
    def forward(ctx: Any, targets: Sequence[Observed], distance: Distance, of: int, *factors: Tensor) -> Tensor:
        count = len(targets)
        wanted = any(ctx.needs_input_grad)
        sums: list[Sums] = []
        parts: list[_Parts] = []
        for slope, read, observed in zip(factors[:count], factors[count:], targets, strict=True):
            by = _by_inner_products if distance.inner_products and observed.offset is None else _by_blocks
            found, pulled = by(slope, read, observed, distance, of, wanted)
            sums.append(found)
            parts.append(pulled)
        value, how = distance.combine(_beside(sums))
        ctx.back = []
        if wanted:
            slopes = {"sign": how.sign, "own": how.own, "observed": how.observed, "all": 1.0}
            columns = {k: v.unbind(1) if isinstance(v, Tensor) else [v] * count for k, v in slopes.items()}
            for side in (0, 1):
                for index, part in enumerate(parts):
                    ctx.back.append(_weighted_sum([(columns[kind][index], both[side]) for kind, both in part.items()]))
        return value.sum(1)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scale, needed = outer[:, None, None], ctx.needs_input_grad[3:]
        return None, None, None, *(b * scale if n else None for b, n in zip(ctx.back, needed, strict=True))


def _by_inner_products(
    slope: Tensor, read: Tensor, observed: Observed, distance: Distance, of: int, wanted: bool
) -> tuple[Sums, _Parts]:
    """Measure outer products by inner products of their factors with one another and with what they are compared with.

    As `_by_blocks`; a derivative is given only where nothing is added to the products before they are measured.
    """
    values, offset = observed.values, observed.offset
    slopes, reads = torch.bmm(slope, slope.mT), torch.bmm(read, read.mT)
    square = (slopes * reads).sum((1, 2))
    across = None if distance.differs else read @ values.T  # [N, K, out]
    along = torch.zeros_like(square) if across is None else (slope * across).sum((1, 2))
    if offset is not None:
        square = square + 2 * (slope * (read @ offset.T)).sum((1, 2)) + offset.square().sum()
        along = along if across is None else along + (offset * values).sum()
    nothing = torch.zeros_like(square)[:, None]
    sums = Sums(nothing, square.clamp_min(0)[:, None], along[:, None], observed.energy[None], of)
    if not wanted or across is None:
        return sums, {}
    return sums, {"own": (torch.bmm(reads, slope), torch.bmm(slopes, read)), "observed": (across, slope @ values)}


def _by_blocks(
    slope: Tensor, read: Tensor, observed: Observed, distance: Distance, of: int, wanted: bool
) -> tuple[Sums, _Parts]:
    """Measure outer products [N, out, in] block by block; nothing of that size is kept.

    Args:
        slope: [N, K, out].
        read: [N, K, in].
        observed: [out, in].
        distance: what to measure.
        of: as `Sums` has it.
        wanted: whether the derivative by the factors is.

    Returns:
        The sums of each candidate, and by part of `Slope` what it brings to `slope` and `read`.
    """
    target, offset = observed.values, observed.offset
    deep, wide = target.shape
    most = _BLOCK_CUDA if slope.is_cuda else _BLOCK
    some = max(1, most // (min(deep, _LINES) * wide))
    lines = max(1, most // (wide * min(some, len(slope))))
    known = distance.known()
    all_sums: list[Sums] = []
    all_parts: list[_Parts] = []
    for at in range(0, len(slope), some):
        d, x = slope[at : at + some], read[at : at + some]
        sums: list[Sums] = []
        parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        for line in range(0, deep, lines):
            here, o = d[..., line : line + lines], target[line : line + lines]
            q = torch.bmm(here.mT, x)
            if offset is not None:
                q += offset[line : line + lines]
            q = distance.seen(q, o)
            sums.append(sums_of(q.flatten(1)[:, None], o.reshape(1, -1), distance, of, spare=not wanted))
            if not wanted:
                continue
            if known is not None:
                sign = q.sign() if known[0] else None
                q *= known[1]
                kinds = [("all", q if sign is None else q.add_(sign, alpha=known[0]))]
            else:
                kinds = [("own", q), *([("sign", q.sign())] if distance.l1 else [])]
            kinds += [] if distance.differs or not distance.along else [("observed", o.expand(len(d), *o.shape))]
            for name, s in kinds:
                by_slope, by_read = parts.setdefault(name, ([], []))
                by_slope.append(torch.bmm(x, s.mT))
                by_read.append(torch.bmm(here, s))
        all_sums.append(_put_together(sums, _total, _total([s.observed for s in sums])))
        all_parts.append({name: (_joined(a, -1), _total(b)) for name, (a, b) in parts.items()})
    joined = {k: (_joined([p[k][0] for p in all_parts]), _joined([p[k][1] for p in all_parts])) for k in all_parts[0]}
    return _put_together(all_sums, _joined, all_sums[0].observed), joined


def _beside(sums: Sequence[Sums]) -> Sums:
    """Return the sums of several matrices for the same candidates."""
    return _put_together(sums, partial(torch.cat, dim=1), torch.cat([s.observed for s in sums]))


def _put_together(sums: Sequence[Sums], join: Callable[[list[Tensor]], Tensor], observed: Tensor) -> Sums:
    """Return the sums over blocks, candidates or matrices as one, joined in the way that these want."""
    absolute, square, along = (join([getattr(s, name) for s in sums]) for name in ("absolute", "square", "along"))
    return Sums(absolute, square, along, observed, sums[0].of)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(operator.add, parts)


def _weighted_sum(parts: Sequence[tuple[Tensor | float, Tensor]]) -> Tensor:
    """Return the sum of [N, ...] tensors times their [N] factors."""
    return _total([(f.view(-1, 1, 1) if isinstance(f, Tensor) else f) * part for f, part in parts])


def _joined(parts: Sequence[Tensor], along: int = 0) -> Tensor:
    return torch.cat(list(parts), along) if len(parts) > 1 else parts[0]
