"""What a judge says, whatever the data: scores, whether all was found, and what goes into the record."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel

from gradaudit.record import Spectrum
from gradaudit.types import Observation, Private, Reconstruction

B = TypeVar("B", bound=Private)
Order = tuple[tuple[int, ...], ...]
"""Rows of the batch that each local step took."""


class Judgment(ABC):
    """A reconstruction against the truth; a subclass is a frozen dataclass with its kind's own marks."""

    scores: dict[str, float | None]
    """By name."""

    solved: bool
    """Whether everything was found."""

    @abstractmethod
    def of_record(self, baseline: Self) -> dict[str, Any]:
        """Return the fields of the record that only this kind of data has, beside those of the blind guess."""


class Judge(ABC, Generic[B]):
    """Compares what attacks found in batches of one kind of data with the truth."""

    private: ClassVar[type[BaseModel]]
    """A line of the private side: case, setting, batch, attack, and what the judgment calls by the same names."""
    file: ClassVar[str]
    """Its file in a run's folder."""

    def ordered(self, order: Order | None) -> Self:
        """Return the judge of a batch whose rows were taken in this order, step by step; None for not known."""
        return self

    @abstractmethod
    def judge(self, batch: B, found: Reconstruction) -> Any:
        """Compare a reconstruction with the batch: aligned once, one to one, what is missing scores worst.

        Returns:
            This kind's `Judgment`.
        """

    def nothing(self, batch: B) -> Any:
        """Return the judgment of an attack that failed."""
        return self.judge(batch, Reconstruction())

    @abstractmethod
    def guessed(self, batch: B, found: Reconstruction) -> B | None:
        """Return what was found as a batch, no more examples than the true one has; None for nothing."""

    def spectrum(self, batch: B, seen: Observation[Any]) -> Spectrum | None:
        """Return the spectrum of what was seen, where this kind of model has one."""
        return None

    def load(self, batch: B) -> dict[str, Any]:
        """Return the record's fields that say how full the batch is."""
        return {}

    def flags(self, batch: B, seen: Observation[Any], shape: Spectrum | None) -> Mapping[str, bool]:
        """Return which of this kind's own flags hold."""
        return {}
