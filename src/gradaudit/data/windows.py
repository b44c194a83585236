"""Rows joined and cut into windows of equally many tokens, as language models are trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradaudit.data.source import Rows
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel


def windows(rows: Rows, model: TextModel, size: int, whole: bool) -> Rows:
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


def apart(rows: Rows, private: Rows, numbers: Iterable[int]) -> list[int]:
    """Return the numbers of public rows that share nothing with some private ones.

    A text that occurs in both is left out, whatever its spacing. A window is left out when it shares a run of half its
    tokens with a private one, so that another start of the cut brings nothing back.

    Args:
        rows: public.
        private: where the audited batches are from.
        numbers: of the private rows in audited batches.
    """
    chosen = list(dict.fromkeys(numbers))
    if rows.ids is None or private.ids is None:
        texts = {_plain(private.texts[n]) for n in chosen}
        return [n for n, text in enumerate(rows.texts) if text.strip() and _plain(text) not in texts]
    run = max(1, len(private.ids[0]) // 2)
    known = {piece for n in chosen for piece in _runs(private.ids[n], run)}
    return [n for n, row in enumerate(rows.ids) if known.isdisjoint(_runs(row, run))]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _runs(row: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(row[start : start + size]) for start in range(len(row) - size + 1)]
