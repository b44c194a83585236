"""Rows joined and cut into windows of equally many tokens, as language models are trained on them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from gradaudit.data.text import TextRows
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel

T = TypeVar("T")
_FEW = 5
"""Words in a row that two texts may share by chance, and one more."""


def windows(rows: TextRows, model: TextModel, size: int, whole: bool) -> TextRows:
    """Return contiguous windows of the tokens of all rows, in their order; what is left over at the end is dropped.

    Args:
        rows: the texts; blank ones have no token.
        model: its tokenizer cuts; the frame of special tokens is left out.
        size: tokens a window.
        whole: leave out windows with an unknown token, which no attack could read and no text can show. Audited windows
            are whole; public ones need not be, as the attacker may learn from any.

    Raises:
        BadInputError: windows longer than the model takes, or not one window.
    """
    if size > model.max_length:
        raise BadInputError(f"window = {size} is longer than the model takes ({model.max_length} tokens)")
    before, behind = len(model.special.prefix), len(model.special.suffix)
    tokens: list[int] = []
    for text in rows.texts:
        if text.strip():
            row = model.tokens(text)
            tokens += row[before : len(row) - behind]
    cut = [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
    if whole and model.unknown is not None:
        cut = [row for row in cut if model.unknown not in row]
    if not cut:
        raise BadInputError(f"{rows.where} has no window of {size} tokens that the model knows; lower window")
    where = f"{rows.where}, windows of {size} tokens"
    return replace(rows, texts=tuple(map(model.decode, cut)), labels=None, classes=(), where=where, ids=tuple(cut))


def apart(rows: TextRows, private: TextRows, numbers: Iterable[int]) -> list[int]:
    """Return the numbers of public rows that share nothing with some private ones.

    A text that occurs in both is left out, whatever its spacing, case and punctuation, and so is one that shares a run
    of five words or more with a private one, and of half of the shorter one's words: data sets hold parts of their
    texts as texts. A window is left out when it shares a run of half its tokens with a private one, so that another
    start of the cut brings nothing back.

    Args:
        rows: public.
        private: where the audited batches are from.
        numbers: of the private rows in audited batches.
    """
    chosen = list(dict.fromkeys(numbers))
    if rows.ids is None or private.ids is None:
        hidden = [_words(private.texts[n]) for n in chosen]
        letters, runs = {"".join(words) for words in hidden}, {run for words in hidden for run in _runs(words, _FEW)}

        def shares_nothing(text: str) -> bool:
            words = _words(text)
            if "".join(words) in letters:
                return False
            if runs.isdisjoint(_runs(words, _FEW)):
                return True
            return not any(_overlap(words, other) for other in hidden)

        return [n for n, text in enumerate(rows.texts) if text.strip() and shares_nothing(text)]
    run = max(1, len(private.ids[0]) // 2)
    known = {piece for n in chosen for piece in _runs(private.ids[n], run)}
    return [n for n, row in enumerate(rows.ids) if known.isdisjoint(_runs(row, run))]


def _words(text: str) -> list[str]:
    # as an uncased tokenizer would see them: "It's" and "it 's" are the same
    return re.findall(r"[^\W_]+", text.casefold())


def _overlap(some: Sequence[str], others: Sequence[str]) -> bool:
    run = max(_FEW, -(-min(len(some), len(others)) // 2))
    return not set(_runs(some, run)).isdisjoint(_runs(others, run))


def _runs(row: Sequence[T], size: int) -> list[tuple[T, ...]]:
    return [tuple(row[start : start + size]) for start in range(len(row) - size + 1)]
