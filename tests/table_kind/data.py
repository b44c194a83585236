"""Rows of numbers: a csv file whose column `label` is a class and whose other columns are the values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradaudit.data.files import found_file
from gradaudit.data.rows import BINDERS, MARKS, READERS
from gradaudit.data.spec import DataSpec
from table_kind.model import Linear


@dataclass(frozen=True)
class TableBatch:
    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Tensor) -> TableBatch:
        return TableBatch(self.values[rows], self.labels[rows])

    @property
    def sizes(self) -> None:
        return None


@dataclass(frozen=True)
class TableRows:
    values: Tensor
    labels: Tensor
    sha256: str
    where: str


def read(spec: DataSpec, base: Path) -> TableRows:
    data = found_file(str(spec.path), base).read_bytes()
    header, *lines = data.decode().splitlines()
    at = header.split(",").index("label")
    numbers = torch.tensor([[float(cell) for cell in line.split(",")] for line in lines])
    values = torch.cat([numbers[:, :at], numbers[:, at + 1 :]], 1)
    return TableRows(values, numbers[:, at].long(), hashlib.sha256(data).hexdigest(), "a table")


@dataclass(frozen=True)
class Bound:
    model: Linear
    source: TableRows

    def __len__(self) -> int:
        return len(self.source.values)

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def sha256(self) -> str:
        return self.source.sha256

    def can_train(self, row: int) -> bool:
        return True

    def disjoint(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        held = {tuple(self.source.values[row].tolist()) for row in test}
        return [row for row in rows if tuple(self.source.values[row].tolist()) not in held]

    def batch(self, rows: Sequence[int]) -> TableBatch:
        return TableBatch(self.source.values[list(rows)], self.source.labels[list(rows)])

    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.batch(rows)
        return self.model.module(batch.values).argmax(1).detach(), batch.labels


def marks(data: Any, model: Linear) -> list[bytes]:
    return [row.numpy().tobytes() for row in data.values]


READERS.add("table", read)
BINDERS.add("table", Bound)
MARKS.add("table", marks)
