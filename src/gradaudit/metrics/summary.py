"""Means over batches with bootstrap intervals."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap

from gradaudit.record import Interval, Record, Summary, WordScores
from gradaudit.scores import scores_of


def interval(values: Sequence[float | None], low_is_worst: bool = False) -> Interval:
    """Return the mean over batches with its 95% percentile bootstrap interval and the value of the worst batch.

    Args:
        values: one score a batch; None where it is undefined for the batch (left out, and n says how many are in).
        low_is_worst: the lowest value is the worst for privacy, not the highest.
    """
    known = np.array([v for v in values if v is not None], dtype=float)
    if len(known) == 0:
        return Interval(mean=None, n=0)
    mean, worst = float(known.mean()), float(known.min() if low_is_worst else known.max())
    if len(known) == 1:
        return Interval(mean=mean, worst=worst, n=1)
    if np.ptp(known) == 0:  # the bootstrap of a constant is that constant; scipy warns instead of saying so
        return Interval(mean=mean, low=mean, high=mean, worst=worst, n=len(known))
    found = bootstrap(
        (known,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Interval(mean=mean, low=float(found.low), high=float(found.high), worst=worst, n=len(known))


def summarize(records: Sequence[Record]) -> list[Summary]:
    """Return one summary a setting and attack, in the order they first occur; failed batches are in every mean as 0."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.setting, record.attack), []).append(record)
    out = []
    for (setting, attack), rows in groups.items():
        kind = scores_of(name for row in rows for name in row.scores)
        sensitive = interval([r.sensitive for r in rows])
        flags = {flag for r in rows for flag in r.flags} | ({"few-batches"} if len(rows) < 10 else set())
        out.append(
            Summary(
                case=rows[0].case,
                setting=setting,
                attack=attack,
                n=len(rows),
                failed=sum(r.error is not None for r in rows),
                scores={s.name: interval([r.scores.get(s.name) for r in rows], s.low_leaks) for s in kind.all},
                baseline={s.name: interval([r.baseline.get(s.name) for r in rows], s.low_leaks) for s in kind.all},
                sensitive=sensitive if sensitive.n else None,
                words=_of_words([r.words for r in rows]),
                baseline_words=_of_words([r.baseline_words for r in rows]),
                seconds=float(np.median([r.seconds for r in rows])),
                flags=tuple(sorted(flags)),
            )
        )
    return out


def _of_words(rows: Sequence[WordScores | None]) -> dict[str, Interval] | None:
    """Return the means of words' scores; a batch without named words counts 0 where others have some."""
    if not any(rows):
        return None
    nothing = WordScores(precision=0.0, recall=0.0)
    return {name: interval([getattr(row or nothing, name) for row in rows]) for name in WordScores.model_fields}
