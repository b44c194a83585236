"""ROUGE F1 by the rouge-score package, without stemming, 0 to 100: over the words of any script."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

KINDS = ("rouge1", "rouge2", "rougeL")
_WITHOUT_SPACES = (
    (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x30FF),  # Han radicals, kana
    (0x31F0, 0x31FF),
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),
    (0x1B000, 0x1B16F),
    (0x20000, 0x3FFFF),
)
"""Ranges of characters that are words of their own here, since no space says where theirs end."""


@dataclass(frozen=True)
class _Tokenizer:
    """What the package asks for its words."""

    tokenize: Callable[[str], list[str]]


def _characters(text: str) -> list[str]:
    return [c for c in text if not c.isspace()]


@lru_cache(maxsize=3)
def _scorer(split: Callable[[str], list[str]] | None) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=False, tokenizer=None if split is None else _Tokenizer(split))


def rouge(reference: str, guess: str) -> dict[str, float]:
    """Return ROUGE-1, 2 and L F1 of one pair, 0 to 100.

    ROUGE sees words only, without case: 100 is not an exact text. Of a reference without words (punctuation alone) it
    compares the characters: a text that was read exactly must not score 0.
    """
    return _scores(words if words(reference) else _characters, reference, guess)


def ascii_rouge(reference: str, guess: str) -> dict[str, float]:
    """Return the same as the papers count: a to z and 0 to 9 alone are text, so that other scripts score 0."""
    return _scores(None, reference, guess)


def _scores(split: Callable[[str], list[str]] | None, reference: str, guess: str) -> dict[str, float]:
    found = _scorer(split).score(reference, guess)
    return {kind: 100.0 * float(found[kind].fmeasure) for kind in KINDS}


def words(text: str) -> list[str]:
    """Return the words that ROUGE counts, without case: of plain English those that the rouge-score package finds.

    Letters and digits of any script make words, with the marks on them. A character of a script without spaces is a
    word, and so is a symbol that is neither ASCII nor punctuation (an emoji).
    """
    found: list[str] = []
    inside = follows = False  # in a word that goes on; behind something that a mark may stand on
    for c in text.lower():
        kind = unicodedata.category(c)
        if kind[0] == "M" and follows:
            found[-1] += c
        elif kind[0] in "LMN":
            alone = any(low <= ord(c) <= high for low, high in _WITHOUT_SPACES)
            if inside and not alone:
                found[-1] += c
            else:
                found.append(c)
            inside, follows = not alone, True
        elif kind[0] in "PZ" or kind in ("Cc", "Cf") or c.isascii():
            # what is invisible (a joiner) ends nothing
            inside, follows = (inside, follows) if kind == "Cf" else (False, False)
        else:
            found.append(c)
            inside, follows = False, True
    return found


def has_bigram(reference: str) -> bool:
    """Return whether ROUGE-2 is defined for a reference (it needs two words)."""
    return len(words(reference)) > 1
