"""Taking a sentence out of a gradient under the label, or the slopes, with which it was in it.

The ranks of deeper blocks fall by its length then, and by less under any other; that of block 0 by the rows that no
other sentence has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, sentence_gradient
from gradaudit.models.base import TextModel

_GROWN = 10.0
"""A sentence that was in a gradient leaves no more than so many times its size, however others cancel it."""
_NOTHING = 1e-4
"""Eigenvalues below this share of the largest are rounding: of a sentence of b tokens b are not."""
_OTHERS = 1e-3
"""A direction of a sentence's rows is another's, too, where no larger share of it lies outside what is left."""


@dataclass(frozen=True)
class TakenOut:
    """A sentence that was in a gradient.

    Args:
        rest: what is left without it.
        weights: by label, how much of the sentence's own gradient under that label was in it: of one label only, unless
            the loss had none such (smoothed labels, copies with several).
        proven: every rank fell by exactly its length; that of block 0 by the number of its rows that are not in what is
            left, half of them at least.
    """

    rest: Remainder
    weights: tuple[float, ...]
    proven: bool

    @property
    def label(self) -> int:
        """Its class, or the one whose logit the update raises most."""
        return self.weights.index(max(self.weights))

    @property
    def share(self) -> float | None:
        """Its weight: one over the batch size, more where it was there twice, less where the client scaled the whole.

        None where it is none of one label.
        """
        return max(self.weights) if self.weights.count(0.0) == len(self.weights) - 1 else None


def take_out(
    model: TextModel, rest: Remainder, sentence: tuple[int, ...], shares: Sequence[float], layers: Sequence[int]
) -> TakenOut | None:
    """Subtract a sentence under the label and the share, or the slopes, that make the ranks fall; None when none do.

    What is proven holds for any loss of the classes' probabilities: scaled, weighted by sentence or class, of labels
    that are smoothed. A loss that sees each logit by itself (one label of several) is not looked for.

    Args:
        model: the model.
        rest: the gradient so far.
        sentence: token ids.
        shares: tried first, as one over the batch size where it is known; then the one that the gradient itself tells.
        layers: blocks whose ranks must fall.
    """
    before = [rest.span(layer).rank for layer in layers]
    own = [sentence_gradient(model, sentence, y, rest.left) for y in range(model.spec.labels)]
    best: tuple[int, TakenOut] | None = None
    for tried in (_told(own, shares), _by_label(rest, own, layers[0]), _by_slopes(rest, own, layers)):
        for weights in tried:
            after = rest.without(_joined(own, weights), 1.0)
            if any(after.stacked(layer).norm() > _GROWN * rest.stacked(layer).norm() for layer in layers):
                continue  # so large a share was not in it: what is left is the sentence itself
            ranks = [after.span(layer).rank for layer in layers]
            if sum(ranks) >= (sum(before) if best is None else best[0]):
                continue
            falls = [b - a for b, a in zip(before, ranks, strict=True)]
            rows = [_own_rows(model, after, layer, sentence) for layer in layers]
            if layers[0] == 0 and not 2 <= falls[0] <= rows[0] + 1:
                continue  # a weak direction sinks below rounding whatever is taken out: right ones take all their rows
            enough = all(2 * n >= len(sentence) for n in rows)
            best = sum(ranks), TakenOut(after, weights, enough and falls == rows)
        if best is not None and best[1].proven:
            break
    return None if best is None else best[1]


def _own_rows(model: TextModel, rest: Remainder, layer: int, sentence: tuple[int, ...]) -> int:
    """Return by how much the rank of a block falls when a sentence is taken out.

    Deeper rows are a sentence's own. In block 0 a word in its place has one row, whatever sentences it is in.
    """
    if layer > 0:
        return len(sentence)
    span = rest.span(0)
    ids = torch.tensor(sentence, device=span.basis.device)
    rows = torch.cat([model.first_inputs(place, ids[place : place + 1]) for place in range(len(ids))]).double()
    if span.roles == ("k",):  # the softmax ignores a shift: of keys' rows differences come back
        rows = rows[1:] - rows[:1]
    rows = torch.nn.functional.normalize(rows, dim=1)
    beside = rows - (rows @ span.basis) @ span.basis.T
    return int((torch.linalg.svdvals(beside) > _OTHERS).sum())


def _joined(own: Sequence[Matrices], weights: Sequence[float]) -> Matrices:
    some = [(weight, gradient) for weight, gradient in zip(weights, own, strict=True) if weight]
    return {key: sum((w * g[key] for w, g in some[1:]), some[0][0] * some[0][1][key]) for key in own[0]}


def _of_one(label: int, share: float, labels: int) -> tuple[float, ...]:
    return tuple(share if y == label else 0.0 for y in range(labels))


def _told(own: Sequence[Matrices], shares: Sequence[float]) -> Iterator[tuple[float, ...]]:
    return (_of_one(label, share, len(own)) for label in range(len(own)) for share in shares)


def _by_label(rest: Remainder, own: Sequence[Matrices], layer: int) -> Iterator[tuple[float, ...]]:
    """Yield each label with the share that the gradient itself tells: of a mean, a scaled or a weighted loss."""
    for label, gradient in enumerate(own):
        share = _own_share(rest, gradient, layer)
        if share is not None and share > 0:
            yield _of_one(label, share, len(own))


def _by_slopes(rest: Remainder, own: Sequence[Matrices], layers: Sequence[int]) -> Iterator[tuple[float, ...]]:
    """Yield the weights that tell what a sentence sent, whatever slopes its logits had: smoothed labels, other losses.

    Under any loss of the probabilities its gradient is a sum of differences between those of two labels. The right sum
    lies in the columns of what is left, as each part of it does; no other does, where there are more rows than tokens.
    """
    apart = [{key: own[0][key] - gradient[key] for key in gradient} for gradient in own[1:]]
    if not apart:
        return
    outside = rest.stacked(layers[0]).new_zeros((len(apart), len(apart)))
    for layer in layers:
        left, _, _ = torch.linalg.svd(rest.stacked(layer), full_matrices=False)
        basis = left[:, : rest.span(layer).rank]
        stacked = torch.stack([Remainder(one, rest.whole, rest.eps).stacked(layer) for one in apart])
        flat = (stacked - basis @ (basis.T @ stacked)).flatten(1)
        outside += flat @ flat.T
    slopes = torch.linalg.eigh(outside)[1][:, 0]
    weights = torch.cat([slopes.sum()[None], -slopes])
    share = _own_share(rest, _joined(own, weights.tolist()), layers[0])
    if share is not None:
        yield tuple((share * weights).tolist())


def _own_share(rest: Remainder, gradient: Matrices, layer: int) -> float | None:
    """Return the share s with which a gradient G lies in what is left, M = s G + others; None where it tells none.

    Where rows and columns of the parts are independent, M^+ G has the eigenvalue 1 / s, as often as G has rank, and
    zero besides. With the wrong one of two labels s is below zero.
    """
    whole = rest.stacked(layer)
    rank = rest.span(layer).rank
    if rank == 0:
        return None
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    own = Remainder(gradient, rest.whole, rest.eps).stacked(layer)
    inner = (left[:, :rank].T @ own @ right[:rank].T) / values[:rank, None]
    if layer == 0:  # where a row is another sentence's, too, an eigenvalue is both of theirs
        values = torch.linalg.eigvals(inner)
        values = values[values.abs() > _NOTHING * values.abs().max()].real
        return float(1 / values.median()) if len(values) else None
    once, twice = float(inner.trace()), float((inner * inner.T).sum())
    return once / twice if once != 0 and twice > 0 else None
