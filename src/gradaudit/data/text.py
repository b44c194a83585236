"""Where the private batches come from: the embedded sample, a local file, or a hub id."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradaudit.data.columns import labels_of, pick, texts_of
from gradaudit.data.files import found_file, hub_table, named_hub_table
from gradaudit.data.frequencies import drawn_texts
from gradaudit.data.named import NAMED, SetName, local_files, local_table
from gradaudit.data.rows import BINDERS, MARKS, READERS
from gradaudit.data.spec import PublicSpec, SourceSpec
from gradaudit.data.tables import Table, contents, decoded, jsonl, parquet, separated, some
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.base import TextModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch

SAMPLE = Path(__file__).parent / "sample.jsonl"
"""The embedded sample: original sentences with the columns text, label and sensitive."""

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".txt", ".tokens")
"""The file endings `load_rows` reads."""


_DRAWN = 20_000
"""Texts of words drawn by their frequency."""


@dataclass(frozen=True)
class TextRows:
    """Every row of a data source, in its own order.

    Args:
        texts: the texts as they stand in the source, empty ones included.
        labels: class number of each row, 0 to C - 1; None when no label column was named.
        classes: what the source calls class 0, 1, ..., in order; empty without labels.
        where: the source in words, for messages and records.
        sha256: of the file's bytes; for a hub data set, of its texts and labels.
        ids: token ids of each row where rows are windows; None where texts are still to be encoded.
    """

    texts: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]
    where: str
    sha256: str
    ids: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)


def load_rows(spec: SourceSpec, base: Path) -> TextRows:
    """Return all rows of the source a spec names.

    Blank lines of csv, tsv and jsonl files are not rows; in a txt file every line is one.

    Args:
        spec: the source and its columns.
        base: folder that a relative path starts from (the case file's); the current folder is tried after it.

    Raises:
        BadInputError: the source cannot be read, or does not hold what the spec asks for.
    """
    if spec.hub is not None:
        table, declared = hub_table(spec.hub, spec, spec.label)
        return _rows(table, spec.text, spec.label, declared, None)
    if spec.set_name is not None:
        return _named_rows(spec.set_name, spec)
    if spec.source == "digits":
        raise BadInputError('source = "digits" has images: set task = "image-classification", or leave source away')
    if spec.source == "words":
        assert isinstance(spec, PublicSpec)  # others refuse it
        texts = drawn_texts(spec.language, _DRAWN, spec.shuffle_seed or 0)
        where = f"words drawn by their frequency (wordfreq, {spec.language})"
        return TextRows(texts, None, (), where, hashlib.sha256("\n".join(texts).encode()).hexdigest())
    if spec.path is None:
        data = SAMPLE.read_bytes()
        label = "label" if spec.label is None else spec.label
        return _rows(jsonl(data, "the embedded sample"), spec.text, label, (), data)
    file = found_file(spec.path, base)
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        shown = f"the ending '{ending}'" if ending else "no ending"
        raise BadInputError(
            f"{spec.path} has {shown} and so no known format; rename or convert it to one of {', '.join(ENDINGS)}"
        )
    data = contents(file, spec.path)
    if ending in (".txt", ".tokens"):
        for name, asked in (("text", spec.text != "text"), ("label", spec.label is not None)):
            if asked:
                raise BadInputError(
                    f"{spec.path} is a txt file, one text a line without columns; "
                    f"remove {name}, or give a csv, tsv, jsonl or parquet file"
                )
        return _text_lines(data, spec.path)
    if ending == ".parquet":
        table = parquet(data, spec.path)
    elif ending == ".jsonl":
        table = jsonl(data, spec.path)
    else:
        table = separated(data, spec.path, spec.header, tab=ending == ".tsv")
    return _rows(table, spec.text, spec.label, (), data)


def make_batch(
    model: TextModel, texts: Sequence[str], labels: Sequence[int] | None, ids: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Return the batch a client trains on: encoded, padded on the right, on the CPU.

    A causal language model takes the text as its own label, so `labels` are left out of its batches.

    Args:
        model: encodes the texts and says which id pads.
        texts: the B texts; at least one.
        labels: class number of each text; None without.
        ids: token ids of each text; encoded when None.

    Raises:
        BadInputError: there is no text, or the labels do not fit a classification model.
    """
    if not texts:
        raise BadInputError("a batch needs at least one text; give one or more")
    classes: torch.Tensor | None = None
    if model.spec.task == "classification":
        if labels is None:
            raise BadInputError(
                "a classification model needs a label for each text and none are there; "
                "name the label column with label, or set the model's task to 'causal-lm'"
            )
        if len(labels) != len(texts):
            raise BadInputError(f"{len(texts)} texts came with {len(labels)} labels; give one label for each text")
        wrong = [label for label in labels if not 0 <= label < model.spec.labels]
        if wrong:
            raise BadInputError(
                f"label {wrong[0]} is outside the model's {model.spec.labels} classes "
                f"(0 to {model.spec.labels - 1}); set the model's labels to the number of classes in the data"
            )
        classes = torch.tensor(list(labels), dtype=torch.long)
    encoded = [model.encode(text) for text in texts] if ids is None else [(list(row), False) for row in ids]
    longest = max(len(row) for row, _ in encoded)
    padded = torch.full((len(encoded), longest), model.special.pad, dtype=torch.long)
    mask = torch.zeros((len(encoded), longest), dtype=torch.bool)
    for row, (tokens, _) in enumerate(encoded):
        padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = True
    return Batch(
        ids=padded, mask=mask, labels=classes, texts=tuple(texts), truncated=sum(was_cut for _, was_cut in encoded)
    )


def numbered(rows: TextRows, head: Sequence[str] | None) -> TextRows:
    """Return rows whose classes have the numbers that a model's trained head gives them.

    Args:
        rows: numbered by the classes that occur in them, as every source is read.
        head: what the head calls its classes, in order; None for a head yet to be trained, which takes any numbers.

    Returns:
        The rows as they are where their classes are neither the head's names nor its numbers.
    """
    if head is None or rows.labels is None:
        return rows
    numbers = tuple(map(str, range(len(head))))
    for names in (tuple(head), numbers):
        if set(rows.classes) <= set(names):
            labels = tuple(names.index(rows.classes[label]) for label in rows.labels)
            return replace(rows, labels=labels, classes=names)
    return rows


def _named_rows(name: SetName, spec: SourceSpec) -> TextRows:
    """Return the texts of a named set, from a local copy or else from the hub."""
    known = NAMED[name]
    if known.images:
        raise BadInputError(f"data set '{name}' has images: set task = \"image-classification\", or name one of texts")
    files = local_files(name, spec.split)
    if not files:
        table, declared = named_hub_table(name, spec)
        return _rows(table, known.hub_text, known.hub_label, declared, None)
    if files[0].suffix == ".tokens":
        return _text_lines(files[0].read_bytes(), f"{name} ({spec.split})")
    table, data = local_table(name, spec.split, files)
    return _rows(table, known.text, known.label, (), data)


def _text_lines(data: bytes, where: str) -> TextRows:
    # not splitlines, which also breaks a text at form feeds and Unicode separators
    texts = tuple(line.removesuffix("\n") for line in io.StringIO(decoded(data, where), newline=None))
    some(len(texts), where)
    return TextRows(texts, None, (), where, hashlib.sha256(data).hexdigest())


def _rows(
    table: Table, text: str | int, label: str | int | None, declared: tuple[str, ...], data: bytes | None
) -> TextRows:
    texts = texts_of(table, pick(table, "text", text))
    labels: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()
    if label is not None:
        labels, classes = labels_of(table, pick(table, "label", label), declared)
    if data is None:
        pairs = zip(texts, labels or [None] * len(texts), strict=True)
        data = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    return TextRows(texts, labels, classes, table.where, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Sentences:
    """Texts beside the model that reads them.

    Args:
        model: of text.
        source: the texts.
    """

    model: TransformersModel
    source: TextRows

    def __len__(self) -> int:
        return len(self.source.texts)

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def sha256(self) -> str:
        return self.source.sha256

    def can_train(self, row: int) -> bool:
        return bool(self.source.texts[row].strip())

    def disjoint(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        held = [_plain(self.source.texts[row]) for row in test]
        every = "\n".join(held)

        def shares_nothing(row: int) -> bool:
            text = _plain(self.source.texts[row])  # neither a part of a tested text, nor one that holds a tested one
            return text not in every and not any(one in text for one in held)

        return [row for row in rows if shares_nothing(row)]

    def batch(self, rows: Sequence[int]) -> Batch:
        source = self.source
        classes = source.labels if self.model.spec.task == "classification" else None
        labels = None if classes is None else [classes[n] for n in rows]
        ids = None if source.ids is None else [source.ids[n] for n in rows]
        return make_batch(self.model, [source.texts[n] for n in rows], labels, ids)

    @torch.no_grad()
    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch, device = self.batch(rows), self.model.device
        if batch.labels is None:
            raise NotSupportedError("utility is measured on classification; leave [utility] away for next words")
        logits = self.model.logits(ids=batch.ids.to(device), mask=batch.mask.to(device))
        return logits.argmax(1).cpu(), batch.labels


def _plain(text: str) -> str:
    # spaces around, so that a part of a text is whole words of it
    return f" {' '.join(text.lower().split())} "


def _marks(data: Any, model: TransformersModel) -> list[bytes]:
    """Return the words of each row, special tokens left out."""
    pairs = zip(data.ids.tolist(), data.mask.tolist(), strict=True)
    special = model.special.ids
    return [
        json.dumps([i for i, m in zip(ids, mask, strict=True) if m and i not in special]).encode()
        for ids, mask in pairs
    ]


READERS.add("text", load_rows)
BINDERS.add("text", Sentences)
MARKS.add("text", _marks)
