"""How a client trains on rows of numbers, and what guessing blindly gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaudit.client.examples import EXAMPLES, Apart, Examples, smoothed
from gradaudit.leakage.priors import GUESSES
from gradaudit.types import Reconstruction
from table_kind.data import TableBatch
from table_kind.model import Linear


class TableExamples(Examples):
    def __init__(self, model: Linear, batch: TableBatch, padding: str, smoothing: float) -> None:
        self._model, self._values = model, batch.values
        self._labels = smoothed(batch.labels, model.module.out_features, smoothing)

    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        return self._model.loss(self._values[rows], self._labels[rows], params)

    def apart(self, trained: Collection[str]) -> Apart:
        raise NotImplementedError


def zeros(seen: Any, size: int, length: int) -> Reconstruction:
    return Reconstruction(images=torch.zeros(size, seen.model.width))


EXAMPLES.add("table", TableExamples)
GUESSES.add("table", zeros)
