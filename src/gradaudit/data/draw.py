"""Which rows make up which batch: the papers' draw."""

import numpy as np

from gradaudit.data.spec import DataSpec, SourceSpec
from gradaudit.data.text import TextRows
from gradaudit.errors import BadInputError


def draw_numbers(spec: DataSpec, count: int, where: str) -> list[tuple[int, ...]]:
    """Return the row numbers of each batch of a source with so many rows; see `draw`."""
    needed = spec.skip + spec.batches * spec.batch_size
    if needed > count:
        raise BadInputError(
            f"batch larger than the data: {where} has {count} rows and {needed} are needed "
            f"(skip {spec.skip} + {spec.batches} batches of {spec.batch_size}); "
            "lower batch_size, batches or skip"
        )
    chosen = shuffled(spec, count)[spec.skip : needed]
    size = spec.batch_size
    return [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def draw(spec: DataSpec, rows: TextRows) -> list[tuple[int, ...]]:
    """Return the row numbers of each batch, counted from 0.

    The papers' draw: shuffle the numbers of all rows with the seed, pass over `skip`, cut into batches.

    Args:
        spec: seed, skip, number and size of the batches.
        rows: what `load_rows` returned for the same spec.

    Raises:
        BadInputError: there are too few rows, or a drawn row holds no text.
    """
    batches = draw_numbers(spec, len(rows.texts), rows.where)
    for row in (row for batch in batches for row in batch):
        if not rows.texts[row].strip():
            raise BadInputError(
                f"row {row} (counted from 0) of {rows.where} is drawn but holds no text; "
                "delete that row, or change skip or shuffle_seed to pass over it"
            )
    return batches


def shuffled(spec: SourceSpec, count: int) -> list[int]:
    """Return the numbers of so many rows in the order that a spec draws them in."""
    order = list(range(count))
    if spec.shuffle_seed is not None:
        # the legacy generator, because the papers' indices come from it
        np.random.RandomState(spec.shuffle_seed).shuffle(order)
    return order
