"""How much of directions chance explains, and how much may hide in their errors: what makes a word certain."""

import math

SURE, SPREAD = 36.0, 6.0
"""For words to be certain, any other one in a word's place must cost more of chi^2, and no word left out may explain
more of what is left, than chance does: one square a line, so many standard deviations of their sum, and for the best
of 49,152 words 2 log V = 22 with some room."""
RARE = math.log(1e-6)
"""Sets of words expected to explain the directions by chance for a word to be certain, as a logarithm."""
_MIMIC = 9.0
"""What one word explains might be what several missed ones send, of which the rest hides in the errors: a certain word
explains so many times what can hide. The missed ones would have to be like it by nine tenths (measured, SmolLM2: sums
of two to ten words of a batch are by .72 at most, the best sums of five words for sixty others by .55 to .90)."""


def beyond_chance(lines: int) -> float:
    """Return the squares that so many lines of errors explain of what is theirs in no case."""
    return lines + SPREAD * math.sqrt(2 * lines) + SURE


def could_hide(chi2: float, free: int) -> float:
    """Return how many squares a word must explain lest it stand for others that the errors hide.

    Args:
        chi2: what all words leave, per degree of freedom.
        free: degrees of freedom.
    """
    return _MIMIC * (max(chi2 - 1, 0.0) * free + SPREAD * math.sqrt(2 * free))


def log_sets(every: int, words: int) -> float:
    """Return the logarithm of how many sets of so many words there are."""
    return math.lgamma(every + 1) - math.lgamma(words + 1) - math.lgamma(every - words + 1)
