"""Rows with labels that a model is fine-tuned and tested on: sentences or images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradaudit.data.images import ImageRows
from gradaudit.data.source import Rows, make_batch
from gradaudit.errors import NotSupportedError
from gradaudit.examples import Private
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch, ImageBatch


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


@dataclass(frozen=True)
class _Sentences:
    model: TransformersModel
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.texts)

    @property
    def where(self) -> str:
        return self.rows.where

    def can_train(self, row: int) -> bool:
        return bool(self.rows.texts[row].strip())

    def apart(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        held = [_plain(self.rows.texts[row]) for row in test]
        every = "\n".join(held)

        def shares_nothing(row: int) -> bool:
            text = _plain(self.rows.texts[row])  # neither a part of a tested text, nor one that holds a tested one
            return text not in every and not any(one in text for one in held)

        return [row for row in rows if shares_nothing(row)]

    def batch(self, rows: Sequence[int]) -> Batch:
        assert self.rows.labels is not None
        return make_batch(self.model, [self.rows.texts[n] for n in rows], [self.rows.labels[n] for n in rows])

    @torch.no_grad()
    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch, device = self.batch(rows), self.model.device
        assert batch.labels is not None
        logits = self.model.logits(ids=batch.ids.to(device), mask=batch.mask.to(device))
        return logits.argmax(1).cpu(), batch.labels


def _plain(text: str) -> str:
    # spaces around, so that a part of a text is whole words of it
    return f" {' '.join(text.lower().split())} "


@dataclass(frozen=True)
class _Images:
    model: ImageModel
    rows: ImageRows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def where(self) -> str:
        return self.rows.where

    def can_train(self, row: int) -> bool:
        return True

    def apart(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        held = {self._key(row) for row in test}
        return [row for row in rows if self._key(row) not in held]

    def _key(self, row: int) -> bytes:
        return hashlib.sha256(self.rows.pixels[row].contiguous().numpy().tobytes()).digest()

    def batch(self, rows: Sequence[int]) -> ImageBatch:
        return self.rows.batch(rows)

    @torch.no_grad()
    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.rows.batch(rows)
        return self.model.logits(batch.images.to(self.model.device)).argmax(1).cpu(), batch.labels
