"""Rows that no dropout touched, in a row space that is not known exactly."""

from collections.abc import Sequence

import torch

from gradaudit.leakage.decoding.rows import EMPTY, INSIDE, MaskedInputs, Row, Search
from gradaudit.leakage.rowspace.subspace import cut_above_noise
from gradaudit.leakage.rowspace.vocabulary import measured_tokens
from gradaudit.progress import step

_LOOKED = 8
"""Words measured at a position, in times the directions: more of them wrong than right."""


def whole_rows(inputs: MaskedInputs, how: Search, start: Sequence[Row]) -> list[Row]:
    """Return the rows that no dropout touched: words in the row space as they are, those that are known first.

    Most words are wrong and tell where wrong ones lie, at every position anew.

    Args:
        inputs: the inputs of a model and a span that is not known exactly.
        how: how far to look.
        start: rows that are known.
    """
    model, span = inputs.model, inputs.span
    found, known = list(start), {(row.position, row.token) for row in start}
    special = model.special
    never = special.ids - {*special.prefix, *special.suffix}
    empty = 0
    for position in range(min(how.max_length, model.max_length) if model.absolute_positions else 1):
        ids = inputs.near(position, min(_LOOKED * (span.rank + 1), model.vocabulary_size))
        held = torch.tensor([t for p, t in known if p == position], dtype=torch.long, device=ids.device)
        near = measured_tokens(model, ids[~torch.isin(ids, held)], span, position)
        # rows that are held fixed lie in the span exactly, and say nothing of how far off others are
        limit = cut_above_noise(near.residuals, near.expected, max(1, span.rank - len(start)), INSIDE)
        fresh = [t for t in near.below(limit).ids.tolist() if t not in never]
        if fresh:
            clean = inputs.clean(position, torch.tensor(fresh, device=ids.device))
            found += [
                Row(t, position, torch.ones_like(x, dtype=torch.bool), x) for t, x in zip(fresh, clean, strict=True)
            ]
        step("decode: rows", len(found), span.rank)
        empty = 0 if fresh or len(held) else empty + 1
        if empty == EMPTY:
            break
    return found
