"""Material of the tests: made-up rows, and batches of the sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gradaudit.data.spec import DataSpec
from gradaudit.data.text import SAMPLE, TextRows, load_rows, make_batch
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel
from gradaudit.types import Batch

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


def sample_batch(model: TextModel, first: int, size: int) -> Batch:
    """Return some sentences of the sample, with their labels."""
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    return make_batch(model, rows.texts[first : first + size], rows.labels[first : first + size])


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
