"""Local files as columns: csv, tsv, jsonl and parquet, each mistake one sentence with its line."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.errors import BadInputError

LONGEST_FIELD = 1 << 20
"""Longest csv or tsv field, in characters: eight times Python's own limit; beyond it a file is broken."""


@dataclass(frozen=True)
class Table:
    """Columns of any format: their names (None without a header), how to read one, and where a row lies."""

    where: str
    names: tuple[str, ...] | None
    width: int
    column: Callable[[int], list[Any]]
    place: Callable[[int], str]
    first_line_names: bool = False


def contents(file: Path, where: str) -> bytes:
    """Return the bytes of a file that is named in words.

    Raises:
        BadInputError: it cannot be read, or is empty.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadInputError(f"{where} cannot be read ({error.strerror}); check the file and its permissions") from error
    if not data.strip():
        raise BadInputError(f"{where} is empty; give a file with at least one row")
    return data


def some(rows: int, where: str) -> None:
    """Refuse a source without rows."""
    if not rows:
        raise BadInputError(f"{where} holds no rows; give a file with at least one")


def decoded(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{where} is not UTF-8 text (line {line}); save it as UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadInputError(f"{where} holds a NUL byte (line {line}); save it as plain UTF-8 text")
    return text


def separated(data: bytes, where: str, header: bool, *, tab: bool) -> Table:
    lines = io.StringIO(decoded(data, where), newline="")
    if tab:
        # in CoLA, SST-2 and their kin a quotation mark is part of the text
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, strict=True)
    else:
        reader = csv.reader(lines, strict=True)
    records: list[list[str]] = []
    starts: list[int] = []
    limit = csv.field_size_limit(LONGEST_FIELD)
    try:
        start = 1
        for record in reader:
            if record:
                records.append(record)
                starts.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise BadInputError(
            f"line {start} of {where} breaks the {'tsv' if tab else 'csv'} format ({error}); "
            "mend its quotes and separators"
        ) from error
    finally:
        csv.field_size_limit(limit)
    first = 1 if header else 0
    some(len(records[first:]), where)
    width = len(records[0])
    for record, start in zip(records, starts, strict=True):
        if len(record) != width:
            raise BadInputError(
                f"line {start} of {where} has {len(record)} columns where the first has {width}; "
                "mend that line (its separators and quotes)"
            )
    names = tuple(records[0]) if header else None
    body, begins = records[first:], starts[first:]
    return Table(
        where,
        names,
        width,
        column=lambda number: [record[number] for record in body],
        place=lambda row: f"line {begins[row]}",
        first_line_names=header,
    )


def jsonl(data: bytes, where: str) -> Table:
    records: list[dict[str, Any]] = []
    starts: list[int] = []
    for number, line in enumerate(io.StringIO(decoded(data, where), newline=None), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"line {number} of {where} is not JSON; write one JSON object a line") from error
        if not isinstance(record, dict):
            raise BadInputError(
                f"line {number} of {where} is not a JSON object; write one object a line, such as "
                '{"text": "...", "label": 0}'
            )
        records.append(record)
        starts.append(number)
    some(len(records), where)
    names = tuple(dict.fromkeys(name for record in records for name in record))

    def column(number: int) -> list[Any]:
        for record, start in zip(records, starts, strict=True):
            if names[number] not in record:
                raise BadInputError(f"line {start} of {where} has no '{names[number]}'; add it to that line")
        return [record[names[number]] for record in records]

    return Table(where, names, len(names), column, place=lambda row: f"line {starts[row]}")


def parquet(data: bytes, where: str) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadInputError("reading parquet files needs the package pyarrow; pip install 'gradaudit[data]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        names = tuple(file.schema_arrow.names)
        rows = file.metadata.num_rows
    except Exception as error:  # arrow's, and of any kind where a footer is damaged
        raise BadInputError(f"{where} is not a readable parquet file; write it again") from error
    some(rows, where)

    def column(number: int) -> list[Any]:
        try:
            values: list[Any] = file.read(columns=[names[number]]).column(names[number]).to_pylist()
        except Exception as error:  # times out of Python's range, and whatever else damaged pages hold
            raise BadInputError(f"column '{names[number]}' of {where} cannot be read; write the file again") from error
        return values

    return Table(where, names, len(names), column, place=row_place)


def row_place(row: int) -> str:
    return f"row {row} (counted from 0)"
