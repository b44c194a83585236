"""How leakage of text is told on a frontier."""

from collections.abc import Sequence

from gradaudit.record import Interval, Record, Summary
from gradaudit.sweeps.measure import MEASURES, Measure

_MARGIN = 5.0
"""Points of ROUGE-L: less than one word of a short sentence."""


def _leak(summary: Summary) -> tuple[Interval, float]:
    return summary.scores["rougeL"], summary.baseline["rougeL"].mean or 0.0


def _exact(summary: Summary, records: Sequence[Record]) -> tuple[float, float]:
    return summary.scores["exact"].mean or 0.0, summary.baseline["exact"].mean or 0.0


def _worst(records: Sequence[Record]) -> tuple[Record, int] | None:
    every = [(record, at) for record in records for at in range(len(record.sentences))]
    return max(every, key=lambda pair: pair[0].sentences[pair[1]].rougeL or 0.0, default=None)


MEASURES.add(
    "text", Measure("text", "ROUGE-L", "ROUGE-L of the strongest attack", "exact", _MARGIN, _leak, _exact, _worst)
)
