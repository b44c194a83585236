"""Gradient matching: distances between updates, and how far the update of a guess lies from the one that was seen.

Everything is batched over candidates: a guess is [N, B, T, d] and an objective returns [N], so that restarts,
permutations and beams are evaluated together. A predicted gradient is made matrix by matrix out of its factors
(`models.taps`), measured, and pushed back into them at once: nothing of the model's size stays in a graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.masks import Masks
from gradaudit.models.base import View
from gradaudit.models.taps import Tap, Traced
from gradaudit.types import Observation

STEP, CANDIDATE = 1.5, 0.25
"""What a step of the continuous search and a candidate of the discrete one cost, in gradients of a client (MiniLM)."""
_BLOCK = 160_000
"""Gradient values measured at a time: what is made of them stays in a core's cache."""


@dataclass(frozen=True)
class Sums:
    """What a distance needs to know of one tensor, for each candidate; q is p - o, or p where the distance is no
    difference.

    Args:
        absolute: [N] sum of |q|; zeros where no L1 term is asked for.
        square: [N] sum of q^2.
        along: [N] sum of q o.
        observed: [] sum of o^2.
        of: q is every so many-th row of a whole tensor, for which the distance is estimated.
    """

    absolute: Tensor
    square: Tensor
    along: Tensor
    observed: Tensor
    of: int


@dataclass(frozen=True)
class Slope:
    """A distance's derivative by p: sign * sign(q) + own * q + observed * o, each factor [N] or a number."""

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
    l1: float
    """Weight of the L1 term, 0 for none."""

    @abstractmethod
    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        """Return one tensor's distance [N] from its sums, and its derivative."""

    def known(self) -> tuple[float, float] | None:
        """Return the factors of sign(q) and q where they need no sums: a block is then pushed back once, not twice."""
        return None

    def seen(self, q: Tensor, o: Tensor) -> Tensor:
        """Return q with what says nothing put to zero; may write into q."""
        return q

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return one tensor's distance for each candidate, and its derivative by p when asked for.

        Args:
            p: [N, ...] predicted, or predicted - observed where `differs`; may be overwritten.
            o: [...] observed.
            slope: whether the derivative, [N, ...], is wanted.
            of: as `Sums` has it.
        """
        q = self.seen(p, o)
        value, how = self.combine(sums_of(q, o, self, of))
        if not slope:
            return value, None
        shape = (-1, *[1] * (q.dim() - 1))
        total = torch.zeros_like(q)
        for factor, part in ((how.sign, q.sign()), (how.own, q), (how.observed, o)):
            if isinstance(factor, Tensor):
                total += factor.view(shape) * part
            elif factor:
                total += factor * part
        return value, total

    def share(self, count: int) -> float:
        """Return the weight of one of `count` tensors."""
        return 1.0

    def measure(self, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
        """Return the distance [N] of whole updates, tensor by tensor."""
        total = torch.zeros(len(predicted[0]), device=predicted[0].device, dtype=predicted[0].dtype)
        for p, o in zip(predicted, observed, strict=True):
            total = total + self.each(p - o if self.differs else p.clone(), o, False)[0]
        return total * self.share(len(predicted))


def sums_of(q: Tensor, o: Tensor, distance: Distance, of: int = 1) -> Sums:
    """Return the sums over one tensor that a distance asks for."""
    flat = q.flatten(1)
    nothing = flat.new_zeros(len(flat))
    return Sums(
        # four times faster than a norm of order 1, and twice than a dot product (torch 2.13, CPU)
        absolute=flat.abs().sum(1) if distance.l1 else nothing,
        square=torch.linalg.vector_norm(flat, dim=1).square(),
        along=nothing if distance.differs else flat @ o.flatten(),
        observed=torch.linalg.vecdot(o.flatten(), o.flatten()) if not distance.differs else nothing[0],
        of=of,
    )


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Sum over tensors of ||g - g*||_2^2 + l1 ||g - g*||_1 (DLG: l1 = 0; TAG: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.0

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

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        norm = sums.square.sqrt()
        value = math.sqrt(sums.of) * norm + sums.of * self.l1 * sums.absolute
        # at the truth itself the derivative is taken as 0
        own = torch.where(norm > 0, 1 / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
        return value, Slope(sign=self.l1, own=own)


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 - cos(g, g*) (LAMP, partial gradients).

    A tensor that is zero on either side counts 1 and has slope 0.
    """

    differs: ClassVar[bool] = False
    l1: ClassVar[float] = 0.0  # type: ignore[misc]

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        tiny = torch.finfo(sums.square.dtype).tiny
        heard = (sums.square > tiny) & (sums.observed > tiny)
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
class Normalized(Distance):
    """The inner distance of each predicted tensor scaled to unit norm, as a client does that adds noise after that.

    Grab's counter to its noise (section 5.4).

    Args:
        inner: what is measured then.
    """

    inner: Distance
    differs: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    l1: ClassVar[float] = 0.0  # type: ignore[misc]

    def combine(self, sums: Sums) -> tuple[Tensor, Slope]:
        raise NotImplementedError("the norm has to be known before anything is measured")

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        norm = torch.linalg.vector_norm(p.flatten(1), dim=1).clamp_min(torch.finfo(p.dtype).tiny)
        norm = norm.view(-1, *[1] * (p.dim() - 1)) * math.sqrt(of)
        unit = p / norm
        value, outer = self.inner.each(unit - o if self.inner.differs else unit.clone(), o, slope, of)
        if outer is None:
            return value, None
        along = (outer * unit).flatten(1).sum(1).view_as(norm)
        return value, (outer - along * unit) / norm

    def share(self, count: int) -> float:
        return self.inner.share(count)


@dataclass(frozen=True)
class _Place:
    """Where a view's gradient is found.

    Args:
        parameter: whose tap.
        rows: which columns of what was written.
        observed: [out, in] or the tensor's own shape.
        offset: what a predicted gradient gets added before it is measured.
        matrix: whether it is made of outer products.
    """

    parameter: str
    rows: tuple[int, int] | None
    observed: Tensor
    offset: Tensor | None
    matrix: bool


class Objective:
    """How far the update of a guess lies from the observed one, over the views that were seen.

    Left out, with their names in `left_out`: the word table's own gradient (a guess made of word vectors never looks
    anything up in it; tied, it is left out whole) and tables that all sentences share by position (MPNet's attention
    bias), whose gradient is no sum over sentences.

    Args:
        seen: the observation.
        distance: what to measure.

    Raises:
        NotSupportedError: nothing is left to match, or a weight change that cannot be read as a gradient.
    """

    def __init__(self, seen: Observation, distance: Distance) -> None:
        self.model, self.distance = seen.model, distance
        self._causal = seen.model.spec.task == "causal-lm"
        self._rate = seen.knowledge.dropout or None
        hidden = word_gradient_hidden(seen)
        self._views: dict[str, View] = {n: v for n, v in seen.views.items() if n not in hidden}
        gradients = as_gradient(seen)
        self._observed = {name: gradients[name] for name in self._views}
        self.watched = tuple(dict.fromkeys(v.parameter for v in self._views.values()))
        taps = self._probe()
        self._places = {}
        for name, view in self._views.items():
            if view.parameter in taps:
                how = taps[view.parameter][0].how
                seen_here = _oriented(view, how, self._observed[name])
                offset = -seen_here if distance.differs else None
                matrix = how in ("matrix", "transposed")
                self._places[name] = _Place(view.parameter, view.rows, seen_here, offset, matrix)
        self.left_out = tuple(n for n in seen.views if n not in self._places)
        if not self._places:
            raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")

    @property
    def tensors(self) -> int:
        """How many tensors are matched."""
        return len(self._places)

    def __call__(
        self,
        embeddings: Tensor,
        mask: Tensor,
        labels: Tensor,
        masks: Masks | None = None,
        base: Base | None = None,
        thin: int = 1,
    ) -> Tensor:
        """Return the distance of each candidate, [N]; differentiable by all that has a gradient.

        Args:
            embeddings: [N, B, T, d] word vectors.
            mask: [B, T] or [N, B, T] bool.
            labels: [N, B, ...] labels or distributions, as `TextModel.loss` takes them.
            masks: dropout masks in force; None is without dropout.
            base: what the sentences not given here add to the update; None when all are given.
            thin: estimate from every so many-th output of each matrix; only without a graph.
        """
        learning = torch.is_grad_enabled()
        if learning and thin > 1:
            raise ValueError("an estimate has no slope: use thin under torch.no_grad")
        with torch.enable_grad():
            traced = self._trace(embeddings, mask, labels, masks)
            total = self._weighted(traced.losses, embeddings, mask, base)
            factors = self._factors(traced, total, learning)
        found = torch.zeros(len(embeddings), device=embeddings.device, dtype=embeddings.dtype)
        for name, place in self._places.items():
            how, slope, read = factors[place.parameter]
            slope = slope if place.rows is None else slope[..., place.rows[0] : place.rows[1]]
            offset, observed = place.offset if base is None else base.offsets[name], place.observed
            every = thin if place.matrix else 1
            if every > 1:
                slope, observed = slope[..., ::every], observed[::every]
                offset = None if offset is None else offset[::every]
            found = found + _term(slope, read, how, len(embeddings), observed, offset, self.distance, every)
        return found * self.distance.share(len(self._places))

    @torch.no_grad()
    def base(self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None, size: int) -> Base:
        """Return what some sentences add to a batch's update.

        Args:
            embeddings: [B', T, d] of the sentences, as many as `masks` holds.
            mask: [B', T].
            labels: [B', ...].
            masks: their dropout masks.
            size: sentences (classification) or predicted tokens (causal-lm) of the whole batch.
        """
        sums = self._sums(embeddings, mask, labels, masks, size)
        own = {name: place.offset for name, place in self._places.items()}
        offsets = {name: g if (o := own[name]) is None else g + o for name, g in sums.items()}
        return Base(offsets, size)

    def _sums(
        self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None, size: int
    ) -> dict[str, Tensor]:
        whole = Base({}, size)
        with torch.enable_grad():
            traced = self._trace(embeddings[None], mask, labels[None], masks)
            factors = self._factors(traced, self._weighted(traced.losses, embeddings[None], mask, whole), False)
        found = {}
        for name, place in self._places.items():
            how, slope, read = factors[place.parameter]
            slope = slope if place.rows is None else slope[..., place.rows[0] : place.rows[1]]
            found[name] = _gradient(how, _by_candidate(slope, 1), read, 1, place.observed)[0]
        return found

    @staticmethod
    def _factors(traced: Traced, total: Tensor, learning: bool) -> dict[str, tuple[str, Tensor, Tensor]]:
        """Return each watched parameter's kind, slopes at what was written and rows read, over all of its uses."""
        uses = [(name, tap) for name, taps in traced.taps.items() for tap in taps]
        slopes = torch.autograd.grad(total, [tap.written for _, tap in uses], create_graph=learning, allow_unused=True)
        found: dict[str, list[tuple[Tap, Tensor | None]]] = {}
        for (name, tap), slope in zip(uses, slopes, strict=True):
            found.setdefault(name, []).append((tap, slope))
        out: dict[str, tuple[str, Tensor, Tensor]] = {}
        for name, mine in found.items():
            taps = traced.taps[name]
            # a use that the loss does not reach adds nothing (BERT runs its pooler twice)
            reached = [(t, s) for t, s in mine if s is not None] or [(taps[-1], torch.zeros_like(taps[-1].written))]
            read = torch.cat([t.read for t, _ in reached], 1) if len(reached) > 1 else reached[0][0].read
            parts = [s.reshape(len(s), -1, s.shape[-1]) for _, s in reached]
            slope = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            out[name] = (taps[0].how, slope, read if learning else read.detach())
        return out

    def predicted(self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None = None) -> list[Tensor]:
        """Return the whole predicted update of each candidate, one [N, ...] tensor a matched view; for small models."""
        tokens = int(mask[..., 1:].sum()) if self._causal else mask.shape[-2]
        each = [
            self._sums(e, mask if mask.dim() == 2 else mask[n], labels[n], masks, tokens)
            for n, e in enumerate(embeddings)
        ]
        return [torch.stack([one[name] for one in each]) for name in self._places]

    def observed(self) -> list[Tensor]:
        """Return the observed values of each matched view."""
        return [place.observed for place in self._places.values()]

    def names(self) -> list[str]:
        """Return the names of the matched views."""
        return list(self._places)

    def _trace(self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None) -> Traced:
        count = len(embeddings)
        flat = embeddings.flatten(0, 1)
        every = mask.expand(count, *mask.shape).flatten(0, 1) if mask.dim() == 2 else mask.flatten(0, 1)
        return self.model.traced(
            embeddings=flat,
            mask=every,
            labels=labels.flatten(0, 1),
            watch=self.watched,
            dropout=None if masks is None else masks.at(count),
            rate=self._rate,
        )

    def _weighted(self, losses: Tensor, embeddings: Tensor, mask: Tensor, base: Base | None) -> Tensor:
        """Return the sum over candidates of the batch's loss (its part that the given sentences are)."""
        if base is not None:
            return losses.sum() / base.size
        if not self._causal:
            return losses.sum() / embeddings.shape[1]
        tokens = mask[..., 1:].sum((-1, -2)).to(losses)  # [] or [N]
        return (losses.view(len(embeddings), -1).sum(1) / tokens).sum()

    def _probe(self) -> dict[str, list[Tap]]:
        """Return the taps of a made-up guess, to know which parameters have any."""
        model = self.model
        with torch.enable_grad():
            vectors = model.word_vectors()[:3][None].repeat(2, 1, 1)
            mask = torch.ones(2, 3, dtype=torch.bool, device=vectors.device)
            labels = torch.zeros((2, 3) if self._causal else 2, dtype=torch.long, device=vectors.device)
            return model.traced(embeddings=vectors, mask=mask, labels=labels, watch=self.watched).taps


@dataclass(frozen=True)
class Base:
    """What other sentences add to a batch's update.

    Args:
        offsets: by view, the observed values taken off where the distance is one of differences.
        size: sentences, or predicted tokens, of the whole batch.
    """

    offsets: dict[str, Tensor]
    size: int


def _oriented(view: View, how: str, observed: Tensor) -> Tensor:
    """Return an observed tensor as [out, in], the orientation that factors are multiplied in."""
    whole = view.name == view.parameter
    return observed.T.contiguous() if how == "transposed" and whole else observed.contiguous()


def _by_candidate(rows: Tensor, count: int) -> Tensor:
    """Return [N B, T, k] rows as [N, B T, k]."""
    return rows.reshape(count, -1, rows.shape[-1])


def _gradient(how: str, slope: Tensor, read: Tensor, count: int, like: Tensor) -> Tensor:
    """Return the gradients [N, ...] that factors make.

    Args:
        how: of the tap.
        slope: [N, K, out].
        read: as the tap has it.
        count: N.
        like: a tensor of the gradient's shape.
    """
    if how == "shift":
        return slope.sum(1)
    if how == "scale":
        return (slope * _by_candidate(read, count)).sum(1)
    if how == "lookup":
        found = slope.new_zeros(count, *like.shape)
        rows = read.reshape(count, -1, 1).expand(-1, -1, slope.shape[-1])
        return found.scatter_add_(1, rows, slope)
    return slope.mT @ _by_candidate(read, count)


def _term(
    slope: Tensor,
    read: Tensor,
    how: str,
    count: int,
    observed: Tensor,
    offset: Tensor | None,
    distance: Distance,
    of: int,
) -> Tensor:
    """Return one tensor's distance for each candidate; see `_Term`."""
    value: Tensor = _Term.apply(slope, read, how, count, observed, offset, distance, of)  # type: ignore[no-untyped-call]
    return value


def _weighted(back: Tensor, outer: Tensor) -> Tensor:
    """Return [N ...] slopes times the slope [N] of their candidate."""
    return (back.reshape(len(outer), -1) * outer[:, None]).reshape(back.shape)


def _pulled(how: str, slope: Tensor, read: Tensor, s: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a derivative [N, ...] by the gradient is by its factors, [N, K, out] and [N, K, in]."""
    if how == "shift":
        return s[:, None].expand_as(slope), None
    if how == "scale":
        return read * s[:, None], slope * s[:, None]
    if how == "lookup":
        return s.gather(1, read.reshape(len(slope), -1, 1).expand(-1, -1, slope.shape[-1])), None
    return read @ s.mT, slope @ s


_PARTS = ("sign", "own", "observed", "all")


def _streamed(
    slope: Tensor, read: Tensor, observed: Tensor, offset: Tensor | None, distance: Distance, of: int, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Measure outer products [N, out, in] block by block; nothing of that size is kept.

    Args:
        slope: [N, K, out].
        read: [N, K, in].
        observed: [out, in].
        offset: [out, in] added before measuring.
        distance: what to measure.
        of: as `Sums` has it.
        wanted: whether the derivative by the factors is.

    Returns:
        [N] distances, and their derivatives by `slope` and `read`.
    """
    values, by_slope, by_read = [], [], []
    wide, deep = observed.shape[1], observed.shape[0]
    some = max(1, _BLOCK // observed.numel())
    lines = max(1, _BLOCK // wide)
    for at in range(0, len(slope), some):
        d, x = slope[at : at + some], read[at : at + some]
        sums: list[Sums] = []
        parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in _PARTS}
        for line in range(0, deep, lines):
            here, o = d[..., line : line + lines], observed[line : line + lines]
            q = here.mT @ x
            if offset is not None:
                q += offset[line : line + lines]
            q = distance.seen(q, o)
            sums.append(sums_of(q, o, distance, of))
            if not wanted:
                continue
            known = distance.known()
            if known is not None:
                sign = q.sign() if known[0] else None
                q *= known[1]
                kinds = [("all", q if sign is None else q.add_(sign, alpha=known[0]))]
            else:
                kinds = [("own", q), *([("sign", q.sign())] if distance.l1 else [])]
            kinds += [] if distance.differs else [("observed", o)]
            for name, s in kinds:
                parts[name][0].append(x @ s.mT)
                parts[name][1].append(here @ s)
        value, how = distance.combine(_added(sums))
        values.append(value)
        if wanted:
            factors = {"sign": how.sign, "own": how.own, "observed": how.observed, "all": 1.0}
            used = [(factors[name], lists) for name, lists in parts.items() if lists[0]]
            by_slope.append(_weighted_sum([(f, _joined(lists[0], -1)) for f, lists in used]))
            by_read.append(_weighted_sum([(f, _total(lists[1])) for f, lists in used]))
    if not wanted:
        return _joined(values), None, None
    return _joined(values), _joined(by_slope), _joined(by_read)


def _added(sums: Sequence[Sums]) -> Sums:
    if len(sums) == 1:
        return sums[0]
    return Sums(
        _total([s.absolute for s in sums]),
        _total([s.square for s in sums]),
        _total([s.along for s in sums]),
        _total([s.observed for s in sums]),
        sums[0].of,
    )


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _weighted_sum(parts: Sequence[tuple[Tensor | float, Tensor]]) -> Tensor:
    """Return the sum of [N, ...] tensors times their [N] factors."""
    return _total([(f.view(-1, 1, 1) if isinstance(f, Tensor) else f) * part for f, part in parts])


def _joined(parts: Sequence[Tensor], along: int = 0) -> Tensor:
    return torch.cat(list(parts), along) if len(parts) > 1 else parts[0]


class _Term(torch.autograd.Function):
    """One tensor's distance, by the factors of its predicted gradient.

    The derivative is carried back to the factors in the forward pass already, while the matrix is at hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slope: Tensor,
        read: Tensor,
        how: str,
        count: int,
        observed: Tensor,
        offset: Tensor | None,
        distance: Distance,
        of: int,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        rows = _by_candidate(slope, count)
        matrix = how in ("matrix", "transposed")
        part = _by_candidate(read, count) if matrix or how == "scale" else read
        if matrix and distance.streams:
            value, back_slope, back_read = _streamed(rows, part, observed, offset, distance, of, wanted)
        else:
            p = _gradient(how, rows, part, count, observed)
            value, s = distance.each(p if offset is None else p + offset, observed, wanted, of)
            back_slope, back_read = (None, None) if s is None else _pulled(how, rows, part, s)
        if wanted:
            ctx.back_slope = None if back_slope is None else back_slope.reshape(slope.shape)
            ctx.back_read = None if back_read is None else back_read.reshape(read.shape)
            ctx.count = count
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        def scaled(back: Tensor | None, needed: bool) -> Tensor | None:
            if back is None or not needed:
                return None
            return back if ctx.count == 1 and float(outer[0]) == 1.0 else _weighted(back, outer)

        needed = ctx.needs_input_grad
        return scaled(ctx.back_slope, needed[0]), scaled(ctx.back_read, needed[1]), *[None] * 6


def as_gradient(seen: Observation) -> dict[str, Tensor]:
    """Return the observed tensors as gradients: a known SGD weight change is divided by -(learning rate x steps).

    Raises:
        NotSupportedError: a weight change of AdamW or of unknown training, whose scale is not a gradient's.
    """
    if seen.kind == "gradient":
        return dict(seen.tensors)
    if any(d.get("name") == "normalized-gaussian" for d in seen.knowledge.defenses or ()):
        return {name: -value for name, value in seen.tensors.items()}  # its size was taken off by the client
    how, size = seen.knowledge.training, seen.knowledge.batch_size
    if how is None or how.optimizer != "sgd" or size is None:
        raise NotSupportedError(
            "matching reads a weight change only when it knows the batch size and that the client used SGD; "
            "this one is of AdamW or of unknown training"
        )
    return {name: value / -(how.learning_rate * how.steps(size)) for name, value in seen.tensors.items()}


def word_gradient_hidden(seen: Observation) -> list[str]:
    """Return the views that matching on word vectors cannot predict: the word table's own gradient.

    A guess made of word vectors never looks anything up in the table, so its rows have no predicted gradient. The
    published harnesses leave them out as well. Where the table is tied to the output, it is left out whole.
    """
    word = set(seen.model.group("word"))
    return [name for name, view in seen.views.items() if view.parameter in word]


def without(seen: Observation, hidden: Sequence[str]) -> Observation:
    """Return the observation without some of its views.

    Raises:
        NotSupportedError: nothing is left.
    """
    views = {n: v for n, v in seen.views.items() if n not in hidden}
    if not views:
        raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")
    return Observation(
        model=seen.model,
        tensors={n: seen.tensors[n] for n in views},
        views=views,
        kind=seen.kind,
        knowledge=seen.knowledge,
        selection=seen.selection,
    )


@torch.no_grad()
def nearest_tokens(vectors: Tensor, table: Tensor, forbidden: Sequence[int] = ()) -> Tensor:
    """Return the ids of the tokens whose word vectors lie nearest by cosine.

    Args:
        vectors: [..., d].
        table: [V, d] word vectors.
        forbidden: ids never returned (special tokens).
    """
    unit = torch.nn.functional.normalize(table, dim=1)
    score = torch.nn.functional.normalize(vectors, dim=-1) @ unit.T
    if len(forbidden):
        score[..., list(forbidden)] = -torch.inf
    return score.argmax(-1)
