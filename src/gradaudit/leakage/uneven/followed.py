"""A decoder's sentences from its words: by what came back in the first block, and in doubt by the second."""

from typing import Any

import torch

from gradaudit.leakage.decoding.past import read_sentences
from gradaudit.leakage.uneven.decoded import DecodedChange
from gradaudit.leakage.uneven.deeper import BLOCK, held_deeper
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.types import Observation, Reconstruction

LAST_MISSING = "the last word of a sentence leaves nothing in block 0 and is missing"
NOT_EXPLAINED = "the rows that were decoded do not explain every weight's rounding: nothing is proven"
_PER_SENTENCE, _SETTLED = 5, 2.0
"""Directions of block 1 to start from, a sentence; and the chi^2 below which a decoder's sentences explain that block:
right ones leave 1.0 to 1.2, since gradients are rounded on their way back, and with one word missing 1.2 and more, with
a wrong sentence thousands (SmolLM2)."""


def followed(
    seen: Observation, changes: Entries, found: DecodedChange, details: dict[str, Any], rng: torch.Generator
) -> Reconstruction:
    """Return a decoder's sentences, grown from words that no dropout touched; without queries and keys, the words.

    Where the first block leaves some of them in doubt, those are taken that explain the second block.

    Args:
        seen: the observation.
        changes: entries of its block 0.
        found: the words.
        details: for the record.
        rng: for the draws of errors.
    """
    model, notes = seen.model, [] if found.told.whole else [NOT_EXPLAINED]
    words = [row.token for row in found.rows]
    signals = found.words(model, changes)
    if signals is None:
        notes.append("the changes of queries or keys of block 0 were not seen: the words cannot be put in order")
        return Reconstruction((tuple(words)[: model.max_length],), None, ("guess",), tuple(notes), details)
    tree = read_sentences(signals)
    proofs = found.told.whole and model.spec.task != "causal-lm"
    told: dict[tuple[int, ...], str] = {}
    for one in tree.sentences():
        unsure = "guess" if tree.open_ & set(one) else "likely"
        told[tuple(words[at] for at in one)] = "proven" if proofs and tree.certain(one) else unsure
    doubted = not told or any(sure != "proven" for sure in told.values())
    below = entries(seen, BLOCK) if doubted and found.told.whole and model.depth > BLOCK else None
    if below is not None:
        grown = [tuple(words[at] for at in one) for one in tree.grown]
        deeper = held_deeper(model, below, grown, words, _PER_SENTENCE * (seen.knowledge.batch_size or 1), rng)
        if deeper is not None and deeper.chi2 < _SETTLED:
            details |= {"chi2_block_1": round(deeper.chi2, 3)}
            sure = [proofs and one for one in deeper.proven]
            told = {
                one: "proven" if new or told.get(one) == "proven" else "likely"
                for one, new in zip(deeper.sentences, sure, strict=True)
            }
    elif tree.open_:
        notes.append(f"{len(tree.open_)} of {len(found.rows)} words are not explained by where they were put")
    if model.spec.task == "causal-lm":
        notes.append(LAST_MISSING)
    return Reconstruction(tuple(told), None, tuple(told.values()), tuple(notes), details)
