"""Made-up material of the data tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gradaudit.data.spec import DataSpec
from gradaudit.data.text import TextRows, load_rows
from gradaudit.errors import BadInputError

TEXTS = ['She said "run", twice.', "Zoë,\tMüller\nand I", "plain\r\nlines", "'quoted'"]
LABELS = [7, -1, 7, 3]


def refusal(spec: DataSpec, base: Path) -> str:
    """Return the one-line sentence a spec is refused with."""
    with pytest.raises(BadInputError) as caught:
        load_rows(spec, base)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "; " in sentence or sentence.endswith("?"), "no advice at the end"
    return sentence


def rows_of(*texts: str) -> TextRows:
    return TextRows(texts, None, (), "somewhere", "")


class StubModel:
    """One id a word; longer texts are cut."""

    def __init__(self, task: str = "classification", labels: int = 2) -> None:
        self.spec = SimpleNamespace(task=task, labels=labels)
        self.special = SimpleNamespace(pad=9)

    def encode(self, text: str) -> tuple[list[int], bool]:
        words = text.split()
        return [1, *(len(word) + 100 for word in words[:3]), 2], len(words) > 3
