"""What stands out of a row space that noise or compression has filled: words by their evidence, put in order."""

from dataclasses import dataclass

import torch

from gradaudit.leakage.decoding.order import order_words
from gradaudit.leakage.decoding.several import place_words, unmix
from gradaudit.leakage.rowspace.deflation import matrices
from gradaudit.leakage.rowspace.ranking import rank_words
from gradaudit.leakage.rowspace.subspace import Span, stack
from gradaudit.types import Observation, Reconstruction

FULL = "not identifiable: the row space is full (as many tokens as the width, or noise)"


@dataclass(frozen=True)
class Limits:
    """How much is taken and tried.

    Args:
        most_words: words taken at most, times the batch size.
        false_discoveries: share of the words taken that may be wrong.
        order_evaluations: gradients computed to put words in order.
        blocks: whose gradients an order is held against.
    """

    most_words: int
    false_discoveries: float
    order_evaluations: int
    blocks: int


def out_of_noise(
    seen: Observation, first: Span, limits: Limits, rng: torch.Generator, beside: Reconstruction | None = None
) -> Reconstruction:
    """Return what stands out of a full row space: sentences where words can be placed, else a bag; guesses.

    Args:
        seen: an update.
        first: row space of its block 0.
        limits: how much is taken and tried.
        rng: for the orders tried.
        beside: one sentence that rows made; of it and what the words make that is returned which is more like the
            gradient.
    """
    stacked, roles = stack(seen, 0)
    assert stacked is not None
    size = seen.knowledge.batch_size or 1
    most = min(limits.most_words * size, seen.model.width - 1)
    words = rank_words(seen.model, stacked, most, limits.false_discoveries)
    details = first.told() | {"words": len(words)}
    if not words:
        return beside or Reconstruction(sequences=(), notes=(FULL,), details=details)
    note = f"{FULL}; {len(words)} words stand out of it"
    special = seen.model.special
    ids, sent = [w.token for w in words], matrices(seen, limits.blocks)
    if size == 1 and orderable(seen):
        length = seen.knowledge.lengths[0] if seen.knowledge.lengths else None
        others = beside.sequences if beside else ()
        found = order_words(seen.model, stacked, sent, ids, limits.order_evaluations, rng, length, others)
        if beside and beside.sequences == (found.tokens,):
            return beside
        details |= {"likeness": round(found.likeness, 4)}
        note += ", and were ordered by the likeness of the sentence's own gradient"
        labels = None if found.label is None else (found.label,)
        return Reconstruction((found.tokens,), labels, ("guess",), (note,), details)
    if size > 1 and orderable(seen) and not seen.model.causal and {"q", "k"} <= set(roles):
        placed, places = place_words(seen.model, stacked, roles, ids, size)
        several = unmix(seen.model, placed, places, sent, ids, size, limits.order_evaluations, rng)
        if several:
            note += ", and were put to sentences by the likeness of the sentences' own gradients"
            certificates = ("guess",) * len(several)
            return Reconstruction(tuple(s.tokens for s in several), None, certificates, (note,), details)
    note += ", in the order of their evidence, without order or sentence"
    bags = [tuple(w.token for w in words[start::size]) for start in range(size)]
    bags = [(*special.prefix, *bag, *special.suffix)[: seen.model.max_length] for bag in bags if bag]
    return Reconstruction(tuple(bags), None, ("guess",) * len(bags), (note,), details)


def orderable(seen: Observation) -> bool:
    """Say whether words can be placed: one gradient, fixed positions.

    Dropout lowers the likeness of the right order and of wrong ones alike (MiniLM, one sentence, noise of .01: 0.13
    in place of 0.2, and the order is still the right one).
    """
    return seen.kind == "gradient" and seen.model.absolute_positions
