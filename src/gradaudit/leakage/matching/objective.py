"""Gradient matching: how far the update of a guess lies from the one that was seen.

Everything is batched over candidates: a guess is [N, B, T, d] and an objective returns [N], so that restarts,
permutations and beams are evaluated together. A predicted gradient is known by its factors (`models.taps`) and measured
by them (`leakage.factored`): nothing of the model's size stays in a graph.

One file because it is one objective, whose parts share what a pass computed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching.compiled import distance_by_compiled_step
from gradaudit.leakage.matching.distances import Distance
from gradaudit.leakage.matching.factored import Observed, Product, gradient, of_products, of_whole, rank_of_products
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.screening import Base, Beside, Factors, Heat, Made, as_slice
from gradaudit.leakage.observed import as_gradient, word_gradient_hidden
from gradaudit.models.taps import Tap, Traced
from gradaudit.models.views import View
from gradaudit.types import Observation, Reconstruction


@dataclass(frozen=True)
class _Part:
    """Tensors that are measured together: one matrix, or all vectors of one size.

    Args:
        views: where they are found.
        shapes: of each one's gradient, [out, in] for a matrix.
        observed: what they are compared with.
        matrix: whether it is one matrix, made of outer products.
    """

    views: tuple[View, ...]
    shapes: tuple[torch.Size, ...]
    observed: Observed
    matrix: bool


_Targets = Sequence[Observed]
"""What they are compared with, by part of an objective."""


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

    additive: ClassVar[bool] = True
    """True when a batch's update is a sum over its sentences, so that only the changed one need be computed anew."""
    replays: ClassVar[bool] = False
    """True when local steps are taken, so that no optimizer's change is misread."""

    def __init__(self, seen: Observation, distance: Distance) -> None:
        self.model, self.distance = seen.model, distance
        self._size = seen.knowledge.batch_size or 1
        how = seen.knowledge.training
        self._steps = how.steps(self._size) if seen.kind == "delta" and how is not None else 1
        self.passes = 1
        """Gradients computed for one guess."""
        self.compiled = ""
        self._causal = seen.model.spec.task == "causal-lm"
        self._rate = seen.knowledge.dropout or None
        hidden = word_gradient_hidden(seen)
        self._views: dict[str, View] = {n: v for n, v in seen.views.items() if n not in hidden}
        gradients = as_gradient(seen, self.replays)
        self._observed = {name: gradients[name] for name in self._views}
        self.watched = tuple(dict.fromkeys(v.parameter for v in self._views.values()))
        taps = self._probe()
        self.watched = tuple(name for name in self.watched if name in taps)
        found: dict[str, str] = {n: taps[v.parameter][0].how for n, v in self._views.items() if v.parameter in taps}
        self._parts = self._arranged(found)
        self._matched = tuple(found)
        self.left_out = tuple(n for n in seen.views if n not in found)
        if not self._parts:
            raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")

    def _arranged(self, found: dict[str, str]) -> list[_Part]:
        """Return what is measured together: each matrix, and vectors of one size."""
        parts: list[_Part] = []
        vectors: dict[int, list[tuple[View, Tensor]]] = {}
        for name, how in found.items():
            view = self._views[name]
            turned = how == "transposed" and view.name == view.parameter
            # as [out, in], the orientation that factors are multiplied in
            value = (self._observed[name].T if turned else self._observed[name]).contiguous()
            if how in ("matrix", "transposed"):
                parts.append(_Part((view,), (value.shape,), self._target(value), True))
            else:
                vectors.setdefault(value.numel(), []).append((view, value))
        for some in vectors.values():
            views, values = zip(*some, strict=True)
            flat = torch.stack([value.flatten() for value in values])
            parts.append(_Part(views, tuple(value.shape for value in values), self._target(flat), False))
        return parts

    def _target(self, values: Tensor) -> Observed:
        return Observed(values, -values if self.distance.differs else None, values.square().sum())

    @property
    def _targets(self) -> tuple[Observed, ...]:
        """What the update is compared with, by part."""
        return tuple(part.observed for part in self._parts)

    def details(self) -> dict[str, Any]:
        """Return what goes into a record: how many tensors, and whether steps were compiled where that was asked."""
        return {"matched_tensors": len(self._matched)} | ({"compiled": self.compiled} if self.compiled else {})

    def notes(self) -> list[str]:
        """Return what a reader of the result has to know."""
        return [f"a weight change of {self._steps} local steps was read as one gradient"] if self._steps > 1 else []

    def told(
        self,
        sequences: tuple[tuple[int, ...], ...],
        labels: Tensor,
        how: str,
        distance: float,
        evaluations: int,
        **more: Any,
    ) -> Reconstruction:
        """Return a guess for the record.

        Args:
            sequences: token ids.
            labels: [B] classes or [B, classes] shares; next words have none.
            how: where labels are from.
            distance: of the guess.
            evaluations: guesses measured, in gradients of one batch.
            more: further details.
        """
        details: dict[str, Any] = {"distance": distance, "gradient_evaluations": evaluations * self.passes}
        details |= self.details() | more
        if self._causal:
            return Reconstruction(sequences, notes=tuple(self.notes()), details=details)
        classes = labels.argmax(-1) if labels.dim() > 1 else labels
        details["labels"] = how
        return Reconstruction(sequences, tuple(classes.tolist()), notes=tuple(self.notes()), details=details)

    def __call__(self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None = None) -> Tensor:
        """Return the distance of each candidate, [N]; differentiable by all that has a gradient.

        Args:
            embeddings: [N, B, T, d] word vectors.
            mask: [B, T] or [N, B, T] bool.
            labels: [N, B, ...] labels or distributions, as `TextModel.loss` takes them.
            masks: dropout masks in force; None is without dropout.
        """
        if torch.is_grad_enabled():
            value, self.compiled = distance_by_compiled_step(self, embeddings, mask, labels, masks)
            if value is not None:
                return value
        return self._distances(self._factors_of(embeddings, mask, labels, masks, None), self._targets)

    def structure(self) -> Hashable:
        """Return all that the operations depend on but the guess and `targets`."""
        return self.distance, self._rate, tuple((p.matrix, p.views, p.shapes) for p in self._parts)

    def targets(self) -> list[Tensor]:
        """Return what the update is compared with, as flat tensors."""
        return [t for o in self._targets for t in (o.values, o.energy, *([] if o.offset is None else [o.offset]))]

    def measured(
        self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None, targets: list[Tensor]
    ) -> Tensor:
        """Return the distances [N] to other targets of the same structure."""
        each = 3 if self.distance.differs else 2
        cut = [targets[n : n + each] for n in range(0, len(targets), each)]
        observed = [Observed(values, offset[0] if offset else None, energy) for values, energy, *offset in cut]
        return self._distances(self._factors_of(embeddings, mask, labels, masks, None), observed)

    def _factors_of(
        self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None, base: Base | None
    ) -> Made:
        """Return the factors of each candidate's update."""
        learning = torch.is_grad_enabled()
        with torch.enable_grad():
            traced = self._trace(embeddings, mask, labels, masks)
            total = self._weighted(traced.losses, embeddings, mask, base)
            return self._factors(traced, total, len(embeddings), learning)

    def _distances(self, factors: Made, observed: _Targets) -> Tensor:
        """Return the distances [N] of updates by their factors."""
        some = next(iter(factors.values())).slope
        found = torch.zeros(len(some), device=some.device, dtype=some.dtype)
        for part, target in zip(self._parts, observed, strict=True):
            if not part.matrix:
                found = found + of_whole(self._vectors(part, factors), target, self.distance)
        products = self._products(factors, observed)
        if products:
            found = found + of_products(products, self.distance)
        return found * self.distance.share(len(self._matched))

    def _products(self, factors: Made, observed: _Targets, thin: int = 1) -> list[Product]:
        """Return the matrices' factors beside what they are compared with, or every so many-th row of both."""
        found = []
        for part, target in zip(self._parts, observed, strict=True):
            if part.matrix:
                made = self._at(part.views[0], factors)
                slope = made.slope if thin == 1 else made.slope[..., ::thin].contiguous()
                found.append(Product(slope, made.read, target.thinned(thin)))
        return found

    @torch.no_grad()
    def best_of(
        self,
        embeddings: Tensor,
        mask: Tensor,
        labels: Tensor,
        masks: Sequence[Masks | None],
        beside: Beside,
        thin: int,
        heats: Sequence[Heat],
    ) -> Tensor:
        """Return the distances [N] of the best candidates, infinite for the rest, from one pass through the model.

        All are ranked by inner products on a share of each matrix (without the L1 term), the best of them by the
        share's entries, and the best of these are measured in full. Where inner products do not give the distance,
        all are ranked by entries, on a fourth of the share.

        Args:
            embeddings: as in a call, like `mask` and `labels`.
            mask: [B, T] or [N, B, T].
            labels: [N, B, ...].
            masks: dropout masks; of several, the mean of the distances under each.
            beside: what the sentences not given add, and beside which of the candidates; none when all are given. There
                are then as many distances as pairs.
            thin: every so many-th output of each matrix counts where candidates are ranked by inner products.
            heats: of the two rankings, shared with candidates that come in other passes.

        Raises:
            ValueError: the update is no gradient that factors make (local steps are replayed).
        """
        if not self.additive:
            raise ValueError("what local steps change cannot be estimated from a share of it")
        base = beside[0][0] if beside else None
        made = [self._factors_of(embeddings, mask, labels, some, base) for some in masks]
        pairs = sum(len(which) for _, which in beside) if beside else len(embeddings)
        left = torch.arange(pairs, device=embeddings.device)
        rough = self.distance.rough()

        def by_inner_products(factors: Made, observed: _Targets) -> Tensor:
            assert rough is not None
            return rank_of_products(self._products(factors, observed, thin), rough, thin)

        def by_entries(factors: Made, observed: _Targets, every: int = thin) -> Tensor:
            return of_products(self._products(factors, observed, every), self.distance, every)

        if any(part.matrix for part in self._parts):
            first = partial(by_entries, every=4 * thin) if rough is None else by_inner_products
            for heat, act in zip(heats, (first, by_entries), strict=True):
                if len(left) > 0 and (heat.begun or len(left) > heat.most):
                    left = left[heat.among(self._each(act, made, beside, left))]
        found = torch.full((pairs,), torch.inf, device=embeddings.device, dtype=embeddings.dtype)
        if len(left):
            found[left] = self._each(self._distances, made, beside, left)
        return found

    @torch.no_grad()
    def beside(
        self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Sequence[Masks | None], beside: Beside
    ) -> Tensor:
        """Return the distance of every pair, [N]; see `best_of`."""
        made = [self._factors_of(embeddings, mask, labels, some, beside[0][0]) for some in masks]
        pairs = sum(len(which) for _, which in beside)
        return self._each(self._distances, made, beside, torch.arange(pairs, device=embeddings.device))

    def _each(
        self, act: Callable[[Made, _Targets], Tensor], made: Sequence[Made], beside: Beside, some: Tensor
    ) -> Tensor:
        """Return what a measure finds for some candidates, the mean over the ways they were made.

        Args:
            act: the measure.
            made: all candidates' factors, by dropout masks.
            beside: as `best_of` has it.
            some: indices of pairs, in ascending order.
        """
        count = len(next(iter(made[0].values())).slope)
        runs = beside or ((Base(self._targets, 0), torch.arange(count, device=some.device)),)
        found, start = [], 0
        for base, which in runs:
            here = which[some[(some >= start) & (some < start + len(which))] - start]
            start += len(which)
            if len(here):
                some_of = as_slice(here)
                mine = [{name: f.only(some_of) for name, f in factors.items()} for factors in made]
                found.append(torch.stack([act(f, base.observed) for f in mine]).mean(0))
        return torch.cat(found)

    @staticmethod
    def _at(view: View, factors: Made) -> Factors:
        """Return a view's factors: those of its parameter, or of some of its outputs."""
        whole = factors[view.parameter]
        if view.rows is None:
            return whole
        return Factors(whole.how, whole.slope[..., view.rows[0] : view.rows[1]], whole.read)

    def _vectors(self, part: _Part, factors: Made) -> Tensor:
        """Return predicted vectors [N, k, w]."""
        made = [(self._at(view, factors), shape) for view, shape in zip(part.views, part.shapes, strict=True)]
        return torch.stack([gradient(f.how, f.slope, f.read, shape).flatten(1) for f, shape in made], 1)

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
        factors = self._factors_of(embeddings[None], mask, labels[None], masks, Base((), size))
        observed = []
        for part in self._parts:
            if part.matrix:
                made = self._at(part.views[0], factors)
                own = gradient(made.how, made.slope, made.read, part.shapes[0])[0]
            else:
                own = self._vectors(part, factors)[0]
            before = part.observed
            offset = own if before.offset is None else own + before.offset
            observed.append(Observed(before.values, offset, before.energy))
        return Base(tuple(observed), size)

    @staticmethod
    def _factors(traced: Traced, total: Tensor, count: int, learning: bool) -> Made:
        """Return each watched parameter's factors, [count, ...], over all of its uses."""
        uses = [(name, tap) for name, taps in traced.taps.items() for tap in taps]
        slopes = torch.autograd.grad(total, [tap.written for _, tap in uses], create_graph=learning, allow_unused=True)
        found: dict[str, list[tuple[Tap, Tensor | None]]] = {}
        for (name, tap), slope in zip(uses, slopes, strict=True):
            found.setdefault(name, []).append((tap, slope))
        out: Made = {}
        for name, mine in found.items():
            taps = traced.taps[name]
            # a use that the loss does not reach adds nothing (BERT runs its pooler twice)
            reached = [(t, s) for t, s in mine if s is not None] or [(taps[-1], torch.zeros_like(taps[-1].written))]
            how, width = taps[0].how, reached[0][1].shape[-1]
            parts = [s.reshape(count, -1, width) for _, s in reached]
            read = [t.read.reshape(count, -1, *t.read.shape[2:]) if t.read.numel() else t.read for t, _ in reached]
            slope = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            rows = torch.cat(read, 1) if len(read) > 1 else read[0]
            out[name] = Factors(how, slope, rows if learning else rows.detach())
        return out

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
