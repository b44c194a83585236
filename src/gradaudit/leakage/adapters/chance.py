"""How much of directions chance explains, and how much may hide in their errors: what makes a word certain."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_SURE, _SPREAD = 36.0, 6.0
"""For words to be certain, any other one in a word's place must cost more of chi^2, and no word left out may explain
more of what is left, than chance does: one square a line, so many standard deviations of their sum, and for the best
of 49,152 words 2 log V = 22 with some room."""
ALIKE = 0.05
"""A word of which less than this share is left resembles those already taken too much to be judged by it."""
FULL = 0.9
"""Words taken at most, as a share of the dimensions: with as many words as dimensions anything is explained."""
RARE = math.log(1e-6)
"""Sets of words expected to explain the directions by chance for a word to be certain, as a logarithm."""
_MIMIC = 9.0
"""What one word explains might be what several missed ones send, of which the rest hides in the errors: a certain word
explains so many times what can hide. The missed ones would have to be like it by nine tenths (measured, SmolLM2: sums
of two to ten words of a batch are by .72 at most, the best sums of five words for sixty others by .55 to .90)."""


def beyond_chance(lines: int) -> float:
    """Return the squares that so many lines of errors explain of what is theirs in no case."""
    return lines + _SPREAD * math.sqrt(2 * lines) + _SURE


def could_hide(chi2: float, free: int, told: bool = False) -> float:
    """Return how many squares a word must explain lest it stand for others that the errors hide.

    Errors that are reckoned may be smaller than that, so that all that is left may be what was missed. Noise that was
    told leaves its own share, unless so little is left that it was told too large (clients that a server summed).

    Args:
        chi2: what all words leave, per degree of freedom.
        free: degrees of freedom.
        told: the errors are noise of a size that was told.
    """
    chance = _SPREAD * math.sqrt(2 * free)
    own = free if told and (1 - chi2) * free < chance else 0
    return _MIMIC * (max(chi2 * free - own, 0.0) + chance)


def likest(rows: Tensor, held: Tensor, words: Sequence[int], never: Sequence[int]) -> Tensor:
    """Return how much of each held word's own part, which no other held row has, another word would have at most.

    Args:
        rows: [V, d] of the vocabulary.
        held: [r, d] rows that are held, the words' at the end.
        words: their n ids.
        never: ids that no sentence has.

    Returns:
        [n] shares, 0 to 1.
    """
    if not words:
        return rows.new_zeros(0)
    q, t = torch.linalg.qr(held.T)
    inverse = torch.linalg.solve_triangular(t, torch.eye(len(held)).to(t), upper=True)
    lone = torch.nn.functional.normalize(inverse @ q.T, dim=1)[len(held) - len(words) :]
    beside = (rows @ lone.T).square()
    outside = (rows - (rows @ q) @ q.T).square().sum(1, keepdim=True)
    share = beside / (beside + outside).clamp_min(1e-300)
    share[[*words, *never]] = 0
    most: Tensor = share.amax(0)
    return most


def log_sets(every: int, words: int) -> float:
    """Return the logarithm of how many sets of so many words there are."""
    return math.lgamma(every + 1) - math.lgamma(words + 1) - math.lgamma(every - words + 1)
