"""Text and label columns of a table: which one is meant, and what its values are."""

import difflib
import re
from typing import Any

from gradaudit.data.tables import Table
from gradaudit.errors import BadInputError


def pick(table: Table, use: str, wanted: str | int) -> int:
    """Return the number of the column asked for by name or number."""
    if isinstance(wanted, int):
        if wanted < table.width:
            return wanted
        raise BadInputError(
            f"{table.where} has {table.width} columns and no number {wanted}; "
            f"set {use} to a number from 0 to {table.width - 1}"
        )
    if table.names is None:
        raise BadInputError(
            f"{table.where} is read without a header, so it has no column '{wanted}'; "
            f"set {use} to a column number from 0 to {table.width - 1}"
        )
    if table.names.count(wanted) > 1:
        raise BadInputError(f"{table.where} has several columns '{wanted}'; set {use} to a column number")
    if wanted in table.names:
        return table.names.index(wanted)
    close = difflib.get_close_matches(wanted, table.names, n=1, cutoff=0.5)
    shown = ", it has " + ", ".join(f"'{name[:40]}'" for name in table.names[:20])
    shown += f" and {table.width - 20} more" if table.width > 20 else ""
    if table.first_line_names:  # where that line is data by mistake, it is private
        shown = f" among the {table.width} of its first line"
    if close:
        advice = f"did you mean '{close[0]}'?"
    elif wanted.isdecimal():
        advice = f"for a column number write {use} = {int(wanted)}, without quotes"
    else:
        advice = f"set {use} to one of them"
        if table.first_line_names:
            advice += ", or if the first line is data set header = false and give column numbers"
    raise BadInputError(f"{table.where} has no column '{wanted}'{shown}; {advice}")


def texts_of(table: Table, number: int) -> tuple[str, ...]:
    texts = []
    for row, value in enumerate(table.column(number)):
        # a missing text stays as an empty row, because leaving it out would change the papers' draw
        text = "" if value is None else value
        if not isinstance(text, str):
            raise BadInputError(
                f"{table.place(row)} of {table.where} holds {_kind(value)} where the text should be; "
                "set text to a column of strings"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInputError(
                f"{table.place(row)} of {table.where} holds half of a surrogate pair; mend its escapes"
            ) from error
        texts.append(text)
    return tuple(texts)


def labels_of(table: Table, number: int, declared: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the class number of each row, and the names of the classes in order."""
    values = [_label(table, row, value) for row, value in enumerate(table.column(number))]
    if declared:
        for row, value in enumerate(values):
            if not isinstance(value, int) or not 0 <= value < len(declared):
                raise BadInputError(
                    f"{table.place(row)} of {table.where} has no label ({value}); choose a labeled split"
                )
        return tuple(int(value) for value in values), declared
    if all(re.fullmatch(r"[+-]?[0-9]{1,18}", str(value)) for value in values):
        values = [int(value) for value in values]
    else:
        values = [str(value) for value in values]
    known = sorted(set(values))
    numbers = {value: index for index, value in enumerate(known)}
    return tuple(numbers[value] for value in values), tuple(str(value) for value in known)


def _label(table: Table, row: int, value: Any) -> int | str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        # pandas turns a column of whole numbers into floats
        return int(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    missing = value is None or isinstance(value, str) or value != value  # NaN is pandas' missing value
    problem = "has no label" if missing else f"holds {_kind(value)} where the label should be"
    raise BadInputError(
        f"{table.place(row)} of {table.where} {problem}; give each row a whole number or a name, "
        "or set label to another column"
    )


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        bytes: "bytes",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")
