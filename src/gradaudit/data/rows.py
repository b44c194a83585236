"""Rows of one data source beside the model that reads them: what the audit and utility ask of any kind of data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gradaudit.data.spec import DataSpec
from gradaudit.kinds import ByKind
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.types import Private


class Rows(Protocol):
    """Rows of one data source beside the model that reads them."""

    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def source(self) -> Any:
        """What the kind's reader read."""

    @property
    def where(self) -> str:
        """The source in words."""

    @property
    def sha256(self) -> str:
        """Digest of the source."""

    def can_train(self, row: int) -> bool:
        """Whether there is anything in a row."""

    def disjoint(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        """Return those of some rows that share nothing with a tested row."""

    def batch(self, rows: Sequence[int]) -> Private:
        """Return some rows as a batch that a client trains on."""

    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the class that the model says of each of some rows, and the right one, each [n] on the CPU."""


READERS: ByKind[Callable[[DataSpec, Path], Any]] = ByKind("data")
"""Reads the source that a spec names, paths from a folder on; without any model."""
BINDERS: ByKind[Callable[[Any, Any], Rows]] = ByKind("rows")
"""Puts a model and what its kind's reader read together."""
MARKS: ByKind[Callable[[Any, Any], list[bytes]]] = ByKind("rows to compare")
"""What makes each row of a batch, or of public data, the same as another, given the model."""


def bind(model: Model, source: Any) -> Rows:
    """Return what a reader read beside a model of the same kind."""
    return BINDERS[kind_of(model.spec.task)](model, source)
