"""Rows with labels that a model is fine-tuned and tested on: sentences or images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradaudit.data.images import ImageRows, _Images
from gradaudit.data.text import Rows, _Sentences
from gradaudit.errors import NotSupportedError
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Private


class LabeledRows(Protocol):
    """Rows of one data source beside the model that reads them."""

    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def where(self) -> str:
        """The source in words."""

    def can_train(self, row: int) -> bool:
        """Whether there is anything in a row."""

    def apart(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        """Return those of some rows that share nothing with a tested row."""

    def batch(self, rows: Sequence[int]) -> Private:
        """Return some rows as a batch that a client trains on."""

    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the class that the model says of each of some rows, and the right one, each [n] on the CPU."""


def labeled_rows(model: Model, rows: Rows | ImageRows) -> LabeledRows:
    """Return the rows of a data source beside a model.

    Args:
        model: of text or of images.
        rows: of the same kind.

    Raises:
        NotSupportedError: text without classes.
    """
    if isinstance(model, ImageModel) and isinstance(rows, ImageRows):
        return _Images(model, rows)
    if isinstance(model, TransformersModel) and isinstance(rows, Rows) and rows.labels is not None:
        return _Sentences(model, rows)
    raise NotSupportedError("utility is measured on classification; leave [utility] away for next words")
