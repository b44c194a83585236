"""A decoder's sentences from its words, by what came back to each in the first block."""

from typing import Any

from gradaudit.leakage.decoding.past import read_sentences
from gradaudit.leakage.uneven.decoded_change import DecodedChange
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import NOT_EXPLAINED
from gradaudit.types import Observation, Reconstruction

LAST_MISSING = "the last word of a sentence leaves nothing in block 0 and is missing"


def followed(seen: Observation, changes: Entries, found: DecodedChange, details: dict[str, Any]) -> Reconstruction:
    """Return a decoder's sentences, grown from words that no dropout touched; without queries and keys, the words.

    Args:
        seen: the observation.
        changes: entries of its block 0.
        found: the words.
        details: for the record.
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
    if tree.open_:
        notes.append(f"{len(tree.open_)} of {len(found.rows)} words are not explained by where they were put")
    if model.spec.task == "causal-lm":
        notes.append(LAST_MISSING)
    return Reconstruction(tuple(told), None, tuple(told.values()), tuple(notes), details)
