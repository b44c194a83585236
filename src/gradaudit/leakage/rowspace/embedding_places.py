"""One sentence from the embedding tables' gradients alone: a position's row is that of the word that stands there.

A word's and a position's vectors are added before anything else happens, so that the same signal comes back to both. Of
one sentence every position has one signal, and a word's row is the sum of those of its positions: C N = M with C of
zeros and ones, which least squares finds. It holds for any loss and any dropout behind the sum.
"""

from __future__ import annotations

import torch

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.decoding.agreement import doubted, overfull
from gradaudit.leakage.observed import sgd_steps
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.types import NamedWord, Observation, Reconstruction

_INSIDE = 0.1
"""A word's row this near the span of the positions' rows, relative to its norm, is a sum of them: right ones leave 4e-8
(MiniLM and MPNet, 96 sentences of 5 to 60 tokens, dropout on and off), random directions sqrt(1 - n / d)."""
_EXACT = 1e-3
"""A proof asks that shares are this near to 0 and 1, and rows to their span: right ones are within 4e-8, as above."""


@torch.no_grad()
def sentence_of_tables(seen: Observation) -> Reconstruction | None:
    """Return the sentence of an update of one, from its word and position tables.

    Steps of plain SGD add up, so that a change of weights is read as a gradient is. A defense that scales the rows of
    the word table leaves their directions, and these tell the sentence, without a proof.

    Args:
        seen: an update.

    Returns:
        None where one of the tables was not sent, or no sentence makes what was: of several sentences a position has
        several signals, and their sum tells nothing of each.
    """
    model = seen.model
    tables = [seen.tensors.get(name) for group in ("word", "position") for name in model.group(group)]
    if len(tables) != 2 or tables[0] is None or tables[1] is None:
        return None
    if seen.kind != "gradient" and not sgd_steps(seen):
        return None
    words, places = tables[0].double(), tables[1][model.first_position_row :].double()
    length = int(torch.where(places.any(1))[0].max()) + 1 if bool(places.any()) else 0
    places = places[:length]
    if not 2 <= length < model.width or not bool(places.any(1).all()):
        return None
    touched = torch.where(words.any(1))[0]
    rows = words[touched]
    shares = rows @ torch.linalg.pinv(places)  # [T, n]
    left = (rows - shares @ places).norm(dim=1) / rows.norm(dim=1)
    inside = left < _INSIDE
    if not bool(inside.any()):
        return None
    touched, shares, left = touched[inside], shares[inside], left[inside]
    sizes = shares.abs().amax(1, keepdim=True)
    stands = (shares / sizes).round()
    if not bool((stands.sum(0) == 1).all()) or bool((stands.abs().sum(0) != 1).any()):
        return None
    off = max(float((shares - stands).abs().max()), float(left.max()))
    sentence = tuple(touched[stands.argmax(0)].tolist())
    notes = ["read from the word and the position table alone"]
    certificates = ["proven" if off < _EXACT else "likely"]
    certificates = doubted(certificates, overfull(seen, [sentence], length), notes)
    return Reconstruction((sentence,), certificates=tuple(certificates), notes=tuple(notes), details={"off": off})


def words_alone(seen: Observation) -> Reconstruction:
    """Return the words of a batch, of no sentence and without order: what is left to read where nothing else is.

    Args:
        seen: an update.

    Raises:
        NotSupportedError: the word table does not tell them either.
    """
    words = words_of(seen)
    if words is None:
        raise NotSupportedError(
            "attack 'decode' needs query, key or value gradients of block 0, a matrix of any block of an encoder's "
            "clean gradient with dropout off, or the word table; none of them is in this update"
        )
    special = seen.model.special.ids
    named = tuple(NamedWord(token, certain=True) for token in words.tolist() if token not in special)
    return Reconstruction(words=named, notes=("the word table tells the batch's words, all of them, and no sentence",))
