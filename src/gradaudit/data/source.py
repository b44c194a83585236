"""Where the private batches come from: the embedded sample, a local file, or a hub id."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradaudit.data.columns import labels_of, pick, texts_of
from gradaudit.data.frequencies import drawn_texts
from gradaudit.data.named import NAMED, SetName, local_files, local_table, not_here
from gradaudit.data.tables import Table, decoded, jsonl, parquet, row_place, separated
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel
from gradaudit.types import Batch

SAMPLE = Path(__file__).parent / "sample.jsonl"
"""The embedded sample: original sentences with the columns text, label and sensitive."""

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".txt", ".tokens")
"""The file endings `load_rows` reads."""


_DRAWN = 20_000
"""Texts of words drawn by their frequency."""


# strict, so that True is not taken for column 1
ColumnNumber = Annotated[int, Field(strict=True, ge=0)]


class SourceSpec(BaseModel):
    """Where rows come from, and which of their columns are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["sample", "digits", "words", SetName] | None = Field(
        default=None,
        description='"sample" for the embedded sentences, "digits" for images: taken without path and hub; "cola", '
        '"sst2", "rotten-tomatoes", "wikitext-2", "cifar10": data sets by name; "words", in '
        "[public] only, for words drawn by their frequency (gradaudit[words])",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="local file (csv, tsv, jsonl, parquet, txt, tokens; images: parquet or a folder of classes), from "
        "the case file's or current folder",
    )
    hub: str | None = Field(
        default=None, min_length=1, description="id of a data set on the Hugging Face hub (gradaudit[data])"
    )
    config: str | None = Field(default=None, description="configuration of the hub data set")
    split: str = Field(default="train", min_length=1, description="split of the hub data set, or of the named one")
    header: bool = Field(default=True, description="whether the first line of a csv or tsv names the columns")
    text: str | ColumnNumber = Field(
        default="text", description="column of the text: a name, or a number counted from 0"
    )
    image: str | ColumnNumber = Field(default="image", description="column of the encoded images: a name, or a number")
    label: str | ColumnNumber | None = Field(
        default=None,
        description="column of the class label: a name, or a number counted from 0; the sample and images have theirs",
    )
    shuffle_seed: int | None = Field(
        default=None,
        ge=0,
        le=2**32 - 1,
        description="numpy seed that shuffles the rows first (the papers use 101); file order without it",
    )

    @model_validator(mode="before")
    @classmethod
    def _sample_when_none_given(cls, given: Any) -> Any:
        # filled in here, not read as a default, so that both ways of writing it give one content hash
        if isinstance(given, Mapping) and all(given.get(name) is None for name in ("source", "path", "hub")):
            return {**given, "source": "sample"}
        return given

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("source", "path", "hub") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; keep one of source, path and hub")
        if self.set_name is not None:
            self._fits_named(self.set_name)
            return self
        for name, asked in (("config", self.config is not None), ("split", self.split != "train")):
            if asked and self.hub is None:
                raise ValueError(f"{name} is for hub data sets only; remove it or name the data set with hub")
        return self

    @property
    def set_name(self) -> SetName | None:
        """The named data set that this is; None for any other source."""
        return next((name for name in NAMED if name == self.source), None)

    def _fits_named(self, name: SetName) -> None:
        """Refuse columns beside the name of a set, which has its own, and a split that it does not have."""
        for key in ("config", "header", "text", "image", "label"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"data set '{name}' has its own columns; remove {key}")
        splits = NAMED[name].files
        if self.split not in splits:
            raise ValueError(f"data set '{name}' has no split '{self.split}'; set split to {' or '.join(splits)}")


class DataSpec(SourceSpec):
    """Which rows an audit attacks: a source, its columns, and how the batches are drawn from it."""

    batch_size: int = Field(default=1, ge=1, description="texts or images a batch")
    batches: int = Field(default=1, ge=1, description="number of batches")
    skip: int = Field(default=0, ge=0, description="rows of the drawn order to pass over first")
    window: int | None = Field(
        default=None,
        ge=2,
        description="cut the rows, joined, into windows of so many tokens, without special tokens; task causal-lm",
    )

    @model_validator(mode="after")
    def _real(self) -> Self:
        if self.source == "words":
            raise ValueError('source = "words" is drawn by chance, nobody\'s data: it is for [public]')
        return self


class PublicSpec(SourceSpec):
    """[public]: what the attacker has, for attacks that learn; none of it is in an audited batch."""

    rows: int | None = Field(
        default=None,
        ge=1,
        description="at most so many rows, windows or images; all when not set (20,000 words' texts)",
    )
    language: str = Field(default="en", min_length=1, description='of source = "words": a code, as "en" or "de"')

    @model_validator(mode="after")
    def _language_of_words(self) -> Self:
        if self.language != "en" and self.source != "words":
            raise ValueError('language is for source = "words" only; remove it')
        return self


@dataclass(frozen=True)
class Rows:
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


def load_rows(spec: SourceSpec, base: Path) -> Rows:
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
        return Rows(texts, None, (), where, hashlib.sha256("\n".join(texts).encode()).hexdigest())
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
    data = _read(file, spec.path)
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


def draw_numbers(spec: DataSpec, count: int, where: str) -> list[tuple[int, ...]]:
    """Return the row numbers of each batch of a source with so many rows; see `draw`."""
    needed = spec.skip + spec.batches * spec.batch_size
    if needed > count:
        raise BadInputError(
            f"batch larger than the data: {where} has {count} rows and {needed} are needed "
            f"(skip {spec.skip} + {spec.batches} batches of {spec.batch_size}); "
            "lower batch_size, batches or skip"
        )
    chosen = shuffled(spec, count)[spec.skip : needed]
    size = spec.batch_size
    return [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def draw(spec: DataSpec, rows: Rows) -> list[tuple[int, ...]]:
    """Return the row numbers of each batch, counted from 0.

    The papers' draw: shuffle the numbers of all rows with the seed, pass over `skip`, cut into batches.

    Args:
        spec: seed, skip, number and size of the batches.
        rows: what `load_rows` returned for the same spec.

    Raises:
        BadInputError: there are too few rows, or a drawn row holds no text.
    """
    batches = draw_numbers(spec, len(rows.texts), rows.where)
    for row in (row for batch in batches for row in batch):
        if not rows.texts[row].strip():
            raise BadInputError(
                f"row {row} (counted from 0) of {rows.where} is drawn but holds no text; "
                "delete that row, or change skip or shuffle_seed to pass over it"
            )
    return batches


def shuffled(spec: SourceSpec, count: int) -> list[int]:
    """Return the numbers of so many rows in the order that a spec draws them in."""
    order = list(range(count))
    if spec.shuffle_seed is not None:
        # the legacy generator, because the papers' indices come from it
        np.random.RandomState(spec.shuffle_seed).shuffle(order)
    return order


def make_batch(
    model: TextModel,
    texts: Sequence[str],
    labels: Sequence[int] | None,
    ids: Sequence[Sequence[int]] | None = None,
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
        ids=padded,
        mask=mask,
        labels=classes,
        texts=tuple(texts),
        truncated=sum(was_cut for _, was_cut in encoded),
    )


def numbered(rows: Rows, head: Sequence[str] | None) -> Rows:
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


def found_file(path: str, base: Path) -> Path:
    """Return the file of a path, from a folder (the case file's) or else from the current one.

    Raises:
        BadInputError: there is none, or it is a folder.
    """
    try:
        wanted = Path(path).expanduser()
        for folder in (base, Path()):
            file = folder / wanted
            if file.is_dir():
                raise BadInputError(f"{path} is a folder; give the path of one file in it")
            if file.exists():
                return file
    except (OSError, RuntimeError) as error:
        raise BadInputError(f"{path} cannot be looked up ({error}); check the path") from error
    tried = "" if wanted.is_absolute() else f" in {base.resolve()} or the current folder"
    raise BadInputError(f"there is no file {path}{tried}; check the path")


def _read(file: Path, where: str) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadInputError(f"{where} cannot be read ({error.strerror}); check the file and its permissions") from error
    if not data.strip():
        raise BadInputError(f"{where} is empty; give a file with at least one row")
    return data


def _named_rows(name: SetName, spec: SourceSpec) -> Rows:
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


def named_hub_table(name: SetName, spec: SourceSpec) -> tuple[Table, tuple[str, ...]]:
    """Return the hub's table of a named set, and the class names it declares.

    Raises:
        BadInputError: it cannot be had; says both ways to get it.
    """
    known = NAMED[name]
    there = SourceSpec(hub=known.hub, config=known.config, split=spec.split)
    try:
        return hub_table(known.hub, there, known.hub_label, known.hub_image if known.images else None)
    except BadInputError as error:
        raise not_here(name, spec.split) from error


def _text_lines(data: bytes, where: str) -> Rows:
    # not splitlines, which also breaks a text at form feeds and Unicode separators
    texts = tuple(line.removesuffix("\n") for line in io.StringIO(decoded(data, where), newline=None))
    if not texts:
        raise BadInputError(f"{where} holds no rows; give a file with at least one")
    return Rows(texts, None, (), where, hashlib.sha256(data).hexdigest())


def hub_table(
    hub: str, spec: SourceSpec, label: str | int | None, image: str | int | None = None
) -> tuple[Table, tuple[str, ...]]:
    """Return the table of a hub data set, and the class names it declares for the label column.

    Args:
        hub: its id.
        spec: configuration and split.
        label: column of the label.
        image: column of images, which stay encoded.
    """
    try:
        import datasets
    except ImportError as error:
        raise BadInputError(
            "reading hub data sets needs the package datasets; pip install 'gradaudit[data]'"
        ) from error
    where = f"hub data set {hub}{f' ({spec.config})' if spec.config else ''}, split {spec.split}"
    try:
        loaded = datasets.load_dataset(hub, spec.config, split=spec.split)
    except Exception as error:  # any of dozens: network, hub, builder, pandas, arrow
        said = " ".join(str(error).split())
        raise BadInputError(
            f"{where} cannot be loaded ({type(error).__name__}: {said[:160]}); "
            "check the id, config, split and connection, or give a local file with path"
        ) from error
    if not len(loaded):
        raise BadInputError(f"{where} holds no rows; choose another split")
    names = tuple(loaded.column_names)
    table = Table(where, names, len(names), lambda number: list(loaded[names[number]]), row_place)
    declared: tuple[str, ...] = ()
    if image is not None:
        column = names[pick(table, "image", image)]
        if isinstance(loaded.features[column], datasets.Image):
            loaded = loaded.cast_column(column, datasets.Image(decode=False))
    if label is not None:
        feature = loaded.features[names[pick(table, "label", label)]]
        declared = tuple(getattr(feature, "names", None) or ())
    return table, declared


def _rows(
    table: Table,
    text: str | int,
    label: str | int | None,
    declared: tuple[str, ...],
    data: bytes | None,
) -> Rows:
    texts = texts_of(table, pick(table, "text", text))
    labels: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()
    if label is not None:
        labels, classes = labels_of(table, pick(table, "label", label), declared)
    if data is None:
        pairs = zip(texts, labels or [None] * len(texts), strict=True)
        data = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    return Rows(texts, labels, classes, table.where, hashlib.sha256(data).hexdigest())
