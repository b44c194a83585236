"""Untrusted text made visible: no character of a recovered text may act on the page that shows it."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradaudit.record import Texts
from gradaudit.report.wording import number_of

_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Characters of visible categories that draw nothing."""

_FEW = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by for from had has have he her his i if in is it its no not of on or "
        "she so than that the their them there they this to was we were what when which who will with you",
    )
)
"""Words too common to say anything; masking them would only make remarks hard to read."""

_MARKS_IN_A_ROW = 3
"""Combining marks that living scripts stack on one letter; more would paint over the neighboring lines."""


def visible(text: str, keep: str = "") -> str:
    """Return the text with every character that acts or draws nothing written as ⟨U+XXXX⟩.

    Args:
        text: anything, lone surrogates included.
        keep: characters to leave as they are ("\\n" for preformatted text).
    """
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = _MARKS_IN_A_ROW
    for char in text:
        category = unicodedata.category(char)
        is_mark = category in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        acts = category[0] == "C" or category in ("Zl", "Zp") or (category == "Zs" and char != " ")
        variation = 0xFE00 <= ord(char) <= 0xFE0F or 0xE0100 <= ord(char) <= 0xE01EF
        if char in keep:
            shown.append(char)
        elif acts or char in _BLANK or variation or (is_mark and marks > _MARKS_IN_A_ROW):
            shown.append(f"⟨U+{ord(char):04X}⟩")
        else:
            shown.append(char)
    return "".join(shown)


def clip(text: str, length: int) -> str:
    """Return the text, cut to the length with an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def block(word: str | None) -> str:
    """Return a block for a hidden word in one of three lengths, since exact lengths would give words away."""
    letters = 5 if word is None else len(word)
    return "█" * (2 if letters <= 3 else 4 if letters <= 7 else 7)


class Veil:
    """Hides the words of the private texts in free text: errors, remarks, names of files.

    Args:
        texts: whose words are hidden; an empty one hides nothing.
    """

    def __init__(self, texts: Iterable[Texts]) -> None:
        self._words: set[str] = set()
        for item in texts:
            for part in (*item.originals, *item.recovered):
                self._words.update(_split(part or ""))
            for words in (*item.original_words, *item.recovered_words):
                for word in words:
                    self._words.update(_split(word))
        self._words -= _FEW

    def __call__(self, text: str) -> str:
        """Return the text with every word of the private texts replaced by a block."""
        if not self._words:
            return text
        shown: list[str] = []
        for run in _runs(text):
            shown.append(block(run) if run.casefold() in self._words else run)
        return "".join(shown)


def _split(text: str) -> list[str]:
    return [run.casefold() for run in _runs(text) if run[0].isalnum()]


def _runs(text: str) -> list[str]:
    """Cut a text into runs of letters and digits and runs of everything else."""
    runs: list[str] = []
    for char in text:
        if runs and runs[-1][-1].isalnum() == char.isalnum():
            runs[-1] += char
        else:
            runs.append(char)
    return runs


def environment() -> Environment:
    """Return what fills the report's templates: nothing is printed that is not escaped and visible."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = number_of
    made.filters["clip"] = clip
    made.filters["sentence"] = lambda text: text[:1].upper() + text[1:].rstrip(".") + "."
    made.filters["factor"] = _factor
    made.filters["lines"] = lambda text: Markup("\n").join(visible(line) for line in text.split("\n"))
    made.filters["code"] = lambda text: clip(text, 16) if " " not in text else text
    return made


def _shown(value: Any) -> Any:
    """Make every value that the template prints visible; autoescape then does the rest."""
    return value if isinstance(value, Markup) else visible(str(value))


def _factor(value: float) -> str:
    if not 1e-3 < value < 1e9:
        return f"{value:.1g}"
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 100 else f"{value:.2g}"
