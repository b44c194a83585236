"""What the report says of each kind of data in its own words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradaudit.kinds import ByKind
from gradaudit.record import Record
from gradaudit.report.sections import ResultRow

Facts = list[tuple[str, str, str]]
"""Name, number, and what to hold it against."""
Rows = Mapping[str, Sequence[ResultRow]]
"""Rows of results by setting."""


@dataclass(frozen=True)
class Page:
    """One kind of data in the report.

    Args:
        template: file with its parts: "results", "private", "read best".
        words: its own words: question, drawn, failed, counts_as, truth, told, shown
            (title of the private part; empty for none).
        private: of which model the lines of its private file are; None where the report shows none.
        file: that file, in a run's folder.
        facts: returns the few numbers a reader should see first, from the rows of results, the records and what is
            shown.
        read_best: returns what a frontier shows of a record's example by its number, from the private side where it is
            there, hidden or not.
    """

    template: str = "plain.html.j2"
    words: Mapping[str, str] = field(default_factory=lambda: _WORDS)
    private: type[Any] | None = None
    file: str = ""
    facts: Callable[[Rows, Sequence[Record], Sequence[Any]], Facts] = lambda rows, records, shown: []
    read_best: Callable[[Record, int, Any, bool], Any] = lambda record, number, private, show: None


_WORDS: Mapping[str, str] = {
    "question": "How much private data can be read back",
    "drawn": "score, 0 to 100",
    "failed": "worst",
    "counts_as": "the worst there is",
    "truth": "true data",
    "shown": "",
    "told": "what the strongest attack that was run read",
}
"""Words for a kind of data that has none of its own."""

PAGES: ByKind[Page] = ByKind("page of the report")
"""By kind of data; one without its own has a plain page."""


def page_of(kind: str) -> Page:
    """Return the page of a kind of data, a plain one where it has none."""
    return PAGES.get(kind) or Page()
