"""In what type of numbers a client trained, as its weights and what it sends show."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gradaudit.types import LocalTraining


def with_precision(
    how: LocalTraining | None,
    before: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    kind: Literal["gradient", "delta"],
) -> LocalTraining | None:
    """Return how a client trained, with what its numbers show where nothing else was said of their precision.

    Args:
        how: what was told; None for nothing, which stays so.
        before: weights before, by name.
        tensors: what it sends, by name, floats that hold each number exactly.
        kind: of them.
    """
    if how is None or how.precision != "fp32":
        return how
    sent = tensors if kind == "gradient" else {n: before[n].float() + t for n, t in tensors.items() if n in before}
    narrow = all(_fits(value) for value in (*before.values(), *sent.values()))
    return replace(how, precision="bf16-weights") if narrow else how


def _fits(value: Tensor) -> bool:
    return not value.is_floating_point() or torch.equal(value.bfloat16().to(value.dtype), value)
