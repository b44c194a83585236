"""How leakage is told on a frontier, from 0 to 100, whatever the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradaudit.kinds import ByKind
from gradaudit.record import Interval, Record, Summary


@dataclass(frozen=True)
class Measure:
    """How leakage is told, from 0 to 100.

    Args:
        kind: of data.
        name: of the score.
        about: what the drawing calls it.
        exactly: what a share of it is called that was read whole.
        margin: above blind guessing, up to which nothing was told.
        leak: returns what an attack told, and what blind guessing tells.
        exact: returns the share that an attack read whole, and that blind guessing does.
        worst: returns the record and the number, from 0, of what was read best; None for nothing.
    """

    kind: str
    name: str
    about: str
    exactly: str
    margin: float
    leak: Callable[[Summary], tuple[Interval, float]]
    exact: Callable[[Summary, Sequence[Record]], tuple[float, float]]
    worst: Callable[[Sequence[Record]], tuple[Record, int] | None]


MEASURES: ByKind[Measure] = ByKind("measure of leakage")
"""By kind of data."""
