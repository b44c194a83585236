"""Text in the report: what a batch's line says, and recovered text beside the original, hidden by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gradaudit.record import Record, SentenceMarks, Texts, readers
from gradaudit.report.page import PAGES, Facts, Page, Rows
from gradaudit.report.visible import block, clip
from gradaudit.report.wording import MARKS, NO_INTERVAL, number_of
from gradaudit.verdict.level import BLIND
from gradaudit.verdict.text import sentence_count


def _facts(rows: Rows, records: Sequence[Record], shown: Sequence[SentencePairs]) -> Facts:
    """Return the few numbers a reader should see first: name, number, and what to hold it against."""
    attacks = [(setting, row) for setting, found in rows.items() for row in found if not row.is_blind]
    facts: list[tuple[str, str, str]] = []
    exact: dict[tuple[str, str], tuple[int, int, int]] = {}
    for record in records:
        if record.attack != BLIND:
            found, proven, total = exact.get((record.setting, record.attack), (0, 0, 0))
            found += sum(marks.exact for marks in record.sentences)
            exact[record.setting, record.attack] = (found, proven + record.proven, total + sentence_count(record))
    if exact and any(record.sentences for record in records):
        (where, attack), (found, proven, total) = max(
            exact.items(), key=lambda item: (item[1][0] / max(1, item[1][2]), item[1][1])
        )
        told = readers(r for r in records if (r.setting, r.attack) == (where, attack))
        by = f"{told}, {where}" + (f"; {proven} proven" if proven else "") if found else "by any one attack"
        facts.append(("Sentences read back exactly", f"{found} of {total}", by))
    scored = [(setting, row) for setting, row in attacks if row.main.interval and row.main.interval.mean is not None]
    if scored:
        setting, row = max(scored, key=lambda item: (item[1].main.interval or NO_INTERVAL).mean or 0.0)
        best = row.main.interval or NO_INTERVAL
        against = f"{row.attack}, {setting}; blind guessing {number_of(row.main.blind)}"
        facts.append(("Highest mean ROUGE-L", number_of(best.mean), against))
        worst = max((row.main.interval or NO_INTERVAL).worst or 0.0 for _, row in scored)
        facts.append(("Worst batch, ROUGE-L", number_of(worst), "of 100, by any attack"))
    if attacks:
        batches, failed = sum(row.n for _, row in attacks), sum(row.failed for _, row in attacks)
        facts.append(
            (
                "Batches judged",
                f"{batches - failed} of {batches}",
                f"{failed} failed, counted as 0" if failed else "none failed",
            )
        )
    return facts


_WORDS_A_SENTENCE = 80
_LETTERS_A_WORD = 60


@dataclass(frozen=True)
class Word:
    """One word, or the block that stands for it, with its mark ("" where none is known)."""

    text: str
    mark: str


@dataclass(frozen=True)
class Line:
    """One side of a sentence: its words, how many more were left out, and the marks counted in words."""

    words: tuple[Word, ...]
    left_out: int
    tally: str


@dataclass(frozen=True)
class SentenceRow:
    """One original sentence and what was recovered of it; `recovered` is None where nothing was."""

    batch: int
    number: int
    original: Line
    recovered: Line | None
    exact: bool
    rougeL: float | None  # noqa: N815 - the field's name for it
    certificate: str | None


@dataclass(frozen=True)
class SentencePairs:
    """The sentences of one attack in one setting: those shown, and how many there are in all."""

    setting: str
    attack: str
    shown: tuple[SentenceRow, ...]
    total: int
    exact: int


def sentence_pairs(
    records: Sequence[Record],
    texts: Iterable[Texts],
    show_text: bool,
    order: Sequence[tuple[str, str]],
    most: int,
    budget: int,
) -> list[SentencePairs]:
    """Return the sentences to show for each (setting, attack), the first of each.

    Args:
        records: whose marks are shown.
        texts: the private words; they give only the rough length of blocks unless `show_text`.
        show_text: show words instead of blocks.
        order: of the (setting, attack) pairs; pairs without sentences are passed over.
        most: sentences a pair at most.
        budget: words in all, about.
    """
    private = {_key(item): item for item in texts}
    found: dict[tuple[str, str], list[tuple[Record, int]]] = {}
    for record in sorted(records, key=lambda r: r.batch):
        count = max(len(record.sentences), _count(private.get(_key(record))))
        found.setdefault((record.setting, record.attack), []).extend((record, i) for i in range(count))
    ordered = [pair for pair in order if found.get(pair)]
    takes = _takes([[_words(record, i) for record, i in found[pair]] for pair in ordered], most, budget)
    return [
        SentencePairs(
            setting=pair[0],
            attack=pair[1],
            shown=tuple(sentence_of(r, i, private.get(_key(r)), show_text) for r, i in found[pair][:take]),
            total=len(found[pair]),
            exact=sum(i < len(r.sentences) and r.sentences[i].exact for r, i in found[pair]),
        )
        for pair, take in zip(ordered, takes, strict=True)
    ]


def best_read(pairs: SentencePairs) -> SentenceRow | None:
    """Return the sentence that was read best: exact and proven before all others; None where nothing was read."""
    read = [row for row in pairs.shown if row.recovered is not None]
    return max(read, key=lambda row: (row.exact, row.certificate == "proven", row.rougeL or 0.0), default=None)


def _takes(costs: Sequence[Sequence[int]], most: int, budget: int) -> list[int]:
    """Return how many sentences each pair may show: the same number for all, as the budget allows."""
    for take in range(most, 0, -1):
        if sum(sum(cost[:take]) for cost in costs) <= budget:
            return [min(take, len(cost)) for cost in costs]
    takes = []
    for cost in costs:
        budget -= cost[0]
        takes.append(1 if budget >= 0 else 0)
    return takes


def _words(record: Record, index: int) -> int:
    if index >= len(record.sentences):
        return 2 * _WORDS_A_SENTENCE
    marks = record.sentences[index]
    # A sentence's frame (heading, badges, tallies) takes about as much room as eight words.
    return 8 + min(_WORDS_A_SENTENCE, len(marks.original)) + min(_WORDS_A_SENTENCE, len(marks.recovered))


def sentence_of(record: Record, index: int, private: Texts | None, show_text: bool) -> SentenceRow:
    """Return one sentence of a record beside what was recovered of it.

    Args:
        record: whose marks are shown.
        index: of the sentence, from 0.
        private: the batch's words; they give only the rough length of blocks unless `show_text`.
        show_text: show words instead of blocks.
    """
    marks: SentenceMarks | None = record.sentences[index] if index < len(record.sentences) else None
    original = _at(private.original_words, index) if private else ()
    recovered = _at(private.recovered_words, index) if private else ()
    ours = _line(original, marks.original if marks else (), show_text)
    theirs = _line(recovered, marks.recovered if marks else (), show_text)
    return SentenceRow(
        batch=record.batch,
        number=index + 1,
        original=ours,
        recovered=theirs if theirs.words else None,
        exact=marks.exact if marks else False,
        rougeL=marks.rougeL if marks else None,
        certificate=marks.certificate if marks else None,
    )


def _line(words: Sequence[str], marks: Sequence[str], show_text: bool) -> Line:
    paired = list(zip_longest(words, marks))
    shown = tuple(
        Word(clip(word, _LETTERS_A_WORD) if show_text and word is not None else block(word), mark or "")
        for word, mark in paired[:_WORDS_A_SENTENCE]
    )
    return Line(shown, max(0, len(paired) - _WORDS_A_SENTENCE), _tally(Counter(marks)))


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[mark]} {name}" for mark, (name, _) in MARKS.items() if counts.get(mark))


def _at(items: Sequence[tuple[str, ...]], index: int) -> tuple[str, ...]:
    return items[index] if index < len(items) else ()


def _count(private: Texts | None) -> int:
    return len(private.original_words) if private else 0


def _key(item: Record | Texts) -> tuple[str, str, int, str]:
    return item.case, item.setting, item.batch, item.attack


def _read_best(record: Record, number: int, private: Texts | None, show: bool) -> SentenceRow:
    return sentence_of(record, number, private, show)  # the private texts may be gone: marks alone are shown then


PAGES.add(
    "text",
    Page(
        template="text.html.j2",
        words={
            "question": "How much private text can be read back",
            "drawn": "ROUGE-L, 0 to 100",
            "failed": "0",
            "counts_as": "0",
            "truth": "true text",
            "shown": "Recovered text",
            "told": "the ROUGE-L of the strongest attack that was run, beside blind guessing without any gradient",
        },
        private=Texts,
        file="texts.jsonl",
        facts=_facts,
        read_best=_read_best,
    ),
)
