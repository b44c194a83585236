"""Does a set of sentences explain a gradient: their labels, and the share of it that they leave unexplained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.deflation import Matrices, sentence_gradient
from gradaudit.models.base import TextModel


@dataclass(frozen=True)
class Explained:
    """How sentences explain a gradient.

    Args:
        labels: of each.
        left: norm of what all of them leave of it, relative to the whole.
        parts: norm of what each sends, relative to the whole: where that is hardly more than what is left, nothing
            tells whether it was this sentence.
    """

    labels: tuple[int, ...]
    left: float
    parts: tuple[float, ...]


def explain(model: TextModel, sentences: Sequence[tuple[int, ...]], left: Matrices, share: float) -> Explained:
    """Return how a batch of sentences explains a gradient, and under which labels.

    Least squares over every sentence's gradients under each label gives what each one contributes; the label whose
    gradient is nearest to that is taken. What is left then is rounding when nothing is missing and nothing is wrong.

    Args:
        model: the model, in evaluation mode.
        sentences: token ids.
        left: gradients by (block, role).
        share: weight of a sentence, 1 / B.
    """
    whole = _flat(left)
    labels = range(model.spec.labels)
    parts = [[_flat(sentence_gradient(model, s, y, left)) * share for y in labels] for s in sentences]
    columns = torch.stack([part for some in parts for part in some])
    weights = torch.linalg.pinv(columns @ columns.T, rtol=1e-10, hermitian=True) @ (columns @ whole)
    chosen, norms, rest = [], [], whole
    for at, some in enumerate(parts):
        options = torch.stack(some)
        fitted = weights[at * len(labels) : (at + 1) * len(labels)] @ options
        best = int((options - fitted).norm(dim=1).argmin())
        chosen.append(best)
        norms.append(float(options[best].norm()))
        rest = rest - options[best]
    size = max(float(whole.norm()), 1e-300)
    return Explained(tuple(chosen), float(rest.norm()) / size, tuple(norm / size for norm in norms))


def _flat(matrices: Matrices) -> Tensor:
    return torch.cat([g.flatten() for g in matrices.values()])
