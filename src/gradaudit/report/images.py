"""Recovered images beside the originals: blanked by default, and within a budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradaudit.record import ImageMarks, Pictures, Record
from gradaudit.report.page import PAGES, Facts, Page, Rows
from gradaudit.report.wording import number_of
from gradaudit.verdict.images import recovered
from gradaudit.verdict.level import BLIND


@dataclass(frozen=True)
class Shown:
    """One original and what was recovered of it; the pictures are data URIs, None where they are hidden or absent."""

    batch: int
    number: int
    original: Markup | None
    recovered: Markup | None
    marks: ImageMarks


@dataclass(frozen=True)
class Grid:
    """The images of one attack in one setting: those shown, how many there are, and how many can be recognized."""

    setting: str
    attack: str
    shown: tuple[Shown, ...]
    total: int
    recognized: int


def picture_grids(
    records: Sequence[Record], pictures: Iterable[Pictures], show: bool, order: Sequence[tuple[str, str]], most: int
) -> list[Grid]:
    """Return the images to show for each (setting, attack), the first of each.

    Args:
        records: whose scores are shown.
        pictures: the private images; none of their pixels is on the page unless `show`.
        show: show them.
        order: of the (setting, attack) pairs.
        most: images a pair at most.
    """
    private = {(p.case, p.setting, p.batch, p.attack): p for p in pictures} if show else {}
    grids = []
    for setting, attack in order:
        own = sorted((r for r in records if (r.setting, r.attack) == (setting, attack)), key=lambda r: r.batch)
        shown = []
        for record in own:
            found = private.get((record.case, setting, record.batch, attack))
            shown += [shown_image(record, n, found) for n in range(len(record.images))]
        if shown:
            grids.append(Grid(setting, attack, tuple(shown[:most]), len(shown), sum(map(recovered, own))))
    return grids


def shown_image(record: Record, number: int, private: Pictures | None) -> Shown:
    """Return one image of a record, as it is shown.

    Args:
        record: with its scores.
        number: of the image, from 0.
        private: the record's pixels; None hides them.
    """
    ours = _uri(private.originals[number]) if private and number < len(private.originals) else None
    theirs = _uri(private.recovered[number]) if private and number < len(private.recovered) else None
    return Shown(record.batch, number + 1, ours, theirs, record.images[number])


def _uri(png: str | None) -> Markup | None:
    # checked to be base64 of a PNG where it was read: no character of it can end an attribute
    return None if png is None else Markup("data:image/png;base64," + png)


def _facts(rows: Rows, records: Sequence[Record], grids: Sequence[Grid]) -> Facts:
    """Return the few numbers a reader of an audit of images should see first; see `_facts`."""
    attacks = [(setting, row) for setting, found in rows.items() for row in found if not row.is_blind]
    facts: list[tuple[str, str, str]] = []
    tried = [grid for grid in grids if grid.attack != BLIND]
    if tried:
        best = max(tried, key=lambda grid: grid.recognized / max(1, grid.total))
        by = f"{best.attack}, {best.setting}" if best.recognized else "by any one attack"
        facts.append(("Images read back recognizably", f"{best.recognized} of {best.total}", by))
    scored = [(setting, row, i) for setting, row in attacks if (i := row.main.interval) and i.mean is not None]
    if scored:
        setting, row, least = min(scored, key=lambda item: item[2].mean or 0.0)
        against = f"{row.attack}, {setting}; blind guessing {number_of(row.main.blind, 4)}"
        facts.append(("Lowest mean squared error", number_of(least.mean, 4), against))
        worst = min(i.worst if i.worst is not None else 1.0 for _, _, i in scored)
        facts.append(("Worst batch, squared error", number_of(worst, 4), "the lowest of any attack"))
        failed = sum(row.failed for _, row in attacks)
        note = f"{failed} failed, given the worst scores there are" if failed else "none failed"
        facts.append(("Batches judged", f"{sum(row.n for _, row in attacks)}", note))
    return facts


def _read_best(record: Record, number: int, private: Pictures | None, show: bool) -> Shown:
    return shown_image(record, number, private if show else None)


PAGES.add(
    "images",
    Page(
        template="images.html.j2",
        words={
            "question": "How well can private images be read back",
            "drawn": "SSIM, in hundredths",
            "failed": "worst",
            "counts_as": "the worst there is",
            "truth": "true images",
            "shown": "Recovered images",
            "told": "the share of the blind guess’s mean squared error that the strongest attack that was run explains"
            ": 100 is the images themselves, 0 no better than the guess without any gradient, or worse",
        },
        private=Pictures,
        file="images.jsonl",
        facts=_facts,
        read_best=_read_best,
    ),
)
