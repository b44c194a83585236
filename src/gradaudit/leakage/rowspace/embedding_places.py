"""One sentence from the embedding tables' gradients alone: a position's row is that of the word that stands there.

A word's and a position's vectors are added before anything else happens, so that the same signal comes back to both. Of
one sentence every position has one signal, and a word's row is the sum of those of its positions: C N = M with C of
zeros and ones, which least squares finds. It holds for any loss and any dropout behind the sum. Steps of SGD add up. An
optimizer that acts on each entry by itself, as Adam does, gives both tables the same step where a word stands once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.decoding.agreement import doubted, overfull
from gradaudit.leakage.observed import sgd_steps
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.types import NamedWord, Observation, Reconstruction

_INSIDE = 0.1
"""A word's row this near the span of the positions' rows, relative to its norm, is a sum of them: right ones leave 4e-8
(MiniLM and MPNet, 96 sentences of 5 to 60 tokens, dropout on and off), random directions sqrt(1 - n / d)."""
_EXACT = 1e-3
"""A proof asks that shares are this near to 0 and 1, and rows to their span: right ones are within 4e-8, as above, and
within 1e-4 behind steps of AdamW at 5e-5, which are rounded as the weights are. Any other sentence is off by 1."""
_ROUNDED = 2.0
"""Rounding of a weight a step, in epsilons of the largest of its row: half of one when it decays, and room for what is
lost where the decay is taken off."""
_STEPS = 10
"""Steps that are reckoned with where their number is not told: rounding of 20 epsilons is far below a step's size."""
_TOLD = 0.5
"""Least share of the positions that a word's row must tell before the others are guessed."""


@torch.no_grad()
def sentence_of_tables(seen: Observation) -> Reconstruction | None:
    """Return the sentence of an update of one, from its word and position tables.

    A defense that scales the rows of the word table leaves their directions, and these tell the sentence, without a
    proof. Behind an optimizer other than SGD a word that stands more than once is the one whose row is most like its
    positions' rows, without a proof, too.

    Args:
        seen: an update.

    Returns:
        None where one of the tables was not sent, or no sentence makes what was: of several sentences a position has
        several signals, and their sum tells nothing of each.
    """
    model = seen.model
    names = [name for group in ("word", "position") for name in model.group(group) if name in seen.tensors]
    if len(names) != 2:
        return None
    rows, places = (_moved(seen, name) for name in names)
    places = places[model.first_position_row :]
    length = int(places.any(1).nonzero().max()) + 1 if bool(places.any()) else 0
    places = places[:length]
    if not 2 <= length < model.width or not bool(places.any(1).all()):
        return None
    touched = torch.where(rows.any(1))[0]
    rows = rows[touched]
    shares = rows @ torch.linalg.pinv(places)  # [T, n]
    left = (rows - shares @ places).norm(dim=1) / rows.norm(dim=1)
    inside = left < _INSIDE
    stands = (shares / shares.abs().amax(1, keepdim=True)).round()
    stands[~inside] = 0
    told = (stands.sum(0) == 1) & (stands.abs().sum(0) == 1)
    found = stands.argmax(0)
    if not bool(told.all()):
        adds_up = seen.kind == "gradient" or bool(sgd_steps(seen))
        again = int((~inside).sum())  # words that stand twice or more
        if adds_up or float(told.double().mean()) < _TOLD or not 0 < 2 * again <= int((~told).sum()):
            return None
        alike = F.normalize(rows, dim=1) @ F.normalize(places, dim=1).mT
        alike[inside] = -torch.inf
        found = torch.where(told, found, alike.argmax(0))
    off = max(float((shares - stands)[inside].abs().max()), float(left[inside].max()))
    sentence = tuple(touched[found].tolist())
    notes = ["read from the word and the position table alone"]
    certificates = ["proven" if bool(told.all()) and off < _EXACT else "likely"]
    if seen.kind == "gradient":  # a change of weights has other ranks
        certificates = doubted(certificates, overfull(seen, [sentence], length), notes)
    return Reconstruction((sentence,), certificates=tuple(certificates), notes=tuple(notes), details={"off": off})


def _moved(seen: Observation, name: str) -> Tensor:
    """Return what was sent of a table, float64, without what weight decay took off every row."""
    sent, before = seen.tensors[name], seen.model.parameters()[name].detach().double()
    weighty = before.any(1)  # some models' padding has a row of zeros
    if seen.kind == "gradient" or not bool(weighty.any() and sent[weighty].any(1).all()):
        return sent.double()
    shrunk = (sent * before).sum(1)[weighty] / before.square().sum(1)[weighty]
    decay = shrunk.median()  # most rows no token reads
    moved = sent - decay * before
    rounding = _ROUNDED * (seen.knowledge.steps or _STEPS) * torch.finfo(sent.dtype).eps * before.abs().amax(1)
    moved[moved.abs().amax(1) <= rounding] = 0
    return moved


def words_alone(seen: Observation) -> Reconstruction:
    """Return the words of a batch, of no sentence and without order: what is left to read where nothing else is.

    Args:
        seen: an update.

    Raises:
        NotSupportedError: the word table does not tell them either.
    """
    words = words_of(seen)
    if words is None:
        dropped = " (dropout was on)" if seen.knowledge.dropout else ""
        raise NotSupportedError(
            "attack 'decode' needs query, key or value gradients of block 0, a matrix of any block of a gradient or a "
            "step (of a decoder: of SGD) with dropout off, or on and of an encoder's gradient of two sentences at "
            f"most, or the word table; none of them is in this update{dropped}"
        )
    special = seen.model.special.ids
    named = tuple(NamedWord(token, certain=True) for token in words.tolist() if token not in special)
    return Reconstruction(words=named, notes=("the word table tells the batch's words, all of them, and no sentence",))
