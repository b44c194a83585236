"""How a setting is judged, and what each kind of data brings to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradaudit.kinds import ByKind
from gradaudit.record import Record, Summary

Level = Literal["leaks", "partly", "not shown", "inconclusive"]

BLIND = "blind"
"""The attack that never looks at the update: the baseline, which drives no verdict."""


@dataclass(frozen=True)
class Rules:
    """When an audit of one kind of data says what.

    Args:
        words: the rule of each level, with its thresholds, for the reader.
        judge: returns level and sentence of one setting, from its name, the summaries and records of its attacks
            without the blind guess, and all its records.
    """

    words: Mapping[Level, str]
    judge: Callable[[str, Sequence[Summary], Sequence[Record], Sequence[Record]], tuple[Level, str]]


RULES: ByKind[Rules] = ByKind("verdict")
"""By kind of data."""


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{number} {one if number == 1 else many}"
