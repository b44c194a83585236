"""How leakage of images is told on a frontier."""

from collections.abc import Sequence

from gradaudit.record import Interval, Record, Summary
from gradaudit.sweeps.measure import MEASURES, Measure
from gradaudit.verdict.images import recovered

_MARGIN = 10.0
"""% explained. The report finds a partial leak from 25 on; what is recommended must be quieter than that."""


def _leak(summary: Summary) -> tuple[Interval, float]:
    """100 (1 - MSE / MSE of the blind guess): 100 is the image itself, 0 no better than blind."""
    error, blind = summary.scores["mse"], summary.baseline["mse"].mean

    def explained(value: float | None) -> float | None:
        return None if value is None else 100 * (1 - value / blind) if blind else 0.0

    found = Interval(
        mean=explained(error.mean),
        low=explained(error.high),
        high=explained(error.low),
        worst=explained(error.worst),
        n=error.n,
    )
    return found, 0.0


def _recognized(summary: Summary, records: Sequence[Record]) -> tuple[float, float]:
    return 100 * sum(map(recovered, records)) / max(1, sum(record.batch_size for record in records)), 0.0


def _worst(records: Sequence[Record]) -> tuple[Record, int] | None:
    every = [(record, at) for record in records for at, marks in enumerate(record.images) if marks.found]
    return min(every, key=lambda pair: pair[0].images[pair[1]].mse, default=None)


MEASURES.add(
    "images",
    Measure(
        "images",
        "% explained",
        "% of the blind error explained",
        "recognized",
        _MARGIN,
        _leak,
        _recognized,
        _worst,
    ),
)
