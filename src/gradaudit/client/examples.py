"""A private batch as the model that trains on it takes it: each kind of data has a file of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradaudit.client.example_gradients import Mode
from gradaudit.kinds import ByKind
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.types import Private


@dataclass(frozen=True)
class Apart:
    """The parameters that are trained, and each example's own gradient by them.

    Args:
        parameters: by name.
        chunks: yields some examples' gradients [n, ...] by parameter name, as many at a time as memory is given, from
            their numbers in the batch and what each part of them is computed in.
    """

    parameters: dict[str, Tensor]
    chunks: Callable[[Tensor, Mode], Iterator[dict[str, Tensor]]]


class Examples(ABC):
    """One batch beside its model."""

    @abstractmethod
    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        """Return the mean loss of some examples, with parameters in place of the model's own."""

    @abstractmethod
    def apart(self, trained: Collection[str]) -> Apart:
        """Return the means to compute each example's own gradient, on a copy of the parameters."""

    def apart_once(self, trained: Collection[str]) -> Apart:
        """Return the means to compute it at the model's own weights, where no local step moves them."""
        return self.apart(trained)


Side = Literal["right", "left"]
"""Where shorter examples of a batch are filled up."""
EXAMPLES: ByKind[Callable[[Any, Any, Side, float], Examples]] = ByKind("training")
"""Puts a model and a batch of its kind together; then come the side of the padding and the label smoothing."""


def examples_of(model: Model, batch: Private, padding: Side, smoothing: float = 0.0) -> Examples:
    """Return a batch beside its model.

    Raises:
        BadInputError: an empty batch, or one of another kind or shape than the model takes.
    """
    return EXAMPLES[kind_of(model.spec.task)](model, batch, padding, smoothing)


def smoothed(labels: Tensor, classes: int, share: float) -> Tensor:
    """Return class labels [n] as they are, or as distributions [n, classes] that spread a share of each over all."""
    if share == 0:
        return labels
    return torch.nn.functional.one_hot(labels, classes) * (1 - share) + share / classes
