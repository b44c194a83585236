"""Labels from the gradient of the output layer, where that is exact."""

from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.observed import as_gradient, sgd_steps
from gradaudit.models.base import Model
from gradaudit.types import Observation


def single_label(bias_gradient: Tensor | None, weight_gradient: Tensor | None) -> int | None:
    """Return the class of a single sentence from the output layer's gradient; None where it does not determine it.

    With cross-entropy, the gradient of logit c is p_c - [c is the label]: negative for the label alone. The bias
    shows it directly. The weight's rows are that number times one hidden vector, so the label's row points against
    all others; with two classes the rows oppose each other either way and the weight alone cannot tell.

    Args:
        bias_gradient: [C], or None when not seen.
        weight_gradient: [C, d], or None when not seen.

    Source: iDLG (Zhao et al., 2020), section 3; exact for one sentence.
    """
    if bias_gradient is not None:
        negative = torch.where(bias_gradient < 0)[0]
        return int(negative[0]) if len(negative) == 1 else None
    if weight_gradient is None or len(weight_gradient) < 3:
        return None
    inner = weight_gradient @ weight_gradient.T
    against = (inner < 0).sum(1)
    label = int(against.argmax())
    return label if int(against[label]) == len(inner) - 1 and int((against == 1).sum()) == len(inner) - 1 else None


def analytic_label(seen: Observation[Model]) -> int | None:
    """Return the label of an observed update of a single sentence or image, None where it cannot be read exactly."""
    model = seen.model
    # of other losses than cross-entropy the gradient of several logits may be negative
    if model.spec.loss != "cross-entropy" or model.spec.task == "causal-lm" or seen.knowledge.batch_size != 1:
        return None
    if seen.kind == "delta" and sgd_steps(seen) is None:
        return None
    classes, bias, weight = model.spec.labels, None, None
    gradients = as_gradient(seen)
    for name in model.group("head"):
        found = gradients.get(name)
        if found is not None and found.shape == (classes,):
            bias = found
        if found is not None and found.shape == (classes, model.width):
            weight = found
    return single_label(bias, weight)


def known_labels(seen: Observation[Any]) -> tuple[Tensor | None, str]:
    """Return labels [B] that were given or read off the output layer, and which; None, "learned" without either."""
    known, how = seen.knowledge.labels, "given"
    if known is None and (read := analytic_label(seen)) is not None:
        known, how = (read,), "read from the output layer"
    if known is None:
        return None, "learned"
    return torch.tensor(known, device=next(iter(seen.tensors.values())).device), how
