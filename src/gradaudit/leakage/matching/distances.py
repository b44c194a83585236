"""Distances between a predicted and an observed update: sums over tensors, each a function of a few sums over one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """What a distance needs to know of tensors of one size; q is p - o, or p where the distance is no difference.

    Args:
        absolute: [N, k] sum of |q| for each candidate and tensor; zeros where no L1 term is asked for.
        square: [N, k] sum of q^2.
        along: [N, k] sum of q o.
        observed: [k] sum of o^2.
        of: q is every so many-th row of a whole tensor, for which the distance is estimated.
    """

    absolute: Tensor
    square: Tensor
    along: Tensor
    observed: Tensor
    of: int


@dataclass(frozen=True)
class Slope:
    """A distance's derivative by p: sign * sign(q) + own * q + observed * o, each factor [N, k] or a number."""

    sign: Tensor | float = 0.0
    own: Tensor | float = 0.0
    observed: Tensor | float = 0.0


class Distance(ABC):
    """A distance between predicted and observed updates that is a sum over tensors.

    It is a function of a few sums over a tensor, so that a tensor is measured block by block while it is in the
    processor's cache, and never written.
    """

    differs: ClassVar[bool] = True
    """True when only p - o matters."""
    streams: ClassVar[bool] = True
    """True when the derivative is of `Slope`'s form; otherwise whole tensors go through `each`."""
    inner_products: ClassVar[bool] = False
    """True when all it needs are the inner products of p and o: a matrix is then not made at all."""
    along: ClassVar[bool] = True
    """True when, where it is no difference, the derivative has a part along o."""
    l1: float
    """Weight of the L1 term, 0 for none."""

    def rough(self) -> Distance | None:
        """Return what ranks guesses much as this distance does and needs inner products only; None for nothing."""
        return None

    @abstractmethod
    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        """Return the distance [N, k] of each tensor from its sums, and its derivative."""

    def known(self) -> tuple[float, float] | None:
        """Return the factors of sign(q) and q where they need no sums: a block is then pushed back once, not twice."""
        return None

    def seen(self, q: Tensor, o: Tensor) -> Tensor:
        """Return q with what says nothing put to zero; may write into q."""
        return q

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return the distance [N] of k tensors of one size for each candidate, and its derivative when asked for.

        Args:
            p: [N, k, w] predicted, or predicted - observed where `differs`; may be overwritten.
            o: [k, w] observed.
            slope: whether the derivative by p, [N, k, w], is wanted.
            of: as `Sums` has it.
        """
        q = self.seen(p, o)
        value, how = self.combine(sums_of(q, o, self, of))
        if not slope:
            return value.sum(1), None
        total = torch.zeros_like(q)
        for factor, part in ((how.sign, q.sign()), (how.own, q), (how.observed, o)):
            if isinstance(factor, Tensor):
                total += factor[..., None] * part
            elif factor:
                total += factor * part
        return value.sum(1), total

    def share(self, count: int) -> float:
        """Return the weight of one of `count` tensors."""
        return 1.0


def sums_of(q: Tensor, o: Tensor, distance: Distance, of: int = 1, spare: bool = False) -> Sums:
    """Return the sums over [N, k, w] tensors that a distance asks for; with `spare`, q may be overwritten."""
    nothing = q.new_zeros(q.shape[:2])
    square = torch.linalg.vector_norm(q, dim=-1).square()
    along = nothing if distance.differs else torch.linalg.vecdot(q, o)
    observed = nothing[0] if distance.differs else torch.linalg.vecdot(o, o)
    if not distance.l1:
        return Sums(nothing, square, along, observed, of)
    # four times faster than a norm of order 1 (torch 2.13, CPU)
    return Sums((q.abs_() if spare else q.abs()).sum(-1), square, along, observed, of)


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Sum over tensors of ||g - g*||_2^2 + l1 ||g - g*||_1 (DLG: l1 = 0; TAG: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.0

    def rough(self) -> Distance | None:
        return SquaredL2()

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        return sums.of * (sums.square + self.l1 * sums.absolute), Slope(sign=self.l1, own=2.0)

    def known(self) -> tuple[float, float] | None:
        return self.l1, 2.0


@dataclass(frozen=True)
class L2(Distance):
    """Sum over tensors of ||g - g*||_2 + l1 ||g - g*||_1, the first not squared (Grab: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.01

    def rough(self) -> Distance:
        return L2(0.0)

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        norm = sums.square.sqrt()
        value = math.sqrt(sums.of) * norm + sums.of * self.l1 * sums.absolute
        # at the truth itself the derivative is taken as 0
        own = torch.where(norm > 0, 1 / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
        return value, Slope(sign=self.l1, own=own)


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 - cos(g, g*) (LAMP, partial gradients).

    A tensor that is zero on either side counts 1 and has slope 0. The gradient of a key's bias is zero in exact
    arithmetic (softmax does not see a shift) and 1e-8 of the others' in float32; its cosine is that of two roundings,
    and as a cosine's slope goes with 1 / norm, it makes a tenth to a third of the whole slope near the truth.

    Args:
        silent: a tensor smaller than this share of the largest of those measured together counts as zero.
    """

    silent: float = 1e-6

    differs: ClassVar[bool] = False
    inner_products: ClassVar[bool] = True
    l1: ClassVar[float] = 0.0  # type: ignore[misc]

    def rough(self) -> Distance:
        return self

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        tiny = torch.finfo(sums.square.dtype).tiny
        least = [(self.silent**2 * s.amax(-1, keepdim=True)).clamp_min(tiny) for s in (sums.square, sums.observed)]
        heard = (sums.square > least[0]) & (sums.observed > least[1])
        square = sums.square.clamp_min(tiny)
        norms = square.sqrt() * sums.observed.clamp_min(tiny).sqrt()
        cosine = torch.where(heard, sums.along / norms, 0.0)
        return 1 - cosine, Slope(
            own=torch.where(heard, cosine / square, 0.0), observed=torch.where(heard, -1 / norms, 0.0)
        )

    def share(self, count: int) -> float:
        return 1.0 / count


@dataclass(frozen=True)
class OnSupport(Distance):
    """The inner distance on the coordinates that were sent: the others were pruned and say nothing.

    Grab's counter to pruning (section 5.5).

    Args:
        inner: what is measured there.
    """

    inner: Distance

    def __post_init__(self) -> None:
        if not self.inner.streams:
            raise ValueError("what was pruned has to be left out before norms are taken: Normalized(OnSupport(...))")
        object.__setattr__(self, "differs", self.inner.differs)
        object.__setattr__(self, "l1", self.inner.l1)

    def seen(self, q: Tensor, o: Tensor) -> Tensor:
        return q.mul_(o != 0)

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        return self.inner.combine(sums)

    def share(self, count: int) -> float:
        return self.inner.share(count)


@dataclass(frozen=True)
class WrongSigns(SquaredL2):
    """Hinge on the coordinates whose sign is wrong: sum of p^2 + l1 |p| where p o < 0 (LTI's baselines under signs).

    Signs that are 0 ask for nothing. It is zero for a gradient of zeros too: a weak measure, and the published one.

    Args:
        l1: weight of the plain hinge beside the squared one.
    """

    differs: ClassVar[bool] = False
    along: ClassVar[bool] = False

    def rough(self) -> None:
        return None

    def seen(self, q: Tensor, o: Tensor) -> Tensor:
        return q.mul_(q * o < 0)


@dataclass(frozen=True)
class Normalized(Distance):
    """The inner distance of each predicted tensor scaled to unit norm, as a client does that adds noise after that.

    Grab's counter to its noise (section 5.4). A tensor whose gradient is zero but for rounding (see `Cosine`) was
    scaled to a unit of nothing by the client, and is not compared.

    Args:
        inner: what is measured then.
        silent: a predicted tensor smaller than this share of the largest of those measured together counts as zero.
    """

    inner: Distance
    silent: float = 1e-6

    differs: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    l1: ClassVar[float] = 0.0  # type: ignore[misc]

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        raise NotImplementedError("the norm has to be known before anything is measured")

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        norm = torch.linalg.vector_norm(p, dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny) * math.sqrt(of)
        heard = norm > self.silent * norm.amax(1, keepdim=True)
        unit = p / norm
        value, outer = self.inner.each((unit - o if self.inner.differs else unit) * heard, o, slope, of)
        if outer is None:
            return value, None
        outer = outer * heard
        along = (outer * unit).sum(-1, keepdim=True)
        return value, (outer - along * unit) / norm

    def share(self, count: int) -> float:
        return self.inner.share(count)
