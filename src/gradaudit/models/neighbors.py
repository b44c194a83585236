"""Stand-ins of words: near a word for the model, another word for a reader; and the words that one may stand for."""

from collections.abc import Sequence
from difflib import SequenceMatcher

import torch
from torch import Tensor

from gradaudit.models.base import TextModel

_LOOKED_AT = 256
"""Nearest tokens among which a word's stand-ins are sought."""
_RELATED = 0.6
"""Spellings that share so much are forms of one word ("walks", "walked")."""
_STOOD_FOR = 1024
"""Nearest tokens among which the words that a stand-in may stand for are sought."""
_PASSED_OVER = 40
"""Related spellings that may lie between a word and its last stand-in."""
_AT_ONCE = 64
"""Words whose likenesses to the whole vocabulary are held in memory together."""


def stand_ins(model: TextModel, word: int, candidates: int, alike: float) -> list[int]:
    """Return a word's stand-ins, nearest first; none where all that is near means or spells the same.

    Args:
        model: whose word vectors say what is near.
        word: a token id.
        candidates: stand-ins at most.
        alike: largest cosine of a word and its stand-in.
    """
    _, near = _nearest(model, word, alike, _LOOKED_AT)
    pieces = model.pieces([word])
    found: list[int] = []
    for other in near.tolist():
        if len(found) == candidates:
            break
        if other in model.special.ids or not model.content([other]):
            continue
        if not _related(pieces, model.pieces([other])):
            found.append(other)
    return found


@torch.no_grad()
def stood_for(model: TextModel, stand_in: int, candidates: int, alike: float) -> dict[int, int]:
    """Return the words that have a token among their stand-ins, with how many stand-ins each of them has.

    Args:
        model: whose word vectors say what is near.
        stand_in: the token id that was read.
        candidates, alike: see `stand_ins`.
    """
    table, words = _nearest(model, stand_in, alike, _STOOD_FOR)
    # how many tokens come before it in each word's own list: most words are out of the question by that
    before = []
    for some in torch.split(words, _AT_ONCE):
        likes = table[some] @ table.T
        mine = likes[:, stand_in, None]
        before.append(((likes <= alike) & (likes > mine)).sum(1))
    possible = words[torch.cat(before) < candidates + _PASSED_OVER] if before else words
    found = {}
    for word in possible.tolist():
        if word in model.special.ids or not model.content([word]):
            continue
        standing = stand_ins(model, word, candidates, alike)
        if stand_in in standing:
            found[word] = len(standing)
    return found


def _nearest(model: TextModel, word: int, alike: float, most: int) -> tuple[Tensor, Tensor]:
    """Return all word vectors at unit length, and the nearest words at most so alike, nearest first."""
    table = torch.nn.functional.normalize(model.word_vectors(), dim=1)
    like = table @ table[word]
    near = torch.where(like <= alike, like, -torch.inf).topk(min(most, len(table)))
    return table, near.indices[near.values > -torch.inf]


def _related(one: Sequence[str], other: Sequence[str]) -> bool:
    """Say whether two tokens are spelled as forms of one word, or one is a part of the other."""
    a, b = ("".join(c for c in "".join(part).lower() if c.isalnum()) for part in (one, other))
    if not a or not b:
        return a == b
    return a in b or b in a or SequenceMatcher(None, a, b).ratio() > _RELATED
