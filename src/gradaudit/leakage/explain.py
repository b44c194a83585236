"""Does a set of sentences explain a gradient: their labels, and the share of it that they leave unexplained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.deflation import Matrices, sentence_gradient
from gradaudit.models.base import TextModel


def explain(
    model: TextModel, sentences: Sequence[tuple[int, ...]], left: Matrices, share: float
) -> tuple[tuple[int, ...], float]:
    """Return each sentence's label, and the norm of what all of them leave of the gradient, relative to the whole.

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
    chosen, rest = [], whole
    for at, some in enumerate(parts):
        options = torch.stack(some)
        fitted = weights[at * len(labels) : (at + 1) * len(labels)] @ options
        best = int((options - fitted).norm(dim=1).argmin())
        chosen.append(best)
        rest = rest - options[best]
    return tuple(chosen), float(rest.norm() / whole.norm().clamp_min(1e-300))


def _flat(matrices: Matrices) -> Tensor:
    return torch.cat([g.flatten() for g in matrices.values()])
