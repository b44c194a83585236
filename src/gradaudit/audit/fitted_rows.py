"""What an inverter was fitted to, as hashes beside it: nobody audits an attack on what it learned from."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from gradaudit.data.rows import MARKS
from gradaudit.errors import BadInputError
from gradaudit.files import replacing
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.types import Private, PublicData

ROWS = "rows.txt"
"""Hashes of the rows that an inverter was fitted to."""


def note_rows(folder: Path, public: PublicData, model: Model) -> None:
    """Write down, as hashes, what an inverter was fitted to, so that nobody audits it on that.

    Args:
        folder: of the inverter.
        public: what it was fitted to.
        model: whose special tokens are left out.

    Raises:
        BadInputError: the folder cannot be written.
    """
    try:
        with replacing(folder / ROWS) as draft:
            draft.write_text("\n".join(sorted(_marks(public, model))), encoding="utf8")
    except OSError as error:
        raise BadInputError(f"cannot write {folder / ROWS} ({error.strerror}); make room") from None


def refuse_seen(folder: Path, batches: Iterable[Private], model: Model) -> None:
    """Refuse to audit an inverter on what it was fitted to: it would read its own memory.

    Args:
        folder: of the inverter; one that does not say what it was fitted to is taken as it is.
        batches: that are audited.
        model: of both.

    Raises:
        BadInputError: some audited rows are among those that it learned from.
    """
    place = folder / ROWS
    if not place.is_file():
        return
    try:
        learned = set(place.read_text(encoding="utf8").split())
    except (OSError, UnicodeDecodeError):
        raise BadInputError(f"{place} cannot be read: fit the inverter again") from None
    rows = [mark for batch in batches for mark in _marks(batch, model)]
    known = sum(mark in learned for mark in rows)
    if known:
        raise BadInputError(
            f"the inverter in {folder} was fitted to {known} of the {len(rows)} audited rows and would read its own "
            "memory: audit other rows, or let 'gradaudit run' fit one"
        )


def _marks(data: PublicData | Private, model: Model) -> list[str]:
    """Return a hash of each row."""
    return [hashlib.sha256(row).hexdigest()[:16] for row in MARKS[kind_of(model.spec.task)](data, model)]
