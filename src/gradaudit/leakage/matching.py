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

_CHUNK = 1 << 19
"""Gradient values measured at a time: they stay in the processor's cache."""


class Distance(ABC):
    """A distance between predicted and observed updates that is a sum over tensors, with its derivative."""

    differs: ClassVar[bool] = True
    """True when only p - o matters: `each` is then given that instead of p."""

    @abstractmethod
    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return one tensor's distance for each candidate, and its derivative by p when asked for.

        Args:
            p: [N, ...] predicted, or predicted - observed where `differs`; may be overwritten.
            o: [...] observed.
            slope: whether the derivative, [N, ...], is wanted.
            of: the tensor is every so many-th row of a whole one, for which the distance is estimated; only with no
                slope.
        """

    def share(self, count: int) -> float:
        """Return the weight of one of `count` tensors."""
        return 1.0

    def measure(self, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
        """Return the distance [N] of whole updates, tensor by tensor."""
        total = torch.zeros(len(predicted[0]), device=predicted[0].device, dtype=predicted[0].dtype)
        for p, o in zip(predicted, observed, strict=True):
            total = total + self.each(p - o if self.differs else p.clone(), o, False)[0]
        return total * self.share(len(predicted))


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Sum over tensors of ||g - g*||_2^2 + l1 ||g - g*||_1 (DLG: l1 = 0; TAG: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.0

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        flat = p.flatten(1)
        value = torch.linalg.vecdot(flat, flat)
        if self.l1:
            value = value + self.l1 * torch.linalg.vector_norm(flat, 1, dim=1)
        if not slope:
            return value * of, None
        return value * of, torch.sign(p).mul_(self.l1).add_(p, alpha=2) if self.l1 else p.mul_(2)


@dataclass(frozen=True)
class L2(Distance):
    """Sum over tensors of ||g - g*||_2 + l1 ||g - g*||_1, the first not squared (Grab: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.01

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        flat = p.flatten(1)
        norm = torch.linalg.vector_norm(flat, dim=1)
        value = math.sqrt(of) * norm
        if self.l1:
            value = value + of * self.l1 * torch.linalg.vector_norm(flat, 1, dim=1)
        if not slope:
            return value, None
        # at the truth itself the derivative is taken as 0
        scale = torch.where(norm > 0, 1 / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
        scale = scale.view(-1, *[1] * (p.dim() - 1))
        return value, torch.sign(p).mul_(self.l1).addcmul_(p, scale.expand_as(p)) if self.l1 else p * scale


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 - cos(g, g*) (LAMP, partial gradients).

    A tensor that is zero on either side counts 1 and has slope 0.
    """

    differs: ClassVar[bool] = False

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        flat, fixed = p.flatten(1), o.flatten()
        tiny = torch.finfo(p.dtype).tiny
        norm = torch.linalg.vector_norm(flat, dim=1).clamp_min(tiny)
        against = torch.linalg.vector_norm(fixed).clamp_min(tiny)
        cosine = (flat @ fixed) / norm / against
        if not slope:
            return 1 - cosine, None
        heard = (norm > tiny) & (against > tiny)
        along = torch.where(heard, cosine / norm.square(), 0.0)
        inward = torch.where(heard, 1 / (norm * against), 0.0)
        return 1 - cosine, (flat * along[:, None]).addcmul_(inward[:, None], fixed, value=-1).view_as(p)

    def share(self, count: int) -> float:
        return 1.0 / count


@dataclass(frozen=True)
class Normalized(Distance):
    """The inner distance of each predicted tensor scaled to unit norm, as a client does that adds noise after that.

    Grab's counter to its noise (section 5.4).

    Args:
        inner: what is measured then.
    """

    inner: Distance
    differs: ClassVar[bool] = False

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
class OnSupport(Distance):
    """The inner distance on the coordinates that were sent: the others were pruned and say nothing.

    Grab's counter to pruning (section 5.5).

    Args:
        inner: what is measured there.
    """

    inner: Distance
    differs: ClassVar[bool] = False

    def each(self, p: Tensor, o: Tensor, slope: bool, of: int = 1) -> tuple[Tensor, Tensor | None]:
        sent = o != 0
        value, outer = self.inner.each((p - o) * sent if self.inner.differs else p * sent, o, slope, of)
        return value, None if outer is None else outer * sent

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
        out: dict[str, tuple[str, Tensor, Tensor]] = {}
        for name, taps in traced.taps.items():
            mine = [(tap, s) for (n, tap), s in zip(uses, slopes, strict=True) if n == name]
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


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


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
        values, back_slope, back_read = [], [], []
        chunk = max(1, _CHUNK // max(1, observed.numel()))
        for at in range(0, count, chunk):
            here = rows[at : at + chunk]
            matrix = how in ("matrix", "transposed")
            part = read.reshape(count, -1, *read.shape[2:])[at : at + chunk] if how != "shift" else read
            if matrix and offset is not None:
                p = torch.baddbmm(offset, here.mT, part)
            else:
                p = _gradient(how, here, part, len(here), observed)
                p = p if offset is None else p + offset
            value, s = distance.each(p, observed, wanted, of)
            values.append(value)
            if s is None:
                continue
            if matrix:
                back_slope.append(part @ s.mT)
                back_read.append(here @ s)
            elif how == "shift":
                back_slope.append(s[:, None].expand_as(here))
            elif how == "scale":
                back_slope.append(part * s[:, None])
                back_read.append(here * s[:, None])
            else:
                index = part.reshape(len(here), -1, 1).expand(-1, -1, here.shape[-1])
                back_slope.append(s.gather(1, index))
        if wanted:
            ctx.back_slope = _joined(back_slope).reshape(slope.shape)
            ctx.back_read = _joined(back_read).reshape(read.shape) if back_read else None
            ctx.count = count
        return _joined(values)

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
