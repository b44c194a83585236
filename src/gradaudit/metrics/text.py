"""Scores of recovered text against the originals: ours, and the papers' own for comparison."""

import difflib
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradaudit.metrics.align import assign
from gradaudit.metrics.rouge import KINDS, ascii_rouge, has_bigram, rouge
from gradaudit.record import Mark

Scores = dict[str, float | None]


@dataclass(frozen=True)
class ScoredSentence:
    """One sentence as both sides of a comparison need it.

    Args:
        ids: token ids without special tokens.
        text: their text.
        with_special: the text with special tokens kept, for the papers' scorings that keep them.
    """

    ids: tuple[int, ...]
    text: str
    with_special: str


@dataclass(frozen=True)
class AlignedPair:
    """An original with its guess (None: nothing was recovered for it) and ROUGE, 0 to 100."""

    original: ScoredSentence
    guess: ScoredSentence | None
    rouge: dict[str, float]


def align(originals: Sequence[ScoredSentence], guesses: Sequence[ScoredSentence]) -> list[AlignedPair]:
    """Return one pair an original: one to one, Hungarian on ROUGE-L; equal token ids are preferred among ties."""
    table = [[rouge(o.text, g.text) for g in guesses] for o in originals]
    # ROUGE does not see case, nor punctuation beside words: among equals, the guess with equal tokens must win
    similarity = [
        [cell["rougeL"] + 1e-3 * token_accuracy(o.ids, g.ids) for g, cell in zip(guesses, row, strict=True)]
        for o, row in zip(originals, table, strict=True)
    ]
    zero = dict.fromkeys(KINDS, 0.0)
    return [
        AlignedPair(o, None, zero) if at is None else AlignedPair(o, guesses[at], table[row][at])
        for row, (o, at) in enumerate(zip(originals, assign(similarity), strict=True))
    ]


def token_accuracy(original: Sequence[int], guess: Sequence[int]) -> float:
    """Return the share (0 to 100) of positions with the right token, over the longer of the two texts."""
    longest = max(len(original), len(guess))
    if longest == 0:
        return 100.0
    return 100.0 * sum(a == b for a, b in zip(original, guess, strict=False)) / longest


def score(pairs: Sequence[AlignedPair]) -> Scores:
    """Return a batch's scores (0 to 100), each the mean over its originals; missing guesses count 0.

    ROUGE-2 is the mean over originals of two words and more, None when there are none.
    """
    n = len(pairs)
    bigram = [p for p in pairs if has_bigram(p.original.text)]
    return {
        "rouge1": sum(p.rouge["rouge1"] for p in pairs) / n,
        "rouge2": sum(p.rouge["rouge2"] for p in bigram) / len(bigram) if bigram else None,
        "rougeL": sum(p.rouge["rougeL"] for p in pairs) / n,
        "token_accuracy": sum(token_accuracy(p.original.ids, p.guess.ids) for p in pairs if p.guess) / n,
        "exact": 100.0 * sum(p.guess is not None and p.guess.ids == p.original.ids for p in pairs) / n,
    }


def _with_replacement(originals: Sequence[ScoredSentence], guesses: Sequence[ScoredSentence]) -> Scores:
    """Each original takes its best guess for each score, with replacement (Grab; DAGER on decoders)."""
    table = [[ascii_rouge(o.text, g.text) for g in guesses] for o in originals]
    return {k: sum(max((c[k] for c in row), default=0.0) for row in table) / len(originals) for k in KINDS}


def _special_kept(originals: Sequence[ScoredSentence], guesses: Sequence[ScoredSentence]) -> Scores:
    """Special tokens kept, Hungarian on ROUGE-1 (LAMP, partial gradients)."""
    table = [[ascii_rouge(o.with_special, g.with_special) for g in guesses] for o in originals]
    pairing = assign([[cell["rouge1"] for cell in row] for row in table])
    picked = [None if at is None else table[row][at] for row, at in enumerate(pairing)]
    return {k: sum(cell[k] for cell in picked if cell) / len(originals) for k in KINDS}


def _ascii_words(originals: Sequence[ScoredSentence], guesses: Sequence[ScoredSentence]) -> Scores:
    """As ours, one to one, over a to z and digits alone: other scripts score 0 (the rouge-score package)."""
    pairs = align(originals, guesses)
    cells = [ascii_rouge(p.original.text, p.guess.text) if p.guess else dict.fromkeys(KINDS, 0.0) for p in pairs]
    return {k: sum(cell[k] for cell in cells) / len(originals) for k in KINDS}


PUBLISHED: dict[str, Callable[[Sequence[ScoredSentence], Sequence[ScoredSentence]], Scores]] = {
    "max-with-replacement": _with_replacement,
    "special-tokens-kept": _special_kept,
    "ascii-words": _ascii_words,
}
"""The papers' own scorings, by the name used in [metrics] published = [...]."""

METRICS: dict[str, str] = {
    "rouge1": "ROUGE-1 F1, one to one, special tokens stripped",
    "rouge2": "ROUGE-2 F1, over originals of two words and more",
    "rougeL": "ROUGE-L F1, the score that originals and guesses are matched by",
    "token_accuracy": "share of positions with the right token, over the longer text",
    "exact": "share of sentences with equal token ids",
    "sensitive": "share of names and numbers of the originals found in their guesses",
    **{name: (fn.__doc__ or "").strip().splitlines()[0] for name, fn in PUBLISHED.items()},
}


def sensitive_share(spans: Sequence[Sequence[str]], guesses: Sequence[str | None]) -> float | None:
    """Return the share (0 to 100) of sensitive spans that occur in the guess of their sentence; None without spans.

    Letters and digits are compared, without case, accents and spacing, because tokenizers change all three.

    Args:
        spans: sensitive substrings of each original.
        guesses: recovered text for each original, None where nothing was.
    """
    total = sum(len(row) for row in spans)
    if total == 0:
        return None
    found = 0
    for row, guess in zip(spans, guesses, strict=True):
        haystack = _plain(guess or "")
        found += sum(f" {_plain(s)} " in f" {haystack} " for s in row)
    return 100.0 * found / total


def _plain(text: str) -> str:
    # uncased tokenizers also strip accents
    bare = "".join(c for c in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(c))
    return " ".join(re.findall(r"[^\W_]+", bare))


def split_words(text: str) -> list[str]:
    """Return a text's words and punctuation marks, as the report marks them."""
    return re.findall(r"\w+|[^\w\s]", text)


def marks(original: Sequence[str], guess: Sequence[str]) -> tuple[tuple[Mark, ...], tuple[Mark, ...]]:
    """Return (marks of the guess's words, marks of the original's words).

    "right": in the longest common order of both; "misplaced": the word is there, elsewhere; "wrong" (guess) and
    "missing" (original): it is not. A word counts as often as it occurs.
    """
    a, b = [w.lower() for w in original], [w.lower() for w in guess]
    on_a: list[Mark] = ["missing"] * len(a)
    on_b: list[Mark] = ["wrong"] * len(b)
    for block in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            on_a[block.a + k] = on_b[block.b + k] = "right"
    for i, word in enumerate(a):
        if on_a[i] == "missing":
            at = next((j for j, other in enumerate(b) if on_b[j] == "wrong" and other == word), None)
            if at is not None:
                on_a[i] = on_b[at] = "misplaced"
    return tuple(on_b), tuple(on_a)
