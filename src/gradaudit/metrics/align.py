"""One-to-one matching of originals and guesses."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment


def assign(similarity: Sequence[Sequence[float]]) -> list[int | None]:
    """Return for each original the index of its guess, or None, maximizing the summed similarity.

    Every guess serves at most one original (Hungarian method): two originals cannot both claim one good guess.

    Args:
        similarity: one row an original, one column a guess; may be ragged only in having no columns at all.
    """
    rows = len(similarity)
    columns = len(similarity[0]) if rows else 0
    pairing: list[int | None] = [None] * rows
    if columns == 0:
        return pairing
    chosen_rows, chosen_columns = linear_sum_assignment(np.asarray(similarity, dtype=float), maximize=True)
    for row, column in zip(chosen_rows, chosen_columns, strict=True):
        pairing[int(row)] = int(column)
    return pairing
