"""The report without a browser: what it says, what it hides, how large it grows, and the verdict's rules."""

from __future__ import annotations

import json
import re
import stat
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradaudit.errors import BadInputError
from gradaudit.flags import FLAGS
from gradaudit.record import (
    SCORES,
    Diagnosis,
    Interval,
    Mark,
    Record,
    RunInfo,
    SentenceMarks,
    Spectrum,
    Summary,
    Texts,
    append_line,
)
from gradaudit.report.render import MOST_BYTES, render, render_html
from gradaudit.report.sections import threats
from gradaudit.report.spectrum import spectrum_svg
from gradaudit.report.verdict import verdict, verdicts
from gradaudit.report.visible import Veil, block, visible
from gradaudit.report.wording import KNOWLEDGE

HOSTILE = (
    "<script>alert(1)</script>",
    '"onmouseover="alert(2)',
    "abc\u202edef",
    "zero\u200bwidth",
    "nul\x00l",
    "<!--",
    "</style>",
    "{{7*7}}",
    "new\u2028line",
)
ORIGINAL = ("Zbigniew", "Kowalczyk", "received", "morphine", "on", "Wednesday", "by", "orthopedics")
RECOVERED = ("Zbigniew", "received", "Kowalczyk", "penicillin", "on", "Wednesday")
ORIGINAL_MARKS: tuple[Mark, ...] = (
    "right",
    "misplaced",
    "misplaced",
    "missing",
    "right",
    "right",
    "missing",
    "missing",
)
RECOVERED_MARKS: tuple[Mark, ...] = ("right", "misplaced", "misplaced", "wrong", "right", "right")


def make_info(**changed: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "program": "0.1.0",
        "case": "3f9c0a7be1d24480",
        "case_data": {"selection": "0-5:q,k,v", "seed": 101, "attacks": ["decode", "tag", "blind"]},
        "model": {
            "title": "minilm",
            "fingerprint": "a1b2c3d4e5f60718293a",
            "width": 384,
            "depth": 6,
            "parameters": 22_700_000,
            "random_weights": False,
        },
        "data": {"source": "embedded sample", "sha256": "9f86d081884c7d65", "rows": 200},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.1.0", "numpy": "2.4.6"},
        "device": "cpu",
        "settings": {
            "dropout off": "one gradient of a batch of 4 sentences, dropout off, no defense",
            "pruned 90 %": "the same, with the smallest 90 % of the update set to zero",
            "noise 0.01": "the same, with Gaussian noise of standard deviation 0.01 on the update",
        },
        "made": "2025-11-21T04:30:00+00:00",
    }
    return RunInfo(**{**fields, **changed})


def make_marks(exact: bool = False, **changed: Any) -> SentenceMarks:
    whole: tuple[Mark, ...] = ("right",) * len(ORIGINAL)
    fields: dict[str, Any] = {
        "recovered": whole if exact else RECOVERED_MARKS,
        "original": whole if exact else ORIGINAL_MARKS,
        "certificate": "proven" if exact else "guess",
        "rougeL": 100.0 if exact else 57.1,
        "exact": exact,
    }
    return SentenceMarks(**{**fields, **changed})


def make_record(**changed: Any) -> Record:
    fields: dict[str, Any] = {
        "case": "3f9c0a7be1d24480",
        "setting": "dropout off",
        "batch": 0,
        "attack": "decode",
        "scores": dict.fromkeys(SCORES, 12.0),
        "baseline": dict.fromkeys(SCORES, 8.0),
        "load": 0.11,
        "tokens": 42,
        "batch_size": 2,
        "seconds": 1.5,
    }
    return Record(**{**fields, **changed})


def make_texts(record: Record, words: Sequence[str] = RECOVERED, exact: bool = False) -> Texts:
    theirs = ORIGINAL if exact else tuple(words)
    count = len(record.sentences)
    return Texts(
        case=record.case,
        setting=record.setting,
        batch=record.batch,
        attack=record.attack,
        originals=(" ".join(ORIGINAL),) * count,
        recovered=(" ".join(theirs),) * count,
        original_words=(ORIGINAL,) * count,
        recovered_words=(theirs,) * count,
    )


def make_summaries(records: Sequence[Record]) -> list[Summary]:
    """Summarize in the plainest way, so that these tests do not lean on the metrics."""

    def interval(values: list[float | None]) -> Interval:
        known = [v for v in values if v is not None]
        if not known:
            return Interval(mean=None, n=0)
        mean = sum(known) / len(known)
        if len(known) < 2:
            return Interval(mean=mean, worst=max(known), n=1)
        return Interval(mean=mean, low=min(known), high=max(known), worst=max(known), n=len(known))

    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.setting, record.attack), []).append(record)
    return [
        Summary(
            case=own[0].case,
            setting=setting,
            attack=attack,
            n=len(own),
            failed=sum(r.error is not None for r in own),
            scores={name: interval([r.scores.get(name) for r in own]) for name in SCORES},
            baseline={name: interval([r.baseline.get(name) for r in own]) for name in SCORES},
            sensitive=interval([r.sensitive for r in own]) if any(r.sensitive is not None for r in own) else None,
            seconds=sum(r.seconds for r in own) / len(own),
            flags=tuple(dict.fromkeys(flag for r in own for flag in r.flags)),
        )
        for (setting, attack), own in groups.items()
    ]


def make_run(batches: int = 3) -> tuple[list[Record], list[Texts]]:
    """Three settings, three attacks, everything a report can show, one hostile text and one failed batch."""
    records: list[Record] = []
    texts: list[Texts] = []
    given = {"batch_size": 2, "dropout": 0.0, "training": {"optimizer": "none", "epochs": 1}, "defenses": []}
    for setting, share in (("dropout off", 1.0), ("pruned 90 %", 0.4), ("noise 0.01", 0.08)):
        noisy = share < 0.1
        for attack, strength in (("decode", 88.0), ("tag", 31.0), ("blind", 8.0)):
            for batch in range(batches):
                read = attack == "decode" and share == 1.0
                error = "out of memory at step 3" if attack == "tag" and batch == 2 else None
                score = 0.0 if error else (8.0 if attack == "blind" else strength * share) + 2.0 * batch
                record = make_record(
                    setting=setting,
                    attack=attack,
                    batch=batch,
                    scores={**dict.fromkeys(SCORES, score), "exact": 50.0 if read else 0.0},
                    baseline={**dict.fromkeys(SCORES, 7.9), "exact": 0.0},
                    published={"LAMP": {"rouge1": score + 4, "rouge2": score, "rougeL": score + 3}},
                    flags=(next(iter(FLAGS)),) if attack == "tag" else (),
                    error=error,
                    knowledge={} if attack == "blind" else {**given, **({"lengths": [10, 12]} if read else {})},
                    sensitive=score * 0.9 if share > 0.1 else 2.0,
                    sensitive_baseline=2.0,
                    certificates={"proven": 1, "guess": 1} if read else {},
                    spectrum=Spectrum(
                        layer=0,
                        roles="qkv",
                        values=tuple(
                            10 ** (-2.5 * i / 42) if i < 42 else (2e-3 if noisy else 3e-8) * 0.995**i
                            for i in range(384)
                        ),
                        rank=42,
                        tokens=42,
                        width=384,
                        confidence=1.9 if noisy else 1.1e5,
                    ),
                    share_of_parameters=0.117,
                    diagnosis=None
                    if attack == "blind"
                    else Diagnosis(truth=0.0, guess=0.4, verdict="solved" if read else "optimizer failed"),
                    sentences=() if error else (make_marks(exact=read), make_marks()),
                    notes=("not identifiable: two words embed alike",) if noisy and attack == "decode" else (),
                )
                records.append(record)
                if not error:
                    words = (*RECOVERED[:4], *HOSTILE) if attack == "tag" and batch == 0 else RECOVERED
                    item = make_texts(record, words)
                    if read:
                        exact = (ORIGINAL, *item.recovered_words[1:])
                        item = item.model_copy(update={"recovered_words": exact})
                    texts.append(item)
    return records, texts


def make_folder(folder: Path, batches: int = 3) -> Path:
    records, texts = make_run(batches)
    (folder / "run.json").write_text(make_info().model_dump_json())
    for record in records:
        append_line(folder / "records.jsonl", record)
    for item in texts:
        append_line(folder / "texts.jsonl", item, private=True)
    return folder


def page(show_text: bool = False, **changed: Any) -> str:
    records, texts = make_run()
    fields: dict[str, Any] = {"info": make_info(), "records": records, "texts": texts, **changed}
    return render_html(summaries=make_summaries(fields["records"]), show_text=show_text, **fields)


class Markup(HTMLParser):
    """Checks that tags balance and ids are unique, and collects the text a reader sees."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input", "path", "circle", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.labelled += [value or "" for name, value in attrs if name == "aria-labelledby"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


# --- the page ---


@pytest.mark.parametrize("show_text", [False, True])
def test_markup_is_well_formed_and_closed_to_the_network(show_text: bool) -> None:
    html = page(show_text)
    seen = Markup(html)
    assert seen.open == []
    assert len(seen.ids) == len(set(seen.ids))
    assert set(seen.labelled) <= set(seen.ids)
    assert '<html lang="en">' in html
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    assert "<script" not in html.lower()
    assert not {"script", "link", "img", "iframe", "object", "base", "form", "a"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert not re.search(r"https?://|url\(|@import|//[a-z]", html, re.IGNORECASE)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", html)


def test_headings_step_by_one_level() -> None:
    levels = [int(tag[1]) for tag in Markup(page()).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_tables_have_captions_and_scopes() -> None:
    html = page()
    tables = re.findall(r"<table.*?</table>", html, re.DOTALL)
    assert len(tables) >= 5
    for table in tables:
        assert "<caption>" in table
        assert all("scope=" in head for head in re.findall(r"<th\b[^>]*>", table))


def test_words_are_hidden_unless_asked_for() -> None:
    html = page(show_text=False)
    for word in (*ORIGINAL, *RECOVERED):
        if word not in ("on", "by"):  # the page's own words
            assert word.casefold() not in html.casefold()
    for part in set(HOSTILE) - {"<!--", "</style>"}:  # the page has a style of its own
        assert part not in html
        assert part.replace("<", "&lt;") not in html
    assert "█" in html
    assert "gradaudit report DIR --show-text" in html
    assert "Zbigniew" in page(show_text=True)


def test_words_quoted_by_errors_remarks_and_the_case_are_hidden() -> None:
    records, texts = make_run()
    leaky = [
        r.model_copy(
            update={
                "error": "token 'Kowalczyk' is not in the vocabulary" if r.error else None,
                "notes": ("stuck at penicillin",),
            }
        )
        for r in records
    ]
    info = make_info(case_data={"texts": [" ".join(ORIGINAL)], "seed": 1})
    html = page(records=leaky, texts=texts, info=info)
    assert "is not in the vocabulary" in html
    assert "stuck at" in html
    for word in ("kowalczyk", "penicillin", "morphine"):
        assert word not in html.casefold()


def test_hidden_words_keep_their_marks_and_only_their_rough_length() -> None:
    html = page(show_text=False)
    for mark in ("right", "misplaced", "wrong", "missing"):
        assert re.search(rf'<bdi class="{mark}">█+</bdi>', html)
    assert len({block(word) for word in ("a", "ab", "abcd", "abcdefg", "abcdefgh", "a" * 40)}) == 3
    assert "3 right place, 2 wrong place, 1 wrong word" in html


def test_marks_have_a_text_alternative() -> None:
    html = page(show_text=True)
    assert '<bdi class="wrong">penicillin</bdi><span class="vh"> (wrong word)</span>' in html
    assert '<bdi class="missing">morphine</bdi><span class="vh"> (missing)</span>' in html
    assert '<bdi class="misplaced">received</bdi><span class="vh"> (wrong place)</span>' in html
    assert '<bdi class="right">Zbigniew</bdi> ' in html
    assert "3 right place, 2 wrong place, 3 missing" in html


def test_hostile_words_are_shown_as_text() -> None:
    html = page(show_text=True)
    text = Markup(html).text
    assert "<script>alert(1)</script>" in text
    assert '"onmouseover="alert(2)' in text
    assert "abc⟨U+202E⟩def" in text
    assert "zero⟨U+200B⟩width" in text
    assert "nul⟨U+0000⟩l" in text
    assert "new⟨U+2028⟩line" in text
    assert "{{7*7}}" in text


def test_hostile_names_are_neutralized_everywhere() -> None:
    evil = '"><script>alert(3)</script>\u202e'
    records, texts = make_run()
    records = [r.model_copy(update={"setting": evil + r.setting, "attack": evil + r.attack}) for r in records]
    records = [
        r.model_copy(
            update={
                "error": evil,
                "notes": (evil,),
                "flags": (evil,),
                "knowledge": {evil: evil},
                "sentences": tuple(m.model_copy(update={"certificate": evil}) for m in r.sentences),
                "spectrum": r.spectrum and r.spectrum.model_copy(update={"roles": evil}),
                "published": {evil: {"rouge1": 1.0}},
            }
        )
        for r in records
    ]
    info = make_info(
        program=evil,
        case=evil,
        case_data={evil: evil},
        model={"title": evil, "fingerprint": evil},
        data={evil: evil},
        versions={evil: evil},
        device=evil,
        settings={evil: evil},
        made=evil,
    )
    html = page(show_text=True, info=info, records=records, texts=texts)
    seen = Markup(html)
    assert seen.open == []
    assert "script" not in seen.tags
    assert "\u202e" not in html


def test_visible_leaves_living_scripts_alone() -> None:
    for text in ("naïve Zürich", "Здравствуйте", "日本語", "हिन्दी", "שלום", "e\u0301"):
        assert visible(text) == text
    assert visible("a\u0301\u0301\u0301\u0301\u0301") == "a\u0301\u0301\u0301⟨U+0301⟩⟨U+0301⟩"
    assert visible("\ud800") == "⟨U+D800⟩"
    assert visible("a\nb\tc", keep="\n") == "a\nb⟨U+0009⟩c"


def test_veil_hides_whole_words_only() -> None:
    record = make_record(sentences=(make_marks(),))
    veil = Veil([make_texts(record)])
    assert veil("on Wednesday, ortho") == "on ███████, ortho"
    assert Veil([])("Wednesday") == "Wednesday"


def test_without_texts_marks_are_still_shown() -> None:
    html = page(show_text=True, texts=[])
    assert re.search(r'<bdi class="missing">█+</bdi>', html)
    assert "texts.jsonl" in html
    assert Markup(html).open == []


def test_sections_say_what_was_measured() -> None:
    text = Markup(page()).text
    assert "Private text can be read back" in text
    assert "90.0 [88.0, 92.0] blind 7.9" in text
    assert "out of memory at step 3" in text
    assert "not identifiable: two words embed alike" in text
    assert "Lengths how long each sentence is, in tokens given 10, 12" in text
    assert "Labels the class label of each sentence not given" in text
    assert "0-5:q,k,v" in text
    assert "11.7 %" in text
    assert "trained weights" in text
    assert "docs/flags.md#" + next(iter(FLAGS)) in text
    assert FLAGS[next(iter(FLAGS))][1:] in text
    assert "LAMP" in text
    assert "2.13.0" in text
    assert "“noise 0.01” no attack read back clearly more" in text


def test_random_weights_are_said_at_the_top() -> None:
    model = {**make_info().model, "random_weights": True}
    html = page(info=make_info(model=model))
    assert "(random weights)" in html
    assert "random weights, not trained ones" in html
    assert "say little about a trained model" in html


def test_undefined_scores_and_single_batches_have_no_interval() -> None:
    record = make_record(scores={**dict.fromkeys(SCORES, 12.0), "rouge2": None}, sentences=(make_marks(),))
    html = page(records=[record], texts=[], info=make_info(model={}, data={}, versions={}, settings={}))
    assert Markup(html).open == []
    assert "[" not in Markup(html).text.split("Scores by setting")[1].split("The load is")[0]


def test_knowledge_items_are_all_explained() -> None:
    types = pytest.importorskip("gradaudit.types")
    assert set(KNOWLEDGE) == set(types.Knowledge.__dataclass_fields__)


def test_attacks_that_were_given_the_same_share_one_table() -> None:
    same = [make_record(attack=name, knowledge={"batch_size": 2}) for name in ("a", "b", "blind")]
    found = threats(same, [("dropout off", name) for name in ("a", "b", "blind")])
    assert [item.who for item in found] == ["Every attack in every setting"]
    differing = [make_record(batch=i, knowledge={"lengths": [i, 2]}) for i in range(3)]
    [item] = threats(differing, [("dropout off", "decode")])
    assert item.given[0][2] == "differs by batch, for example 0, 2"


# --- size ---


def test_500_records_stay_below_the_limit() -> None:
    words = tuple(f"word{i}" for i in range(120))
    marks: tuple[Mark, ...] = ("right",) * 120
    sentences = (make_marks(recovered=marks, original=marks),) * 8
    records = [
        make_record(batch=i, attack=f"attack{i % 5}", setting=f"s{i % 4}", sentences=sentences) for i in range(500)
    ]
    texts = [
        make_texts(r).model_copy(update={"original_words": (words,) * 8, "recovered_words": (words,) * 8})
        for r in records
    ]
    html = page(show_text=True, records=records, texts=texts)
    assert len(html.encode()) < MOST_BYTES
    assert re.search(r"\d+ of 200 sentences are left out", html)
    assert "… and 40 more words" in html
    assert Markup(html).open == []


def test_no_run_is_too_large_for_the_limit() -> None:
    long = "\u202e" * 3000
    sentences = (make_marks(recovered=("right",) * 300, original=("right",) * 300),) * 4
    records = [
        make_record(
            batch=i,
            attack=f"{i}{long}",
            setting=f"{i % 40}{long}",
            sentences=sentences,
            error=f"{i}{long}" if i % 2 else None,
            notes=(f"{i}{long}",),
            knowledge={f"{i}": long},
        )
        for i in range(500)
    ]
    texts = [
        make_texts(r).model_copy(
            update={"original_words": ((long,) * 300,) * 4, "recovered_words": ((long,) * 300,) * 4}
        )
        for r in records
    ]
    html = page(show_text=True, records=records, texts=texts, info=make_info(case_data={"x": long * 30}))
    assert len(html.encode()) < MOST_BYTES
    assert Markup(html).open == []


# --- files ---


@pytest.fixture
def summaries_here(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = pytest.importorskip("gradaudit.metrics.summary")
    assert callable(summary.summarize)
    monkeypatch.setattr(summary, "summarize", make_summaries)


@pytest.mark.usefixtures("summaries_here")
def test_report_is_written_whole_and_private_when_it_shows_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = render(folder)
    assert path == folder / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert "zbigniew" not in path.read_text().casefold()
    assert stat.S_IMODE(render(folder, show_text=True).stat().st_mode) == 0o600
    assert "Zbigniew" in path.read_text()
    assert sorted(p.name for p in folder.iterdir()) == [
        "records.jsonl",
        "report.html",
        "run.json",
        "texts.jsonl",
    ]


def test_report_uses_the_real_summaries(tmp_path: Path) -> None:
    pytest.importorskip("gradaudit.metrics.summary")
    assert "Privacy audit: Leaks" in render(make_folder(tmp_path)).read_text()


@pytest.mark.usefixtures("summaries_here")
def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    (folder / "report.html").write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(BadInputError, match="No space left on device"):
        render(folder)
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob(".report-*"))


@pytest.mark.usefixtures("summaries_here")
def test_missing_and_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no run\.json.*gradaudit run \.\.\. --out DIR"):
        render(tmp_path)
    (tmp_path / "run.json").write_text("")
    with pytest.raises(BadInputError, match=r"run\.json is empty or damaged.*gradaudit run"):
        render(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"program": 1}))
    with pytest.raises(BadInputError, match="damaged"):
        render(tmp_path)
    (tmp_path / "run.json").write_text(make_info().model_dump_json())
    with pytest.raises(BadInputError, match=r"no records yet.*gradaudit run"):
        render(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"case": 1}\n')
    with pytest.raises(BadInputError, match="line 1 is not a Record"):
        render(tmp_path)


# --- the drawing ---


def make_spectrum(**changed: Any) -> Spectrum:
    fields: dict[str, Any] = {
        "layer": 0,
        "roles": "qkv",
        "values": (1.0, 0.1, 1e-9, 0.0),
        "rank": 2,
        "tokens": 2,
        "width": 4,
        "confidence": 1e8,
    }
    return Spectrum(**{**fields, **changed})


def test_spectrum_is_labelled_and_well_formed() -> None:
    tree = ElementTree.fromstring(spectrum_svg(make_spectrum(roles="<q>&\u202e")))
    assert tree.attrib["role"] == "img"
    assert "viewBox" in tree.attrib
    assert "block 0 (<q>&⟨U+202E⟩)" in (tree[0].text or "")
    labels = [node.text for node in tree.iter("text")]
    assert {"rank = 2", "tokens b = 2", "width d = 4"} <= set(labels)


@pytest.mark.parametrize("values", [(), (1.0,), (0.0, 0.0), (1.0,) * 5000, (float("nan"), 1.0), (1.0, 1e-300)])
def test_spectrum_takes_any_values(values: tuple[float, ...]) -> None:
    drawn = spectrum_svg(make_spectrum(values=values, tokens=None, rank=len(values), width=8))
    ElementTree.fromstring(drawn)
    assert "tokens b" not in drawn
    assert "nan" not in drawn
    assert len(drawn) < 30_000


def test_spectrum_points_beyond_its_edge_when_tokens_exceed_width() -> None:
    assert "tokens b = 9000 →" in spectrum_svg(make_spectrum(tokens=9000))


# --- the verdict ---


def judge(*records: Record) -> Any:
    return verdict(make_summaries(records), records)


def scored(value: float, **changed: Any) -> Record:
    return make_record(
        scores={**dict.fromkeys(SCORES, value), "exact": changed.pop("exact", 0.0)},
        baseline={**dict.fromkeys(SCORES, 8.0), "exact": changed.pop("guessed", 0.0)},
        **changed,
    )


def test_leaks_when_one_sentence_is_exact() -> None:
    found = judge(scored(50.0, sentences=(make_marks(exact=True), make_marks())), scored(0.0, batch=1))
    assert found.level == "leaks"
    assert "“decode” recovered 1 of 4 sentences exactly" in found.sentence
    assert "at least one sentence exactly" in found.rule


def test_leaks_when_a_long_sentence_is_almost_exact() -> None:
    near = make_marks(rougeL=95.0)
    assert judge(scored(20.0, sentences=(near,))).level == "leaks"
    short = make_marks(rougeL=95.0, original=("right",) * 4)
    assert judge(scored(20.0, sentences=(short,))).level != "leaks"


def test_leaks_without_marks_is_read_from_the_scores() -> None:
    assert judge(scored(9.0, exact=50.0)).level == "leaks"
    assert judge(scored(9.0, exact=50.0, guessed=50.0)).level == "not shown"


def test_what_blind_guessing_matches_is_no_leak() -> None:
    exact = (make_marks(exact=True), make_marks())
    blind = scored(10.0, attack="blind", sentences=exact)
    assert judge(scored(9.0, sentences=exact), blind).level == "not shown"
    assert judge(scored(9.0, sentences=exact[::-1]), blind).level == "leaks"
    assert judge(scored(9.0, sentences=exact, guessed=50.0)).level == "not shown"


def test_the_blind_attack_never_drives_a_verdict() -> None:
    assert judge(scored(99.0, attack="blind", sentences=(make_marks(exact=True),))).level == "inconclusive"


def test_partly_needs_the_interval_above_the_baseline_by_the_margin() -> None:
    assert judge(scored(13.0), scored(20.0, batch=1)).level == "partly"
    assert judge(scored(12.9), scored(20.0, batch=1)).level == "not shown"
    found = judge(scored(28.0))
    assert found.level == "partly"
    assert "28.0 (one batch) of 100 in ROUGE-L, blind guessing 8.0" in found.sentence
    assert judge(scored(27.9)).level == "not shown"


def test_partly_on_names_and_numbers_and_on_a_single_bad_batch() -> None:
    spans = [scored(8.0, batch=i, sensitive=40.0, sensitive_baseline=1.0) for i in range(2)]
    assert "names and numbers" in judge(*spans).sentence
    bad = judge(scored(0.0), scored(58.0, batch=1))
    assert bad.level == "partly"
    assert "on its worst batch" in bad.sentence
    assert judge(scored(0.0), scored(57.9, batch=1)).level == "not shown"


def test_not_shown_never_says_safe() -> None:
    found = judge(scored(8.0), scored(0.0, batch=1, error="out of memory"))
    assert found.level == "not shown"
    assert "not evidence that the update is safe" in found.sentence
    assert "1 batch of 2 failed" in found.sentence
    assert "never means “safe”" in found.rule


def test_inconclusive_when_nothing_was_judged() -> None:
    found = judge(scored(0.0, error="out of memory"), scored(0.0, batch=1, error="out of memory"))
    assert found.level == "inconclusive"
    assert "all 2 batches failed" in found.sentence
    assert judge().level == "inconclusive"


def test_without_truth_certificates_judge() -> None:
    unknown: dict[str, Any] = {"scores": dict.fromkeys(SCORES), "baseline": dict.fromkeys(SCORES)}
    assert judge(make_record(**unknown, certificates={"proven": 1})).level == "leaks"
    assert judge(make_record(**unknown, certificates={"likely": 2})).level == "partly"
    assert judge(make_record(**unknown, certificates={"guess": 2})).level == "not shown"
    assert judge(make_record(**unknown)).level == "inconclusive"
    assert judge(scored(8.0, certificates={"proven": 1})).level == "not shown"


def test_the_overall_verdict_is_the_worst_setting() -> None:
    quiet, broken = scored(8.0, setting="quiet"), scored(0.0, setting="broken", error="out of memory")
    records = [quiet, broken]
    both = verdicts(make_summaries(records), records)
    assert {name: found.level for name, found in both.settings.items()} == {
        "quiet": "not shown",
        "broken": "inconclusive",
    }
    assert both.overall.level == "inconclusive"
    assert judge(quiet, broken, scored(40.0, setting="loud")).level == "partly"
    leak = scored(9.0, setting="leak", sentences=(make_marks(exact=True),))
    assert judge(quiet, broken, scored(40.0, setting="loud"), leak).level == "leaks"
    assert "none of the 2 settings" in judge(quiet, scored(8.0, setting="still")).sentence
