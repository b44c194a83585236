"""The report's sections as plain data: what the template prints, decided here and tested without a page."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradaudit.record import Interval, Record, RunInfo, Summary, readers
from gradaudit.report.wording import ALWAYS_GIVEN, DIAGNOSES, KNOWLEDGE
from gradaudit.scores import Scores, scores_of
from gradaudit.verdict.level import BLIND

Pair = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """One score: its interval over batches, the blind baseline's mean beside it, and how many digits are shown."""

    interval: Interval | None
    blind: float | None
    digits: int = 1


@dataclass(frozen=True)
class ResultRow:
    """One attack in one setting, as the table of results shows it."""

    attack: str
    is_blind: bool
    cells: tuple[Cell, ...]
    main: Cell
    """The score that attacks are ranked by."""
    drawn: Cell
    """What is drawn, 0 to 100."""
    names_and_numbers: Cell
    words: Cell
    """Share of the distinct words that were named."""
    right_words: Cell
    """Share of the named words that are right."""
    n: int
    failed: int
    seconds: float | None
    load: tuple[float, float] | None


@dataclass(frozen=True)
class Threat:
    """What the attacker was given in one group of (setting, attack) pairs that were given the same."""

    who: str
    given: tuple[tuple[str, str, str], ...]
    withheld: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Seen:
    """How much of the model's gradient the attacker saw in one setting."""

    setting: str
    what: str
    selection: str
    share: str


@dataclass(frozen=True)
class Counted:
    """A remark (flag, error, note) with where and how often it was made."""

    text: str
    count: int
    where: str


def pair_order(info: RunInfo, summaries: Sequence[Summary], records: Sequence[Record]) -> list[Pair]:
    """Return the (setting, attack) pairs in the report's order: the strongest attack first."""
    pairs = dict.fromkeys([(s.setting, s.attack) for s in summaries] + [(r.setting, r.attack) for r in records])
    settings = list(dict.fromkeys([*info.settings, *(setting for setting, _ in pairs)]))
    score = {(s.setting, s.attack): strength(s) for s in summaries}
    proven: Counter[Pair] = Counter()
    for record in records:
        proven[record.setting, record.attack] += record.proven
    return sorted(pairs, key=lambda p: (settings.index(p[0]), p[1] == BLIND, -score.get(p, 0.0), -proven[p], p[1]))


def strength(summary: Summary) -> float:
    """Return how much an attack read, by the main score of its kind of data."""
    kind = scores_of(summary.scores)
    return kind.strength(summary.scores[kind.main].mean) if kind.main in summary.scores else 0.0


def result_rows(
    summaries: Sequence[Summary], records: Sequence[Record], order: Sequence[Pair]
) -> dict[str, list[ResultRow]]:
    """Return the rows of results by setting, in the given order."""
    by_pair = {(s.setting, s.attack): s for s in summaries}
    rows: dict[str, list[ResultRow]] = {}
    for pair in order:
        if pair in by_pair:
            own = [r for r in records if (r.setting, r.attack) == pair]
            rows.setdefault(pair[0], []).append(_row(by_pair[pair], own))
    return rows


def _row(summary: Summary, own: Sequence[Record]) -> ResultRow:
    is_blind = summary.attack == BLIND
    kind = scores_of(summary.scores)
    cells: dict[str, Cell] = {}
    for score in kind.all:
        blind = None if is_blind else summary.baseline.get(score.name)
        digits = score.digits if score.report_digits is None else score.report_digits
        cells[score.name] = Cell(summary.scores.get(score.name), blind.mean if blind else None, digits)
    spans = [r.sensitive_baseline for r in own if r.sensitive_baseline is not None]
    loads = [r.load for r in own if r.load is not None]
    return ResultRow(
        attack=readers(own) if own else summary.attack,
        is_blind=is_blind,
        cells=tuple(cells.values()),
        main=cells[kind.main],
        drawn=_scaled(cells[kind.drawn], kind.drawn_scale),
        names_and_numbers=Cell(summary.sensitive, sum(spans) / len(spans) if spans and not is_blind else None),
        words=_of_words(summary, "recall"),
        right_words=_of_words(summary, "precision"),
        n=summary.n,
        failed=summary.failed,
        seconds=sum(r.seconds for r in own) / len(own) if own else None,
        load=(min(loads), max(loads)) if loads else None,
    )


def _of_words(summary: Summary, name: str) -> Cell:
    words, blind = summary.words, summary.baseline_words
    return Cell(None, None) if words is None else Cell(words[name], blind[name].mean if blind else None)


def _scaled(cell: Cell, factor: float) -> Cell:
    """Return a score times a factor."""
    own = cell.interval
    if own is None or own.mean is None or factor == 1:
        return cell
    scaled = {key: None if (v := getattr(own, key)) is None else factor * v for key in ("mean", "low", "high", "worst")}
    return Cell(own.model_copy(update=scaled), None if cell.blind is None else factor * cell.blind)


def threats(records: Sequence[Record], order: Sequence[Pair]) -> list[Threat]:
    """Return what the attacker was given and not given, one entry for all pairs that were given the same."""
    meanings = {**KNOWLEDGE, **ALWAYS_GIVEN}
    groups: dict[str, tuple[list[Pair], Threat]] = {}
    attacks = [pair for pair in order if pair[1] != BLIND]
    for pair in attacks:
        own = [r for r in records if (r.setting, r.attack) == pair]
        names = list(dict.fromkeys(name for record in own for name in record.knowledge))
        kind = scores_of(name for record in own for name in record.scores)
        given = tuple(
            (name.replace("_", " "), _said(meanings.get(name, ""), kind), _value([r.knowledge.get(name) for r in own]))
            for name in sorted(names, key=lambda n: [*meanings, n].index(n))
        )
        left = [n for n in KNOWLEDGE if n not in kind.facts_unfit and n not in names]
        withheld = tuple((n.replace("_", " "), _said(KNOWLEDGE[n], kind)) for n in left)
        seen = groups.setdefault(repr((given, withheld)), ([], Threat("", given, withheld)))
        seen[0].append(pair)
    return [Threat(_who(pairs, attacks), t.given, t.withheld) for pairs, t in groups.values()]


def _said(what: str, kind: Scores) -> str:
    return what.replace("sentence", kind.example)


def _who(pairs: Sequence[Pair], every: Sequence[Pair]) -> str:
    if len(pairs) == len(every):
        return "Every attack in every setting"
    by_setting: dict[str, list[str]] = {}
    for setting, attack in pairs:
        by_setting.setdefault(setting, []).append(attack)
    whole = {s: len(a) == sum(setting == s for setting, _ in every) for s, a in by_setting.items()}
    return "; ".join(f"{s}: {'every attack' if whole[s] else ', '.join(a)}" for s, a in by_setting.items())


def _value(values: Sequence[Any]) -> str:
    """Write one knowledge item's value; where batches differ, the first is an example."""
    distinct = list(dict.fromkeys(_plain(value) for value in values))
    if len(distinct) == 1:
        return distinct[0]
    return f"differs by batch, for example {next(v for v in distinct if v != 'not set')}"


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        return "; ".join(f"{str(key).replace('_', ' ')}: {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        shown = ", ".join(_plain(item) for item in value[:12]) or "none"
        return f"{shown}, … ({len(value)} in all)" if len(value) > 12 else shown
    return str(value)


def seen_shares(info: RunInfo, records: Sequence[Record], settings: Sequence[str]) -> list[Seen]:
    """Return for each setting what the client did, which gradients were seen and their share of the model."""
    shares: dict[str, list[float]] = {}
    selections: dict[str, list[str]] = {}
    for record in records:
        shares.setdefault(record.setting, []).append(record.share_of_parameters)
        chosen = record.knowledge.get("selection") or record.details.get("selection")
        selections.setdefault(record.setting, []).extend([str(chosen)] if chosen else [])
    usual = "; ".join(dict.fromkeys(_find(info.case_data, "selection"))) or "not recorded"
    return [
        Seen(
            setting=name,
            what=info.settings.get(name, "not described"),
            selection="; ".join(dict.fromkeys(selections.get(name, []))) or usual,
            share=_percent(shares.get(name, [])),
        )
        for name in settings
    ]


def _percent(shares: Sequence[float]) -> str:
    if not shares:
        return "–"
    ends = [f"{100 * share:.3g}" for share in (min(shares), max(shares))]
    return f"{ends[0]} %" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]} %"


def _find(data: Any, key: str) -> list[str]:
    """Return every value of a key, however deep the case holds it."""
    if isinstance(data, Mapping):
        own = [_plain(value) for name, value in data.items() if name == key and value]
        return own + [found for name, value in data.items() if name != key for found in _find(value, key)]
    if isinstance(data, list | tuple):
        return [found for value in data for found in _find(value, key)]
    return []


def diagnoses(records: Sequence[Record], order: Sequence[Pair]) -> list[tuple[Pair, list[int]]]:
    """Return for each diagnosed (setting, attack) how many batches got each diagnosis, and how many none."""
    table = []
    for pair in order:
        own = [r for r in records if (r.setting, r.attack) == pair]
        counts: Counter[str] = Counter(r.diagnosis.verdict for r in own if r.diagnosis is not None)
        if counts:
            table.append((pair, [*(counts.get(name, 0) for name in DIAGNOSES), len(own) - counts.total()]))
    return table


def counted(records: Sequence[Record], texts_of: Callable[[Record], Sequence[str]]) -> list[Counted]:
    """Return each distinct remark of the records with its number and where it was made, most frequent first.

    Args:
        records: the run's.
        texts_of: which remarks a record makes.
    """
    counts: Counter[str] = Counter()
    where: dict[str, dict[str, None]] = {}
    for record in records:
        for text in texts_of(record):
            counts[text] += 1
            where.setdefault(text, {})[f"{record.attack} in {record.setting}"] = None
    return [
        Counted(text, count, "; ".join(list(where[text])[:4]) + ("; …" if len(where[text]) > 4 else ""))
        for text, count in counts.most_common()
    ]


def raised_flags(summaries: Sequence[Summary], records: Sequence[Record]) -> list[Counted]:
    """Return every flag that a record or a summary raised, with where."""
    found = counted(records, lambda r: r.flags)
    known = {item.text for item in found}
    extra: dict[str, dict[str, None]] = {}
    for summary in summaries:
        for name in summary.flags:
            if name not in known:
                extra.setdefault(name, {})[f"{summary.attack} in {summary.setting}"] = None
    return found + [Counted(name, 0, "; ".join(list(places)[:4])) for name, places in extra.items()]


def published_means(
    records: Sequence[Record], order: Sequence[Pair]
) -> list[tuple[str, Pair, dict[str, float | None]]]:
    """Return the mean of each score in the papers' own scorings; a batch that failed counts 0, as in ours."""
    table = []
    for pair in order:
        own = [r for r in records if (r.setting, r.attack) == pair]
        for scoring in dict.fromkeys(name for r in own for name in r.published):
            means: dict[str, float | None] = {}
            for score in scores_of(r for one in own for r in one.scores).names:
                values = [_published(r, scoring, score) for r in own]
                known = [v for v in values if v is not None]
                means[score] = sum(known) / len(known) if known else None
            table.append((scoring, pair, means))
    return table


def _published(record: Record, scoring: str, score: str) -> float | None:
    return 0.0 if record.error is not None else record.published.get(scoring, {}).get(score)


def as_json(data: Any, veil: Callable[[str], str], longest: int) -> str:
    """Write data as JSON for reading, sentences veiled, cut where it is too long."""
    text = json.dumps(_veiled(data, veil), indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= longest else text[:longest] + "\n… (cut here; the whole of it is in run.json)"


def _veiled(data: Any, veil: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        # Names and expressions are single words; only prose could quote a private sentence.
        return veil(data) if len(data.split()) > 2 else data
    if isinstance(data, Mapping):
        return {key: _veiled(value, veil) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_veiled(value, veil) for value in data]
    return data
