"""ROUGE F1 by the rouge-score package, without stemming, 0 to 100."""

from functools import lru_cache
from typing import Any

KINDS = ("rouge1", "rouge2", "rougeL")


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=False)


def rouge(reference: str, guess: str) -> dict[str, float]:
    """Return ROUGE-1, 2 and L F1 of one pair, 0 to 100.

    ROUGE sees letters and digits only, without case: 100 is not an exact text.
    """
    found = _scorer().score(reference, guess)
    return {kind: 100.0 * float(found[kind].fmeasure) for kind in KINDS}


def words(text: str) -> list[str]:
    """Return the words as rouge-score counts them."""
    from rouge_score.tokenize import tokenize

    return list(tokenize(text, None))


def has_bigram(reference: str) -> bool:
    """Return whether ROUGE-2 is defined for a reference (it needs two words)."""
    return len(words(reference)) > 1
