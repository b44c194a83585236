"""The numbers of an update of one image as a kernel compares them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gradaudit.models.base import Model

_TINY = 1e-12


def output_layer(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the name of the output layer's matrix among tensors that are seen; None where it is not."""
    return next((n for n in model.group("head") if len(shapes.get(n, ())) == 2), None)


def compared(numbers: Tensor, shapes: Mapping[str, tuple[int, ...]], output: str | None) -> list[Tensor]:
    """Return updates [n, numbers] as blocks [n, ...] that are compared: the output layer's matrix apart from the rest.

    Of one image that matrix is an outer product: the slopes of the logits times the features that the layer read. Two
    like images of different classes have it in different rows, and nothing in common; their features are alike. So it
    is replaced by the features, the leading right singular vector, of unit length: noise on the slopes is in its scale.

    Args:
        numbers: the seen tensors one after the other.
        shapes: theirs, by name.
        output: the output layer's matrix; None compares all numbers as they are.
    """
    if output is None:
        return [numbers]
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = dict(zip(shapes, torch.split(numbers, sizes, 1), strict=True))
    matrix = parts.pop(output).view(len(numbers), *shapes[output])
    # of the small side: a matrix has as many rows as there are classes
    _, slopes = torch.linalg.eigh((matrix @ matrix.mT).double())
    features = (slopes[:, None, :, -1].to(matrix) @ matrix)[:, 0]
    # what layers read behind a sigmoid or a ReLU is not negative
    features = features * torch.where(features.sum(1, keepdim=True) < 0, -1.0, 1.0)
    features = features / features.norm(dim=1, keepdim=True).clamp_min(_TINY)
    return [torch.cat(list(parts.values()), 1), features] if parts else [features]
