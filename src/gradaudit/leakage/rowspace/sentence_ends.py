"""Where sentences of a decoder end: the last block's query gradient of a classifier, exact at any load.

Nothing but the last token of a sentence reaches the head, so the last block's query gradient is the sum, over the
sentences, of a signal a times the input x of the sentence's last token. Its row space has as many directions as there
are sentences, and the share x^T M^+ a of a sentence's own a x^T tells under which labels, and how often, it was there.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.deflation import Remainder, matrices_of, remainder, sentence_gradient
from gradaudit.leakage.rowspace.prefixes import last_inputs
from gradaudit.models.base import TextModel
from gradaudit.types import Observation

_NEAR = 5e-3
"""A sentence's end this near the span is one: right ones are at rounding, wrong ones near 1."""
_ONCE = 0.05
"""How near to 1 the shares must come."""
_COPIES = 3
"""A sentence that occurs more often in one batch is not looked for."""


class Ends:
    """The ends of the sentences that are in a gradient.

    Args:
        model: a decoder that classifies.
        rest: a gradient, or what is left of it; it must hold the last block's queries.
        size: sentences of the whole batch: the share of each in its mean.
    """

    def __init__(self, model: TextModel, rest: Remainder, size: int) -> None:
        self._model, self._size, self._key = model, size, (model.depth - 1, "q")
        self._matrix = rest.left[self._key]
        self._span = rest.span(model.depth - 1)
        left, values, right = torch.linalg.svd(self._matrix, full_matrices=False)
        rank = self._span.rank
        self._inverse = (right[:rank].T / values[:rank]) @ left[:, :rank].T

    def among(self, sentences: Tensor) -> Tensor:
        """Return the rows of [N, T] texts of one length that end where a sentence does."""
        inputs = last_inputs(self._model, self._model.depth - 1, sentences)
        return torch.where(self._span.residual(inputs) < _NEAR)[0]

    def labels(self, sentence: tuple[int, ...]) -> tuple[int, ...]:
        """Return the label of each copy of a sentence in the gradient; empty where it is not in it."""
        if len(self.among(torch.tensor([sentence], device=self._matrix.device))) == 0:
            return ()
        like = {self._key: self._matrix}
        every = range(self._model.spec.labels)
        own = [sentence_gradient(self._model, sentence, label, like)[self._key] for label in every]
        return copies([share(self._inverse, one / self._size) for one in own])


def ends_of(seen: Observation) -> Ends | None:
    """Return the ends of an update's sentences; None where they cannot be read from it."""
    model, size = seen.model, seen.knowledge.batch_size
    key = (model.depth - 1, "q")
    if seen.kind != "gradient" or model.spec.task != "classification" or not model.causal or size is None:
        return None
    found = matrices_of(seen, [key])
    if not found or size >= 0.75 * model.width:  # the last block's span must not be full
        return None
    return Ends(model, remainder(found, torch.finfo(next(iter(seen.tensors.values())).dtype).eps), size)


def share(inverse: Tensor, one: Tensor) -> float:
    """Return x^T M^+ a for a rank-one matrix a x^T [out, d]: 1 where taking it out of M lowers the rank.

    Args:
        inverse: [d, out], M's pseudo-inverse.
        one: the matrix.

    Source: Wedderburn (1934).
    """
    return float((inverse * one.T).sum())


def copies(shares: Sequence[float]) -> tuple[int, ...]:
    """Return the labels, as few as will do, whose shares add up to 1; none where none do.

    Args:
        shares: by label, `share` of what a sentence would send with that label; what was sent is the sum over its
            copies, and that sum has 1.
    """
    for count in range(1, _COPIES + 1):
        for labels in itertools.combinations_with_replacement(range(len(shares)), count):
            if abs(sum(shares[label] for label in labels) - 1) < _ONCE:
                return labels
    return ()
