"""From a run's folder to `report.html`: one offline file without scripts, at most a megabyte."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from pydantic import ValidationError

from gradaudit.errors import BadInputError
from gradaudit.files import read_lines, write_page
from gradaudit.flags import FLAGS
from gradaudit.metrics.summary import summarize
from gradaudit.record import Pictures, Record, RunInfo, Spectrum, Summary, Texts
from gradaudit.report import advice, sections
from gradaudit.report.images import picture_grids
from gradaudit.report.page import page_of
from gradaudit.report.spectrum import spectrum_svg
from gradaudit.report.text import SentencePairs, best_read, sentence_pairs
from gradaudit.report.visible import Veil, clip, environment
from gradaudit.report.wording import CERTIFICATES, DIAGNOSES, HEADLINES, MARKS
from gradaudit.scores import scores_of
from gradaudit.verdict.level import BLIND
from gradaudit.verdict.run import WORST_FIRST, Verdicts, verdicts

MOST_BYTES = 1_000_000
"""The size a report never exceeds; a page of this size still opens at once and can be mailed."""

_HERE = Path(__file__).parent
_WORDS = ("Words named", "Words right")
"""Columns of attacks that name words."""
_COUNTS = ("Worst batch", "Batches", "Failed", "Seconds a batch", "Load b/d")


@dataclass(frozen=True)
class _Limits:
    """How much of a long run is shown; what is left out is counted on the page."""

    sentences: int = 12
    words: int = 6000
    rows: int = 120
    remarks: int = 40
    spectra: int = 8
    letters: int = 400
    case: int = 60_000
    pictures: int = 24


_LIMITS = (
    _Limits(),
    _Limits(sentences=4, words=1500, rows=60, remarks=20, spectra=4, case=20_000, pictures=8),
    _Limits(sentences=1, words=200, rows=30, remarks=10, spectra=2, letters=160, case=4_000, pictures=2),
    _Limits(sentences=0, words=0, rows=15, remarks=5, spectra=1, letters=80, case=500, pictures=0),
)


def render(folder: Path, show_text: bool = False, page: Path | None = None) -> Path:
    """Write a run's report, whole or not at all, readable by its owner alone, and return its path.

    Args:
        folder: holds `run.json` and `records.jsonl`, and `texts.jsonl` or `images.jsonl` unless it was deleted.
        show_text: print the private texts or images.
        page: the file to write; `report.html` in the folder when None.

    Raises:
        BadInputError: the folder is not that of a run, a file is damaged, or the disk refuses.
    """
    info = _read_info(folder)
    try:
        records = list(read_lines(folder / "records.jsonl", Record))
        texts = list(read_lines(folder / "texts.jsonl", Texts))
        pictures = list(read_lines(folder / "images.jsonl", Pictures))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the records in {folder} ({error}); run the audit again") from None
    if not records:
        raise BadInputError(f"{folder} has no records yet; run 'gradaudit run ... --out {folder}' first")
    html = render_html(info, records, texts, summarize(records), show_text, pictures)
    return write_page(page or folder / "report.html", html, private=True)


def render_html(
    info: RunInfo,
    records: Sequence[Record],
    texts: Sequence[Texts],
    summaries: Sequence[Summary],
    show_text: bool,
    pictures: Sequence[Pictures] = (),
) -> str:
    """Return the report as HTML.

    Args:
        info: what the run says of itself.
        records: one a batch and attack.
        texts: the private texts; may be empty.
        summaries: one a (setting, attack).
        show_text: print words and images; otherwise no word of the texts and no pixel is on the page.
        pictures: the private images; may be empty.
    """
    for limits in _LIMITS:
        html = _page(info, records, texts, summaries, show_text, limits, pictures)
        if len(html.encode()) < MOST_BYTES:
            break
    return html


def _page(
    info: RunInfo,
    records: Sequence[Record],
    texts: Sequence[Texts],
    summaries: Sequence[Summary],
    show_text: bool,
    limits: _Limits,
    pictures: Sequence[Pictures],
) -> str:
    veil = Veil(() if show_text else texts)
    order = sections.pair_order(info, summaries, records)
    every_row = sections.result_rows(summaries, records, order)
    rows, rows_left_out = _first_rows(every_row, limits.rows)
    pairs = sentence_pairs(records, texts, show_text, order, limits.sentences, limits.words)
    settings = list(dict.fromkeys(setting for setting, _ in order))
    judged = verdicts(summaries, records)
    flags = sections.raised_flags(summaries, records)
    errors = sections.counted(records, lambda r: [veil(r.error)] if r.error is not None else [])
    notes = sections.counted(records, lambda r: [veil(note) for note in dict.fromkeys(r.notes)])
    spectra = _spectra(records, settings)
    diagnosed = sections.diagnoses(records, order)
    kind = scores_of(name for r in records for name in r.scores)
    page = page_of(kind.kind)
    grids = picture_grids(records, pictures, show_text, order, limits.pictures)
    names = [score.title for score in kind.all]
    spans = any(row.names_and_numbers.interval for found in rows.values() for row in found)
    words = any(row.words.interval for found in rows.values() for row in found)
    loads = any(r.load is not None for r in records)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            css=Markup((_HERE / "report.css").read_text(encoding="utf8")),
            info=info,
            limits=limits,
            verdicts=judged,
            facts=page.facts(every_row, records, grids),
            kind=kind,
            page=page,
            loads=loads,
            lpips=any(r.scores.get("lpips") is not None for r in records),
            grids=grids,
            has_pictures=bool(pictures),
            cautions=_cautions(info, records, flags, judged),
            steps=advice.next_steps(judged, summaries, records),
            kinds=advice.KINDS,
            who_sees=advice.who_sees(records),
            name=_name(info),
            headlines=HEADLINES,
            contents=(
                ("verdict", "Verdict"),
                ("next", "What to do next"),
                ("by-setting", "Setting by setting" if len(judged.settings) > 1 else ""),
                ("promised", "What the defenses promise" if info.promises else ""),
                ("results", "What each attack recovered"),
                ("given", "What the attacker was given"),
                ("covered", "What this audit covers"),
                ("texts", page.words["shown"]),
                ("spectra", "Directions in the gradient" if spectra else ""),
                ("diagnosis", "Why attacks stopped" if diagnosed else ""),
                ("flags", "When to distrust these numbers"),
                ("made", "For experts"),
            ),
            made=_date(info.made),
            score_names=names,
            columns=[
                *names,
                *(["Names, numbers"] if spans else []),
                *(_WORDS if words else ()),
                *_COUNTS[: None if loads else -1],
            ],
            rows=rows,
            rows_left_out=rows_left_out,
            spans=spans,
            words=words,
            threats=sections.threats(records, order),
            seen=sections.seen_shares(info, records, settings),
            pairs=pairs,
            open_pair=(opened := _worst(pairs, judged)),
            best_read=None if opened is None else best_read(opened),
            show_text=show_text,
            has_texts=bool(texts),
            marks=MARKS,
            certificates=CERTIFICATES,
            certified=any(s.certificate for pair in pairs for s in pair.shown),
            spectra=[(name, spectrum_svg(item), item) for name, item in spectra[: limits.spectra]],
            spectra_left_out=len(spectra[limits.spectra :]),
            diagnosis_names=DIAGNOSES,
            diagnoses=diagnosed,
            flags=flags,
            flag_meanings=FLAGS,
            errors=errors,
            notes=notes,
            published=sections.published_means(records, order),
            case=sections.as_json(info.case_data, veil, limits.case),
            model_title=str(info.model.get("title") or "not recorded"),
            fingerprint=str(info.model.get("fingerprint") or "not recorded"),
            random_weights=info.model.get("random_weights"),
            data=sections.as_json(info.data, veil, limits.case // 10),
            model=sections.as_json(info.model, veil, limits.case // 10),
        )
    )


def _date(made: str) -> str:
    try:
        when = datetime.datetime.fromisoformat(made)
    except ValueError:
        return clip(made, 40)
    return f"{when.day} {when:%B %Y, %H:%M} {when.tzname() or ''}".rstrip()


def _first_rows(
    rows: dict[str, list[sections.ResultRow]], most: int
) -> tuple[dict[str, list[sections.ResultRow]], int]:
    shown: dict[str, list[sections.ResultRow]] = {}
    left_out = 0
    for setting, found in rows.items():
        take = max(0, most - sum(map(len, shown.values())))
        left_out += len(found[take:])
        if take:
            shown[setting] = found[:take]
    return shown, left_out


def _name(info: RunInfo) -> str:
    """Return what the case is called: by its owner, or by its data."""
    own = info.case_data.get("name") if len(info.settings) < 2 else None  # a setting's name where there are several
    return str(own or info.data.get("where") or "data not recorded")


def _cautions(
    info: RunInfo, records: Sequence[Record], flags: Sequence[sections.Counted], judged: Verdicts
) -> list[str]:
    """Return what a reader must know before believing the verdict, one sentence each.

    That a weaker attack failed says nothing against a verdict that it leaks.
    """
    found = []
    if info.model.get("random_weights"):
        found.append("The model has random weights, so the numbers say little about a trained model.")
    attacked = [r for r in records if r.attack != BLIND]
    missed = sum(r.diagnosis is not None and r.diagnosis.verdict == "optimizer failed" for r in attacked)
    lower = judged.overall.level != "leaks"
    if missed and lower:
        found.append(
            f"In {missed} of {len(attacked)} attacked batches the truth fits the update better than the "
            "guess: a better search would have read more."
        )
    if lower and {"dropout-not-modeled", "defense-not-modeled"} & {flag.text for flag in flags}:
        found.append(
            "Some attacks did not reckon with the client’s dropout or defenses: their scores are lower bounds."
        )
    if flags:
        raised = "A flag was raised; it is" if len(flags) == 1 else f"{len(flags)} flags were raised; they are"
        found.append(f"{raised} explained under “When to distrust these numbers”.")
    return found


def _worst(pairs: Sequence[SentencePairs], judged: Verdicts) -> SentencePairs | None:
    """Return the sentences to unfold: those of the strongest attack in the worst setting."""
    ranked = sorted(
        judged.settings, key=lambda name: (name != judged.worst, WORST_FIRST.index(judged.settings[name].level))
    )
    return next((pair for name in ranked for pair in pairs if pair.setting == name), None)


def _spectra(records: Sequence[Record], settings: Sequence[str]) -> list[tuple[str, Spectrum]]:
    first: dict[str, Spectrum] = {}
    for record in records:
        if record.spectrum is not None and record.spectrum.values:
            first.setdefault(record.setting, record.spectrum)
    return [(name, first[name]) for name in settings if name in first]


def _read_info(folder: Path) -> RunInfo:
    path = folder / "run.json"
    try:
        return RunInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInputError(
            f"{folder} is not the folder of a run (it has no run.json); make one with 'gradaudit run ... --out DIR'"
        ) from None
    except OSError as error:
        raise BadInputError(f"cannot read {path} ({error.strerror}); make it readable and try again") from None
    except ValidationError as error:
        raise BadInputError(
            f"{path} is empty or damaged ({error.errors()[0]['msg']}); run 'gradaudit run ... --out {folder}' again"
        ) from None
